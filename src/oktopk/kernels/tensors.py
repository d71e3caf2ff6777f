"""What backends ask of the tensors they are given."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from oktopk.kernels.staging import to_host
from oktopk.types import Source

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


def wide_dtype(vector: Tensor) -> torch.dtype:
    """The widest numbers that its device has."""
    return torch.float32 if vector.device.type == "mps" else torch.float64


def sum_of_squares(*vectors: Tensor) -> float:
    """Of all their entries. On a device this takes no wider copy of them, and one wait."""
    if all(vector.device.type == "cpu" for vector in vectors):
        return sum(float(vector.double().square().sum()) for vector in vectors)
    norms = [torch.linalg.vector_norm(vector, dtype=wide_dtype(vector)) for vector in vectors]
    return float(to_host(_together(norms).square().sum())[0])


def largest_magnitude(*vectors: Tensor) -> float:
    """Of all their entries, NaN if any is; takes no second vector, and one wait."""
    filled = [vector.detach() for vector in vectors if vector.numel()]
    return float(to_host(_together(torch._foreach_norm(filled, inf)).amax())[0]) if filled else 0.0


def _together(scalars: Sequence[Tensor]) -> Tensor:
    """As one tensor. After a resume some vectors may still be on the host."""
    return torch.stack([scalar.to(scalars[-1].device, non_blocking=True) for scalar in scalars])


def require_same_size(a: Tensor, b: Tensor) -> None:
    if a.numel() != b.numel():
        raise IndexError(f"expected two tensors of one size, got {a.numel()} and {b.numel()} entries.")


def require_whole(pieces: int, whole: Tensor) -> None:
    """Refuse pieces that are not as long as `whole` together."""
    if pieces != whole.numel():
        raise IndexError(f"pieces of {pieces} entries do not make up a vector of {whole.numel()}.")


def require_inside(indices: Tensor, numel: int) -> None:
    """Refuse indices, on the host, of other entries than a vector of `numel` has."""
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= numel):
        raise IndexError(f"indices name entries outside of a vector of {numel}.")
