"""Vectors that candidates for the largest entries are looked for in: as they lie in memory, or while they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from oktopk.kernels.cpu_arrays import NEVER, as_numpy, bits_of
from oktopk.kernels.cpu_sizes import LINE_BYTES, STRIPE, STRIPES, WORD
from oktopk.kernels.linking import Library
from oktopk.kernels.tensors import UNKNOWN, is_same, require_same_size, require_whole, version
from oktopk.types import Difference, Source

if TYPE_CHECKING:
    from oktopk.kernels import cpu_differences as differences
    from oktopk.kernels import cpu_loops as loops
    from oktopk.kernels import cpu_sampling as sampling
else:
    loops, sampling = Library("oktopk.kernels.cpu_loops"), Library("oktopk.kernels.cpu_sampling")
    differences = Library("oktopk.kernels.cpu_differences")

SEED = 0x1E3779B97F4A7C15  # where in its stretch a sampled line lies; any positive int64


@dataclass(frozen=True)
class Pieces:
    """Where tensors lie that are one vector together. They must outlive this."""

    addresses: np.ndarray
    ends: np.ndarray  # in the vector

    @classmethod
    def of(cls, pieces: Sequence[Tensor]) -> Pieces:
        addresses = np.array([piece.data_ptr() for piece in pieces], np.int64)
        return cls(addresses, np.cumsum([piece.numel() for piece in pieces], dtype=np.int64))

    @classmethod
    def making_up(cls, whole: Tensor, pieces: Sequence[Tensor]) -> Pieces:
        """Of pieces that must be as long as `whole` together."""
        table = cls.of(pieces)
        require_whole(int(table.ends[-1]), whole)
        return table


class Entries(Protocol):
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
class Plain:
    """A vector in one piece. Its sum of squares is not asked for."""

    source: Tensor
    bits: np.ndarray

    @classmethod
    def of(cls, x: Tensor) -> Plain:
        return cls(x, bits_of(x))

    def sample(self, keys: np.ndarray) -> int:
        return int(sampling.sample(self.bits, SEED, keys))

    def scan(self, start: int, stop: int, key: Any, indices: Any, values: Any) -> tuple[float, int, bool]:
        count, at = loops.compact(self.bits, start, stop, key, indices, values, 0)
        return 0.0, count, at == stop

    def scan_largest(self, key: Any, k: int, indices: Any, values: Any, counters: Any) -> tuple[float, int]:
        return 0.0, loops.compact_largest(self.bits, key, k, indices, values, counters)


@dataclass(frozen=True)
class Sum:
    """What `source` becomes: a residual plus a gradient in pieces."""

    source: Tensor
    out: np.ndarray  # source
    residual: np.ndarray
    pieces: Pieces
    past: bool  # write past the caches

    @classmethod
    def of(cls, out: Tensor, residual: Tensor, pieces: Sequence[Tensor]) -> Sum:
        require_same_size(out, residual)
        past = out.data_ptr() != residual.data_ptr() and out.data_ptr() % LINE_BYTES == 0
        return cls(out, as_numpy(out), as_numpy(residual), Pieces.making_up(residual, pieces), past)

    @property
    def terms(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.residual, self.pieces.addresses, self.pieces.ends

    def sample(self, keys: np.ndarray) -> int:
        return int(sampling.sample_sum(*self.terms, 1, SEED, keys.view(self.residual.dtype)))

    def scan(self, start: int, stop: int, key: Any, indices: Any, values: Any) -> tuple[float, int, bool]:
        energy, count, at = loops.add_compact(self.out, *self.terms, start, stop, key, indices, values, 0, self.past)
        rest, _, _ = loops.add_compact(self.out, *self.terms, at, stop, NEVER, indices, values, 0, self.past)
        return energy + rest, count, at == stop

    def scan_largest(self, key: Any, k: int, indices: Any, values: Any, counters: Any) -> tuple[float, int]:
        energy, count = loops.add_compact_largest(self.out, *self.terms, key, k, indices, values, counters, self.past)
        return energy, count


@dataclass(frozen=True)
class Subtraction:
    """A difference, which is not written anywhere."""

    source: Difference
    shared: np.ndarray
    pieces: Pieces

    @classmethod
    def of(cls, difference: Difference) -> Subtraction:
        pieces = Pieces.making_up(difference.shared, difference.own)
        return cls(difference, as_numpy(difference.shared), pieces)

    @property
    def terms(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.shared, self.pieces.addresses, self.pieces.ends

    def sample(self, keys: np.ndarray) -> int:
        return int(sampling.sample_sum(*self.terms, -1, SEED, keys.view(self.shared.dtype)))

    def scan(self, start: int, stop: int, key: Any, indices: Any, values: Any) -> tuple[float, int, bool]:
        words = self._words()
        energy, count, at = differences.subtract_compact(*self.terms, start, stop, key, indices, values, 0, words)
        rest, _, _ = differences.subtract_compact(*self.terms, at, stop, NEVER, indices, values, 0, words)
        return energy + rest, count, at == stop

    def scan_largest(self, key: Any, k: int, indices: Any, values: Any, counters: Any) -> tuple[float, int]:
        energy, count = differences.subtract_compact_largest(
            *self.terms, key, k, indices, values, counters, self._words()
        )
        return energy, count

    @staticmethod
    def _words() -> np.ndarray:
        """What one thread compares at once."""
        return np.empty(STRIPES * STRIPE // WORD, np.uint64)


@dataclass(frozen=True)
class Candidates:
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
