"""What every kernel backend offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from oktopk.types import Difference, Source, SparseVector


class Kernels(Protocol):
    """How a flat tensor is scanned. One instance serves one thread at a time: backends re-use their buffers.

    What a kernel returns is the caller's to keep. Sparse vectors, given or returned, are on the host, wherever vectors
    are: messages are made there.
    """

    name: str

    def all_below(self, pieces: Sequence[Tensor], limit: float) -> bool:
        """Whether |x| < limit everywhere; with an infinite limit, whether no piece holds NaN or Inf."""
        ...

    def accumulate_(self, residual: Tensor, grad: Tensor, k: int = 0) -> float:
        """residual += grad (of any floating dtype); the sum of squares of the result.

        A caller that will call `select_topk(residual, k)` next says k here: a backend may then look for these entries
        while it has the sums at hand. It changes speed, never results.
        """
        ...

    def add(self, out: Tensor, residual: Tensor, pieces: Sequence[Tensor], k: int = 0) -> float:
        """out = residual + a gradient that lies in pieces, in their order; the sum of squares of the result.

        As with `accumulate_`, k announces `select_topk(out, k)`. Not finite if a piece is not, or a sum overflows.
        """
        ...

    def scan(self, difference: Difference, k: int = 0) -> float:
        """The sum of squares of a difference; not finite if an entry is not. k announces `select_topk` of it."""
        ...

    def glance(self, difference: Difference) -> float:
        """As `scan` where nothing will be selected: of a long difference the sum may be told from a sample."""
        ...

    def select_topk(self, x: Source, k: int) -> tuple[SparseVector, float]:
        """The k non-zero entries largest in magnitude (ties: lower index first; all, if fewer than k are non-zero).

        Also the smallest chosen magnitude, 0.0 when nothing is chosen.
        """
        ...

    def select_above(self, x: Tensor, threshold: float) -> SparseVector:
        """Every non-zero entry with |x| >= threshold."""
        ...

    def count_above(self, x: Tensor, threshold: float) -> int:
        """How many non-zero entries have |x| >= threshold."""
        ...

    def pick(self, x: Source, indices: Tensor) -> SparseVector:
        """The entries of x at these indices, which ascend, zeros included."""
        ...

    def magnitude_histogram(self, values: Tensor, shift: int, first: int, bins: int) -> Tensor:
        """int64 [bins]: how many |values|, as float32 bit patterns shifted right by `shift`, fall on first + i.

        Bit patterns of positive floats are ordered as the floats are. Zeros and what lies outside are not counted.
        """
        ...

    def sum_sparse(self, vectors: Sequence[SparseVector]) -> SparseVector:
        """The sum over the union of indices, added in the given order. One vector comes back as it is."""
        ...

    def common(self, vector: SparseVector, indices: Tensor) -> SparseVector:
        """The entries of `vector` whose index is in `indices` too; both ascending and without repetition."""
        ...

    def above(self, vector: SparseVector, threshold: float, lower: float = 0.0, ties: int = 0) -> SparseVector:
        """The non-zero entries of a sparse vector whose magnitude, rounded to float32, reaches `threshold`.

        Also the first `ties` of those that only reach `lower`.
        """
        ...

    def largest(self, vector: SparseVector, k: int) -> tuple[SparseVector, float]:
        """As `select_topk`, of the entries of a sparse vector."""
        ...

    def retain_(self, residual: Tensor, sent: SparseVector) -> float:
        """residual[sent.indices] -= sent.values; by how much the sum of squares of residual changed."""
        ...

    def move_(self, difference: Difference, mean: SparseVector, sent: SparseVector) -> float:
        """shared -= mean, and own -= mean - sent: `sent` leaves the difference. How its sum of squares changed.

        `sent` may name an index twice.
        """
        ...

    def fill_(self, pieces: Sequence[Tensor], vector: SparseVector) -> None:
        """pieces, one after the other = vector, zeros included."""
        ...
