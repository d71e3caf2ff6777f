"""Kernels for CPU tensors, compiled by numba: each costs about the memory it has to read."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels.cpu_sizes import DIGIT, LINE_BYTES, STRIPE, STRIPES, TILE, WINDOW, WORD
from oktopk.kernels.cpu_team import Team
from oktopk.kernels.linking import Library
from oktopk.kernels.reference import ReferenceKernels
from oktopk.kernels.tensors import UNKNOWN, is_same, require_same_size, require_whole, version, written
from oktopk.types import Difference, Source, SparseVector, index_dtype

if TYPE_CHECKING:
    from oktopk.kernels import cpu_loops as loops
    from oktopk.kernels import cpu_sparse as sparse
else:
    loops, sparse = Library("oktopk.kernels.cpu_loops"), Library("oktopk.kernels.cpu_sparse")

SAMPLE = 1 << 15  # entries that tell a threshold; more = fewer candidates, slower sample
SHARE = 64  # a sample is at most one of this many entries
SEED = 0x1E3779B97F4A7C15  # where in its stretch a sampled line lies; any positive int64
SLACK = 1.25  # room for candidates, as a multiple of k
DEVIATIONS = 4  # by how many standard deviations of the sample more candidates are taken; fewer = more second scans
SMALL = 1 << 15  # vectors up to this size are candidates as a whole
CHUNK = 1 << 17  # entries of a float16 or bfloat16 gradient converted at a time

_BITS = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32), 8: (torch.int64, np.uint64)}
_NEVER = np.uint64(2**64 - 1)  # a key that none reaches
_FLOATS = (torch.float32, torch.float64)  # what the loops calculate in
_FLOAT32, _UINT32 = struct.Struct("=f"), struct.Struct("=I")


class CpuKernels(ReferenceKernels):
    """Compiled kernels. What they do not specialise (integers, residuals of half precision) the reference does.

    An instance owns its buffers, so it serves one thread at a time. What it returns is the caller's to keep.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, np.dtype], np.ndarray] = {}  # by use and dtype
        self._counters = np.zeros(1 << DIGIT, np.int64)
        self._candidates: _Candidates | None = None
        self._team = Team()

    @property
    def scratch_bytes(self) -> int:
        """Memory these kernels hold between calls."""
        return sum(buffer.nbytes for buffer in self._buffers.values()) + self._counters.nbytes

    def all_below(self, pieces: Sequence[Tensor], limit: float) -> bool:
        return all(self._is_below(_bits(x), _key(limit, x.dtype)) for x in pieces)

    def accumulate_(self, residual: Tensor, grad: Tensor, k: int = 0) -> float:
        if residual.dtype not in _FLOATS or not residual.is_contiguous():
            return super().accumulate_(residual, grad, k)
        require_same_size(residual, grad)
        written(residual)
        if grad.dtype != residual.dtype:
            return self._accumulate_converted_(residual, grad)
        if k > 0:
            return self._scan_and_remember(_Sum.of(residual, residual, [grad]), k)
        total, addend = _numpy(residual), _numpy(grad)
        return float(sum(self._team.run(total.size, lambda a, b: loops.accumulate(total[a:b], addend[a:b]))))

    def add(self, out: Tensor, residual: Tensor, pieces: Sequence[Tensor], k: int = 0) -> float:
        plain = all(x.is_contiguous() for x in (out, residual, *pieces)) and out.dtype == residual.dtype
        if residual.dtype not in _FLOATS or not plain:
            return super().add(out, residual, pieces, k)
        written(out)
        if any(piece.dtype != residual.dtype for piece in pieces):
            return self._add_converted(out, residual, pieces)
        return self._scan_and_remember(_Sum.of(out, residual, pieces), max(1, k))

    def scan(self, difference: Difference, k: int = 0) -> float:
        if not _is_plain(difference):
            return super().scan(difference, k)
        entries = _Subtraction.of(difference)
        # One entry or none will be asked for: not worth a sample. If it is, another scan will find it.
        energy = self._scan_and_remember(entries, k) if k > 1 else self._scan(entries, 1, int(_NEVER))[0]
        # Squares are summed in the precision of the entries: those of huge ones overflow.
        return energy if isfinite(energy) else super().scan(difference, k)

    def select_topk(self, x: Source, k: int) -> tuple[SparseVector, float]:
        if isinstance(x, Difference) and not _is_plain(x):
            return super().select_topk(x, k)
        candidates, self._candidates = self._candidates, None
        entries = _Subtraction.of(x) if isinstance(x, Difference) else _Plain.of(x)
        if candidates is None or not candidates.serve(x, k):
            candidates = self._gather(entries, k, self._low_key(entries, k))
        if candidates.count < k and candidates.key > 1:
            # The sample promised too much: let every entry that is not zero compete.
            candidates = self._gather(entries, k, 1)
        return self._keep(candidates, k)

    def select_above(self, x: Tensor, threshold: float) -> SparseVector:
        bits, key, count, at = _bits(x), _key(threshold, x.dtype), 0, 0
        size = min(SMALL, x.numel()) + WORD
        while True:
            indices, values = self._room(x, size, keep=count)
            count, at = loops.compact(bits, at, bits.size, key, indices, values, count)
            if at == bits.size:
                return _vector(x, indices[:count].copy(), values[:count].copy())
            size *= 2

    def count_above(self, x: Tensor, threshold: float) -> int:
        bits, key = _bits(x), _key(threshold, x.dtype)
        return int(sum(self._team.run(bits.size, lambda start, stop: loops.count_at_least(bits[start:stop], key))))

    def pick(self, x: Source, indices: Tensor) -> SparseVector:
        if isinstance(x, Difference) and not _is_plain(x):
            return super().pick(x, indices)
        values = np.empty(indices.numel(), _BITS[x.dtype.itemsize][1])
        if isinstance(x, Difference):
            terms = _Subtraction.of(x).terms
            good = sparse.pick_difference(*terms, _numpy(indices), values.view(terms[0].dtype))
        else:
            good = sparse.pick(_bits(x), _numpy(indices), values)
        if not good:
            raise IndexError(f"indices name entries outside of a vector of {x.numel()}.")
        return _vector(x, _numpy(indices), values)

    def magnitude_histogram(self, values: Tensor, shift: int, first: int, bins: int) -> Tensor:
        if values.dtype == torch.float64:  # what is not zero may be so as float32
            return super().magnitude_histogram(values, shift, first, bins)
        counts = np.zeros(bins + 2, np.int64)
        sparse.histogram(_bits(values.float()), shift, first, counts)
        return torch.from_numpy(counts[1:-1])

    def sum_sparse(self, vectors: Sequence[SparseVector]) -> SparseVector:
        if len({(v.indices.dtype, v.values.dtype) for v in vectors}) > 1 or vectors[0].values.dtype not in _FLOATS:
            return super().sum_sparse(vectors)
        if len(vectors) == 1:
            return vectors[0]
        for vector in vectors:
            require_same_size(vector.indices, vector.values)
        indices = [vector.indices.contiguous() for vector in vectors]
        values = [vector.values.contiguous() for vector in vectors]
        return self._sum(indices, values, vectors[0].numel)

    def common(self, vector: SparseVector, indices: Tensor) -> SparseVector:
        require_same_size(vector.indices, vector.values)
        kept, bits = self._room_for(vector)
        count = sparse.common(_numpy(vector.indices), _bits(vector.values), _numpy(indices), kept, bits)
        return _vector(vector, kept[:count], bits[:count])

    def above(self, vector: SparseVector, threshold: float, lower: float = 0.0, ties: int = 0) -> SparseVector:
        if vector.values.dtype != torch.float32:
            return super().above(vector, threshold, lower, ties)
        require_same_size(vector.indices, vector.values)
        kept, bits = self._room_for(vector)
        sure, low = _key(threshold, torch.float32), _key(lower, torch.float32)
        count = sparse.keep_at_least(_numpy(vector.indices), _bits(vector.values), sure, low, ties, kept, bits)
        return _vector(vector, kept[:count], bits[:count])

    def largest(self, vector: SparseVector, k: int) -> tuple[SparseVector, float]:
        require_same_size(vector.indices, vector.values)
        bits, (kept, values) = _bits(vector.values), self._room_for(vector)
        count, kth = loops.keep_largest(_numpy(vector.indices), bits, bits.size, k, self._counters, kept, values)
        if kth == 0:  # zeros among them, which are not to be chosen
            return super().largest(vector, k)
        return _vector(vector, kept[:count], values[:count]), _magnitude_of(int(kth), vector.values.dtype)

    def retain_(self, residual: Tensor, sent: SparseVector) -> float:
        if residual.dtype not in _FLOATS or not residual.is_contiguous():
            return super().retain_(residual, sent)
        require_same_size(sent.indices, sent.values)
        written(residual)
        change = sparse.subtract_at(_numpy(residual), _numpy(sent.indices), _numpy(sent.values))
        if np.isnan(change):
            raise IndexError(f"sent names entries outside of a residual of {residual.numel()}.")
        return float(change)

    def move_(self, difference: Difference, mean: SparseVector, sent: SparseVector) -> float:
        if not _is_plain(difference) or {mean.values.dtype, sent.values.dtype} != {difference.dtype}:
            return super().move_(difference, mean, sent)
        for vector in (mean, sent):
            require_same_size(vector.indices, vector.values)
        terms = _Subtraction.of(difference).terms
        for changed in (difference.shared, *difference.own):
            written(changed)
        indices, values = _numpy(sent.indices), _numpy(sent.values)
        tiles = (self._buffer(use, values.dtype, TILE) for use in ("rests", "extras"))
        placed, second, *taken, change = sparse.move(
            *terms, _numpy(mean.indices), _numpy(mean.values), indices, values, *tiles
        )
        for rest in (slice(taken[0], second), slice(taken[1], None)):
            change += sparse.take_from_difference(*terms, indices[rest], values[rest])
        if placed < mean.nnz or np.isnan(change):
            raise IndexError(f"mean or sent name entries outside of a vector of {difference.numel()}.")
        return float(change)

    def fill_(self, pieces: Sequence[Tensor], vector: SparseVector) -> None:
        if not all(piece.is_contiguous() and piece.dtype == pieces[0].dtype for piece in pieces):
            return super().fill_(pieces, vector)
        require_same_size(vector.indices, vector.values)
        for piece in pieces:
            written(piece)
        table = _Pieces.of(pieces)
        bits = _bits(vector.values.to(pieces[0].dtype))
        tile = self._buffer("tile", bits.dtype, TILE)
        placed = sparse.fill(table.addresses, table.ends, _numpy(vector.indices), bits, tile)
        if placed < vector.nnz:
            raise IndexError(f"indices must ascend below {table.ends[-1]}; entry {placed} does not.")
        return None

    def _is_below(self, bits: np.ndarray, key: Any) -> bool:
        return not any(self._team.run(bits.size, lambda start, stop: loops.any_at_least(bits[start:stop], key)))

    def _accumulate_converted_(self, residual: Tensor, grad: Tensor) -> float:
        """Sums a gradient of another precision, a piece at a time: a converted copy of all of it would cost memory."""
        piece = torch.from_numpy(self._buffer("converted", _numpy(residual).dtype, CHUNK))
        total = 0.0
        for start in range(0, residual.numel(), CHUNK):
            part = residual[start : start + CHUNK]
            converted = piece[: part.numel()].copy_(grad[start : start + CHUNK])
            total += loops.accumulate(part.numpy(), converted.numpy())
        return total

    def _add_converted(self, out: Tensor, residual: Tensor, pieces: Sequence[Tensor]) -> float:
        sizes = [piece.numel() for piece in pieces]
        require_whole(sum(sizes), residual)
        out.copy_(residual)
        parts = zip(out.split(sizes), pieces, strict=True)
        return sum(self._accumulate_converted_(part, piece.flatten()) for part, piece in parts)

    def _scan_and_remember(self, entries: _Entries, k: int) -> float:
        """The sum of squares; candidates are kept for `select_topk`."""
        energy, self._candidates = self._scan(entries, k, self._low_key(entries, k))
        return energy

    def _low_key(self, entries: _Entries, k: int) -> int:
        """A key that a little more than k entries should reach, as they are or will be, told from a sample."""
        numel = entries.source.numel()
        if numel <= SMALL or 2 * k >= numel:
            return 1
        keys = self._buffer("sample", _BITS[entries.source.dtype.itemsize][1], min(SAMPLE, numel // SHARE))
        drawn = entries.sample(keys)
        expected = drawn * k / numel
        rank = int(expected + DEVIATIONS * expected**0.5) + 1
        return max(1, int(loops.kth_largest(keys, drawn, min(rank, drawn), self._counters)[0]))

    def _gather(self, entries: _Entries, k: int, low: int) -> _Candidates:
        _, candidates = self._scan(entries, k, low)
        return candidates or self._scan_alone(entries, k, low)[1]

    def _scan(self, entries: _Entries, k: int, low: int) -> tuple[float, _Candidates | None]:
        """One pass: the sum of squares, and candidates unless they are spread so unevenly that room ran out."""
        source = entries.source
        stretches = self._team.stretches(source.numel())
        if len(stretches) == 1:
            return self._scan_alone(entries, k, low)
        room = _capacity(2 * k // len(stretches), source.numel())
        indices, values = self._room(source, room * len(stretches))
        key, places = np.uint64(low), {start: slice(i * room, (i + 1) * room) for i, (start, _) in enumerate(stretches)}

        def scan(start: int, stop: int) -> tuple[float, int, bool]:
            return entries.scan(start, stop, key, indices[places[start]], values[places[start]])

        energies, counts, complete = zip(*self._team.each(stretches, scan), strict=True)
        count = _close_up(indices, values, room, counts)
        candidates = _Candidates(low, indices, values, count, k, source, version(source)) if all(complete) else None
        return float(sum(energies)), candidates

    def _scan_alone(self, entries: _Entries, k: int, low: int) -> tuple[float, _Candidates]:
        source = entries.source
        indices, values = self._room(source, _capacity(k, source.numel()))
        energy, count = entries.scan_largest(np.uint64(low), k, indices, values, self._counters)
        return float(energy), _Candidates(low, indices, values, count, k, source, version(source))

    def _keep(self, candidates: _Candidates, k: int) -> tuple[SparseVector, float]:
        k = min(k, candidates.count)
        indices, values = np.empty(k, candidates.indices.dtype), np.empty(k, candidates.values.dtype)
        _, kth = loops.keep_largest(
            candidates.indices, candidates.values, candidates.count, k, self._counters, indices, values
        )
        return _vector(candidates.source, indices, values), _magnitude_of(int(kth), candidates.source.dtype)

    def _sum(self, indices: Sequence[Tensor], values: Sequence[Tensor], numel: int) -> SparseVector:
        places, contents = _Pieces.of(indices), _Pieces.of(values)
        sizes = np.diff(places.ends, prepend=0)
        like, room = _numpy(values[0]).dtype, int(places.ends[-1]) + WORD
        sums = self._buffer("sums", like, WINDOW)
        touched = self._buffer("touched", np.uint64, WINDOW // WORD)
        union, total = np.empty(room, _numpy(indices[0]).dtype), np.empty(room, like)
        cursors = np.zeros(sizes.size, np.int64)
        count = sparse.sum_windows(places.addresses, contents.addresses, sizes, cursors, sums, touched, union, total)
        if count < 0:
            self._buffers.clear()  # half a sum is left in them
            raise IndexError("indices of vectors to sum must ascend from 0 on, each once per vector.")
        return SparseVector(torch.from_numpy(union[:count]), torch.from_numpy(total[:count]), numel)

    def _room_for(self, vector: SparseVector) -> tuple[np.ndarray, np.ndarray]:
        """New arrays for the entries of a vector, and one more."""
        return (
            np.empty(vector.nnz + 1, _numpy(vector.indices).dtype),
            np.empty(vector.nnz + 1, _BITS[vector.values.itemsize][1]),
        )

    def _room(self, x: Source, size: int, keep: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Buffers for `size` candidates of x; the first `keep` entries survive growth."""
        self._candidates = None
        index = np.int32 if index_dtype(x.numel()) == torch.int32 else np.int64
        bits = _BITS[x.dtype.itemsize][1]
        return self._buffer("indices", index, size, keep), self._buffer("values", bits, size, keep)

    def _buffer(self, use: str, dtype: Any, size: int, keep: int = 0) -> np.ndarray:
        """A buffer that lives as long as these kernels: fresh pages cost more than the work on them. Zero when new."""
        name = (use, np.dtype(dtype))
        old = self._buffers.get(name)
        if old is None or old.size < size:
            self._buffers[name] = np.zeros(size, dtype)
            if old is not None:
                self._buffers[name][:keep] = old[:keep]
        return self._buffers[name][:size]


@dataclass(frozen=True)
class _Pieces:
    """Where tensors lie that are one vector together. They must outlive this."""

    addresses: np.ndarray
    ends: np.ndarray  # in the vector

    @classmethod
    def of(cls, pieces: Sequence[Tensor]) -> _Pieces:
        addresses = np.array([piece.data_ptr() for piece in pieces], np.int64)
        return cls(addresses, np.cumsum([piece.numel() for piece in pieces], dtype=np.int64))

    @classmethod
    def making_up(cls, whole: Tensor, pieces: Sequence[Tensor]) -> _Pieces:
        """Of pieces that must be as long as `whole` together."""
        table = cls.of(pieces)
        require_whole(int(table.ends[-1]), whole)
        return table


class _Entries(Protocol):
    """A vector that candidates are looked for in, as it lies in memory or while it is made."""

    @property
    def source(self) -> Source: ...

    def sample(self, keys: np.ndarray) -> int:
        """Fill `keys` with keys of entries from all over; how many."""
        ...

    def scan(self, start: int, stop: int, key: Any, indices: Any, values: Any) -> tuple[float, int, bool]:
        """Write the entries of a stretch that reach `key`. The sum of squares, how many, and whether all had room."""
        ...

    def scan_largest(self, key: Any, k: int, indices: Any, values: Any, counters: Any) -> tuple[float, int]:
        """As `scan` of all; when room runs out, at least the k largest."""
        ...


@dataclass(frozen=True)
class _Plain:
    """A vector in one piece. Its sum of squares is not asked for."""

    source: Tensor
    bits: np.ndarray

    @classmethod
    def of(cls, x: Tensor) -> _Plain:
        return cls(x, _bits(x))

    def sample(self, keys: np.ndarray) -> int:
        return int(loops.sample(self.bits, SEED, keys))

    def scan(self, start: int, stop: int, key: Any, indices: Any, values: Any) -> tuple[float, int, bool]:
        count, at = loops.compact(self.bits, start, stop, key, indices, values, 0)
        return 0.0, count, at == stop

    def scan_largest(self, key: Any, k: int, indices: Any, values: Any, counters: Any) -> tuple[float, int]:
        return 0.0, loops.compact_largest(self.bits, key, k, indices, values, counters)


@dataclass(frozen=True)
class _Sum:
    """What `source` becomes: a residual plus a gradient in pieces."""

    source: Tensor
    out: np.ndarray  # source
    residual: np.ndarray
    pieces: _Pieces
    past: bool  # write past the caches

    @classmethod
    def of(cls, out: Tensor, residual: Tensor, pieces: Sequence[Tensor]) -> _Sum:
        require_same_size(out, residual)
        past = out.data_ptr() != residual.data_ptr() and out.data_ptr() % LINE_BYTES == 0
        return cls(out, _numpy(out), _numpy(residual), _Pieces.making_up(residual, pieces), past)

    @property
    def terms(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.residual, self.pieces.addresses, self.pieces.ends

    def sample(self, keys: np.ndarray) -> int:
        return int(loops.sample_sum(*self.terms, 1, SEED, keys.view(self.residual.dtype)))

    def scan(self, start: int, stop: int, key: Any, indices: Any, values: Any) -> tuple[float, int, bool]:
        energy, count, at = loops.add_compact(self.out, *self.terms, start, stop, key, indices, values, 0, self.past)
        rest, _, _ = loops.add_compact(self.out, *self.terms, at, stop, _NEVER, indices, values, 0, self.past)
        return energy + rest, count, at == stop

    def scan_largest(self, key: Any, k: int, indices: Any, values: Any, counters: Any) -> tuple[float, int]:
        energy, count = loops.add_compact_largest(self.out, *self.terms, key, k, indices, values, counters, self.past)
        return energy, count


@dataclass(frozen=True)
class _Subtraction:
    """A difference, which is not written anywhere."""

    source: Difference
    shared: np.ndarray
    pieces: _Pieces

    @classmethod
    def of(cls, difference: Difference) -> _Subtraction:
        pieces = _Pieces.making_up(difference.shared, difference.own)
        return cls(difference, _numpy(difference.shared), pieces)

    @property
    def terms(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.shared, self.pieces.addresses, self.pieces.ends

    def sample(self, keys: np.ndarray) -> int:
        return int(loops.sample_sum(*self.terms, -1, SEED, keys.view(self.shared.dtype)))

    def scan(self, start: int, stop: int, key: Any, indices: Any, values: Any) -> tuple[float, int, bool]:
        words = self._words()
        energy, count, at = loops.subtract_compact(*self.terms, start, stop, key, indices, values, 0, words)
        rest, _, _ = loops.subtract_compact(*self.terms, at, stop, _NEVER, indices, values, 0, words)
        return energy + rest, count, at == stop

    def scan_largest(self, key: Any, k: int, indices: Any, values: Any, counters: Any) -> tuple[float, int]:
        energy, count = loops.subtract_compact_largest(*self.terms, key, k, indices, values, counters, self._words())
        return energy, count

    @staticmethod
    def _words() -> np.ndarray:
        """What one thread compares at once."""
        return np.empty(STRIPES * STRIPE // WORD, np.uint64)


@dataclass(frozen=True)
class _Candidates:
    """Entries of `source`: all whose key reaches `key`, or if those were too many at least the k largest."""

    key: int
    indices: np.ndarray
    values: np.ndarray  # bit patterns
    count: int
    k: int
    source: Source
    version: int

    def serve(self, x: Source, k: int) -> bool:
        """Whether these are candidates for the k largest of x as it is now."""
        return is_same(x, self.source) and k <= self.k and version(x) == self.version != UNKNOWN


def _capacity(k: int, numel: int) -> int:
    return min(max(int(SLACK * k), SMALL), numel) + WORD


def _close_up(indices: np.ndarray, values: np.ndarray, room: int, counts: Sequence[int]) -> int:
    """Move what each thread found in its part of the buffers to the front; how many there are."""
    total = 0
    for part, count in enumerate(counts):
        for buffer in (indices, values):
            buffer[total : total + count] = buffer[part * room : part * room + count]
        total += count
    return total


def _numpy(x: Tensor) -> np.ndarray:
    return x.detach().contiguous().numpy()


def _bits(x: Tensor) -> np.ndarray:
    """The bit patterns of x, in the same memory when it is contiguous."""
    signed, unsigned = _BITS[x.itemsize]
    return x.detach().contiguous().view(signed).numpy().view(unsigned)


def _is_plain(difference: Difference) -> bool:
    """Whether the loops can work on it."""
    vectors = (difference.shared, *difference.own)
    return difference.dtype in _FLOATS and all(v.dtype == difference.dtype and v.is_contiguous() for v in vectors)


def _vector(source: Source | SparseVector, indices: np.ndarray, bits: np.ndarray) -> SparseVector:
    """Entries of `source`, from their indices and bit patterns."""
    if isinstance(source, SparseVector):
        dtype, numel = source.values.dtype, source.numel
    else:
        dtype, numel = source.dtype, source.numel()
    values = torch.from_numpy(bits).view(_BITS[dtype.itemsize][0]).view(dtype)
    return SparseVector(torch.from_numpy(indices), values, numel)


def _key(threshold: float, dtype: torch.dtype) -> np.uint64:
    """The smallest key whose magnitude reaches `threshold`, which is rounded to `dtype` first; never that of zero."""
    if dtype != torch.float32:
        rounded = torch.tensor([threshold], dtype=dtype)
        return np.uint64(1) if bool(rounded[0] <= 0) else np.uint64(_bits(rounded)[0])
    number = ctypes.c_float(threshold)  # as C rounds, past the largest to infinity, in a tenth of a tensor's time
    return np.uint64(1) if number.value <= 0 else np.uint64(_UINT32.unpack(number)[0])


def _magnitude_of(key: int, dtype: torch.dtype) -> float:
    if dtype != torch.float32:
        return float(torch.tensor([key], dtype=_BITS[dtype.itemsize][0]).view(dtype)[0])
    number: float = _FLOAT32.unpack(_UINT32.pack(key))[0]
    return number
