"""What backends ask of the tensors they are given."""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk.types import Source, SparseVector

UNKNOWN = -1  # version of a tensor whose writes torch does not count


def version(x: Source) -> int:
    """Counts the writes to x."""
    vectors = (x,) if isinstance(x, Tensor) else (x.shared, *x.own)
    return UNKNOWN if any(vector.is_inference() for vector in vectors) else sum(v._version for v in vectors)


def written(x: Tensor) -> None:
    """Tell torch about a write it does not see: autograd counts on it, and so do results kept for the next call."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def is_same(a: Source, b: Source) -> bool:
    """Whether two sources are one vector in memory."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b
    return (a.data_ptr(), a.numel(), a.dtype) == (b.data_ptr(), b.numel(), b.dtype)


def require_same_size(a: Tensor, b: Tensor) -> None:
    if a.numel() != b.numel():
        raise IndexError(f"expected two tensors of one size, got {a.numel()} and {b.numel()} entries.")


def require_whole(pieces: int, whole: Tensor) -> None:
    """Refuse pieces that are not as long as `whole` together."""
    if pieces != whole.numel():
        raise IndexError(f"pieces of {pieces} entries do not make up a vector of {whole.numel()}.")


def require_inside(vector: SparseVector, numel: int) -> None:
    """Refuse a sparse vector, on the host, that has other entries than a vector of `numel`."""
    require_same_size(vector.indices, vector.values)
    if vector.nnz and (int(vector.indices.min()) < 0 or int(vector.indices.max()) >= numel):
        raise IndexError(f"a sparse vector names entries outside of a vector of {numel}.")
