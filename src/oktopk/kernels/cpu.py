"""Kernels for CPU tensors, compiled by numba: each costs about the memory it has to read."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels.cpu_arrays import BITS, FLOATS, NEVER, as_numpy, bits_of, is_plain, key_of, magnitude_of, vector_of
from oktopk.kernels.cpu_entries import Candidates, Entries, Pieces, Plain, Subtraction, Sum
from oktopk.kernels.cpu_sizes import DIGIT, TILE, WINDOW, WORD
from oktopk.kernels.cpu_team import Team
from oktopk.kernels.linking import Library
from oktopk.kernels.reference import ReferenceKernels
from oktopk.kernels.tensors import require_inside, require_same_size, require_whole, version, written
from oktopk.types import Difference, Source, SparseVector, index_dtype

if TYPE_CHECKING:
    from oktopk.kernels import cpu_loops as loops
    from oktopk.kernels import cpu_sparse as sparse
else:
    loops, sparse = Library("oktopk.kernels.cpu_loops"), Library("oktopk.kernels.cpu_sparse")

SAMPLE = 1 << 15  # entries that tell a threshold; more = fewer candidates, slower sample
SHARE = 64  # a sample is at most one of this many entries
GLANCED = 1 << 20  # entries above which a sample tells how much is owed
SLACK = 1.25  # room for candidates, as a multiple of k
DEVIATIONS = 4  # by how many standard deviations of the sample more candidates are taken; fewer = more second scans
SMALL = 1 << 15  # vectors up to this size are candidates as a whole
CHUNK = 1 << 17  # entries of a float16 or bfloat16 gradient converted at a time


class CpuKernels(ReferenceKernels):
    """Compiled kernels. What they do not specialise (integers, residuals of half precision) the reference does.

    An instance owns its buffers, so it serves one thread at a time. What it returns is the caller's to keep.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, np.dtype], np.ndarray] = {}  # by use and dtype
        self._counters = np.zeros(1 << DIGIT, np.int64)
        self._candidates: Candidates | None = None
        self._team = Team()

    @property
    def scratch_bytes(self) -> int:
        """Memory these kernels hold between calls."""
        return sum(buffer.nbytes for buffer in self._buffers.values()) + self._counters.nbytes

    def all_below(self, pieces: Sequence[Tensor], limit: float) -> bool:
        return all(self._is_below(bits_of(x), key_of(limit, x.dtype)) for x in pieces)

    def accumulate_(self, residual: Tensor, grad: Tensor, k: int = 0) -> float:
        if residual.dtype not in FLOATS or not residual.is_contiguous():
            return super().accumulate_(residual, grad, k)
        require_same_size(residual, grad)
        written(residual)
        if grad.dtype != residual.dtype:
            return self._accumulate_converted_(residual, grad)
        if k > 0:
            return self._scan_and_remember(Sum.of(residual, residual, [grad]), k)
        total, addend = as_numpy(residual), as_numpy(grad)
        return float(sum(self._team.run(total.size, lambda a, b: loops.accumulate(total[a:b], addend[a:b]))))

    def add(self, out: Tensor, residual: Tensor, pieces: Sequence[Tensor], k: int = 0) -> float:
        plain = all(x.is_contiguous() for x in (out, residual, *pieces)) and out.dtype == residual.dtype
        if residual.dtype not in FLOATS or not plain:
            return super().add(out, residual, pieces, k)
        written(out)
        if any(piece.dtype != residual.dtype for piece in pieces):
            return self._add_converted(out, residual, pieces)
        return self._scan_and_remember(Sum.of(out, residual, pieces), max(1, k))

    def scan(self, difference: Difference, k: int = 0) -> float:
        if not is_plain(difference):
            return super().scan(difference, k)
        entries = Subtraction.of(difference)
        # One entry or none will be asked for: not worth a sample. If it is, another scan will find it.
        energy = self._scan_and_remember(entries, k) if k > 1 else self._scan(entries, 1, int(NEVER))[0]
        # Squares are summed in the precision of the entries: those of huge ones overflow.
        return energy if isfinite(energy) else super().scan(difference, k)

    def glance(self, difference: Difference) -> float:
        numel, own = difference.numel(), difference.own
        limit = torch.finfo(difference.dtype).max / 4  # far from where a difference could overflow
        if numel <= GLANCED or not is_plain(difference) or not self.all_below(own, limit):
            return self.scan(difference)
        entries = self._buffer("glance", as_numpy(difference.shared).dtype, SAMPLE)
        drawn = Subtraction.of(difference).sample(entries)
        return float(np.square(entries[:drawn], dtype=np.float64).sum()) * numel / drawn

    def select_topk(self, x: Source, k: int) -> tuple[SparseVector, float]:
        if isinstance(x, Difference) and not is_plain(x):
            return super().select_topk(x, k)
        candidates, self._candidates = self._candidates, None
        entries = Subtraction.of(x) if isinstance(x, Difference) else Plain.of(x)
        if candidates is None or not candidates.serve(x, k):
            candidates = self._gather(entries, k, self._low_key(entries, k))
        if candidates.count < k and candidates.key > 1:
            # The sample promised too much: let every entry that is not zero compete.
            candidates = self._gather(entries, k, 1)
        return self._keep(candidates, k)

    def select_above(self, x: Tensor, threshold: float) -> SparseVector:
        bits, key, count, at = bits_of(x), key_of(threshold, x.dtype), 0, 0
        size = min(SMALL, x.numel()) + WORD
        while True:
            indices, values = self._room(x, size, keep=count)
            count, at = loops.compact(bits, at, bits.size, key, indices, values, count)
            if at == bits.size:
                return vector_of(x, indices[:count].copy(), values[:count].copy())
            size *= 2

    def count_above(self, x: Tensor, threshold: float) -> int:
        bits, key = bits_of(x), key_of(threshold, x.dtype)
        return int(sum(self._team.run(bits.size, lambda start, stop: loops.count_at_least(bits[start:stop], key))))

    def pick(self, x: Source, indices: Tensor) -> SparseVector:
        if isinstance(x, Difference) and not is_plain(x):
            return super().pick(x, indices)
        values = np.empty(indices.numel(), BITS[x.dtype.itemsize][1])
        if isinstance(x, Difference):
            terms = Subtraction.of(x).terms
            good = sparse.pick_difference(*terms, as_numpy(indices), values.view(terms[0].dtype))
        else:
            good = sparse.pick(bits_of(x), as_numpy(indices), values)
        if not good:
            raise IndexError(f"indices name entries outside of a vector of {x.numel()}.")
        return vector_of(x, as_numpy(indices), values)

    def magnitude_histogram(self, values: Tensor, shift: int, first: int, bins: int) -> Tensor:
        if values.dtype == torch.float64:  # what is not zero may be so as float32
            return super().magnitude_histogram(values, shift, first, bins)
        counts = np.zeros(bins + 2, np.int64)
        sparse.histogram(bits_of(values.float()), shift, first, counts)
        return torch.from_numpy(counts[1:-1])

    def sum_sparse(self, vectors: Sequence[SparseVector]) -> SparseVector:
        if len({(v.indices.dtype, v.values.dtype) for v in vectors}) > 1 or vectors[0].values.dtype not in FLOATS:
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
        count = sparse.common(as_numpy(vector.indices), bits_of(vector.values), as_numpy(indices), kept, bits)
        return vector_of(vector, kept[:count], bits[:count])

    def above(self, vector: SparseVector, threshold: float, lower: float = 0.0, ties: int = 0) -> SparseVector:
        if vector.values.dtype != torch.float32:
            return super().above(vector, threshold, lower, ties)
        require_same_size(vector.indices, vector.values)
        kept, bits = self._room_for(vector)
        sure, low = key_of(threshold, torch.float32), key_of(lower, torch.float32)
        count = sparse.keep_at_least(as_numpy(vector.indices), bits_of(vector.values), sure, low, ties, kept, bits)
        return vector_of(vector, kept[:count], bits[:count])

    def largest(self, vector: SparseVector, k: int) -> tuple[SparseVector, float]:
        require_same_size(vector.indices, vector.values)
        bits, (kept, values) = bits_of(vector.values), self._room_for(vector)
        count, kth = loops.keep_largest(as_numpy(vector.indices), bits, bits.size, k, self._counters, kept, values)
        if kth == 0:  # zeros among them, which are not to be chosen
            return super().largest(vector, k)
        return vector_of(vector, kept[:count], values[:count]), magnitude_of(int(kth), vector.values.dtype)

    def retain_(self, residual: Tensor, sent: SparseVector) -> float:
        if residual.dtype not in FLOATS or not residual.is_contiguous():
            return super().retain_(residual, sent)
        require_same_size(sent.indices, sent.values)
        written(residual)
        change = sparse.subtract_at(as_numpy(residual), as_numpy(sent.indices), as_numpy(sent.values))
        if np.isnan(change):
            raise IndexError(f"sent names entries outside of a residual of {residual.numel()}.")
        return float(change)

    def move_(self, difference: Difference, mean: SparseVector, sent: SparseVector) -> float:
        if not is_plain(difference) or {mean.values.dtype, sent.values.dtype} != {difference.dtype}:
            return super().move_(difference, mean, sent)
        for vector in (mean, sent):
            require_same_size(vector.indices, vector.values)
        terms = Subtraction.of(difference).terms
        for changed in (difference.shared, *difference.own):
            written(changed)
        indices, values = as_numpy(sent.indices), as_numpy(sent.values)
        tiles = (self._buffer(use, values.dtype, TILE) for use in ("rests", "extras"))
        placed, second, *taken, change = sparse.move(
            *terms, as_numpy(mean.indices), as_numpy(mean.values), indices, values, *tiles
        )
        for rest in (slice(taken[0], second), slice(taken[1], None)):
            change += sparse.take_from_difference(*terms, indices[rest], values[rest])
        if placed < mean.nnz or np.isnan(change):  # or weights are not numbers, which is for others to say
            for vector in (mean, sent):
                require_inside(vector.indices, difference.numel())
        return float(change)

    def fill_(self, pieces: Sequence[Tensor], vector: SparseVector) -> None:
        if not all(piece.is_contiguous() and piece.dtype == pieces[0].dtype for piece in pieces):
            return super().fill_(pieces, vector)
        require_same_size(vector.indices, vector.values)
        for piece in pieces:
            written(piece)
        table = Pieces.of(pieces)
        bits = bits_of(vector.values.to(pieces[0].dtype))
        tile = self._buffer("tile", bits.dtype, TILE)
        placed = sparse.fill(table.addresses, table.ends, as_numpy(vector.indices), bits, tile)
        if placed < vector.nnz:
            raise IndexError(f"indices must ascend below {table.ends[-1]}; entry {placed} does not.")
        return None

    def _is_below(self, bits: np.ndarray, key: Any) -> bool:
        return not any(self._team.run(bits.size, lambda start, stop: loops.any_at_least(bits[start:stop], key)))

    def _accumulate_converted_(self, residual: Tensor, grad: Tensor) -> float:
        """Sums a gradient of another precision, a piece at a time: a converted copy of all of it would cost memory."""
        piece = torch.from_numpy(self._buffer("converted", as_numpy(residual).dtype, CHUNK))
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

    def _scan_and_remember(self, entries: Entries, k: int) -> float:
        """The sum of squares; candidates are kept for `select_topk`."""
        energy, self._candidates = self._scan(entries, k, self._low_key(entries, k))
        return energy

    def _low_key(self, entries: Entries, k: int) -> int:
        """A key that a little more than k entries should reach, as they are or will be, told from a sample."""
        numel = entries.source.numel()
        if numel <= SMALL or 2 * k >= numel:
            return 1
        keys = self._buffer("sample", BITS[entries.source.dtype.itemsize][1], min(SAMPLE, numel // SHARE))
        drawn = entries.sample(keys)
        expected = drawn * k / numel
        rank = int(expected + DEVIATIONS * expected**0.5) + 1
        return max(1, int(loops.kth_largest(keys, drawn, min(rank, drawn), self._counters)[0]))

    def _gather(self, entries: Entries, k: int, low: int) -> Candidates:
        _, candidates = self._scan(entries, k, low)
        return candidates or self._scan_alone(entries, k, low)[1]

    def _scan(self, entries: Entries, k: int, low: int) -> tuple[float, Candidates | None]:
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
        candidates = Candidates(low, indices, values, count, k, source, version(source)) if all(complete) else None
        return float(sum(energies)), candidates

    def _scan_alone(self, entries: Entries, k: int, low: int) -> tuple[float, Candidates]:
        source = entries.source
        indices, values = self._room(source, _capacity(k, source.numel()))
        energy, count = entries.scan_largest(np.uint64(low), k, indices, values, self._counters)
        return float(energy), Candidates(low, indices, values, count, k, source, version(source))

    def _keep(self, candidates: Candidates, k: int) -> tuple[SparseVector, float]:
        k = min(k, candidates.count)
        indices, values = np.empty(k, candidates.indices.dtype), np.empty(k, candidates.values.dtype)
        _, kth = loops.keep_largest(
            candidates.indices, candidates.values, candidates.count, k, self._counters, indices, values
        )
        return vector_of(candidates.source, indices, values), magnitude_of(int(kth), candidates.source.dtype)

    def _sum(self, indices: Sequence[Tensor], values: Sequence[Tensor], numel: int) -> SparseVector:
        places, contents = Pieces.of(indices), Pieces.of(values)
        sizes = np.diff(places.ends, prepend=0)
        like, room = as_numpy(values[0]).dtype, int(places.ends[-1]) + WORD
        sums = self._buffer("sums", like, WINDOW)
        touched = self._buffer("touched", np.uint64, WINDOW // WORD)
        union, total = np.empty(room, as_numpy(indices[0]).dtype), np.empty(room, like)
        cursors = np.zeros(sizes.size, np.int64)
        count = sparse.sum_windows(places.addresses, contents.addresses, sizes, cursors, sums, touched, union, total)
        if count < 0:
            self._buffers.clear()  # half a sum is left in them
            raise IndexError("indices of vectors to sum must ascend from 0 on, each once per vector.")
        return SparseVector(torch.from_numpy(union[:count]), torch.from_numpy(total[:count]), numel)

    def _room_for(self, vector: SparseVector) -> tuple[np.ndarray, np.ndarray]:
        """New arrays for the entries of a vector, and one more."""
        return (
            np.empty(vector.nnz + 1, as_numpy(vector.indices).dtype),
            np.empty(vector.nnz + 1, BITS[vector.values.itemsize][1]),
        )

    def _room(self, x: Source, size: int, keep: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Buffers for `size` candidates of x; the first `keep` entries survive growth."""
        self._candidates = None
        index = np.int32 if index_dtype(x.numel()) == torch.int32 else np.int64
        bits = BITS[x.dtype.itemsize][1]
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
