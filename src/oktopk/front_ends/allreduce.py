"""One tensor, once: a reducer that is opened for it and closed after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from oktopk.front_ends.options import GroupOptions
from oktopk.metrics import StepRecord
from oktopk.reducer import Reducer
from oktopk.reduction.feedback import residual_dtype
from oktopk.types import Reduced, SparseVector, Stats


def sparse_allreduce(
    tensor: Tensor,
    density: float = 0.01,
    algorithm: str = "oktopk",
    group: Any = None,
    **options: Unpack[GroupOptions],
) -> Reduced:
    """Reduce one tensor once, with nothing owed before.

    `mean` has the shape and dtype of `tensor`; `sent` is what left this rank, so `tensor - sent.to_dense()` (flat) is
    what a caller who reduces again should add to the next tensor.

    >>> import torch, oktopk
    >>> reduced = oktopk.sparse_allreduce(torch.tensor([3.0, -1.0, 0.5, 0.1]), density=0.5, min_numel=0)
    >>> reduced.mean
    tensor([ 3., -1.,  0.,  0.])
    """
    # What a host owes could not be said of its ranks.
    with Reducer(algorithm, density, group, hosts=None, **options) as reducer:
        mean = reducer.reduce("tensor", tensor)
        residual = reducer.residuals().get("tensor", torch.zeros_like(mean, dtype=residual_dtype(tensor.dtype)))
        sent = tensor.detach().to(residual.dtype).reshape(-1) - residual.reshape(-1)
        indices = sent.nonzero().flatten()
        return Reduced(mean, SparseVector(indices, sent[indices], tensor.numel()), _stats(reducer.last_step))


def _stats(record: StepRecord) -> Stats:
    return Stats(
        record.selected_local,
        record.selected_global,
        record.threshold_local,
        record.threshold_global,
        record.imbalance,
    )
