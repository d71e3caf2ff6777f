"""From `.grad` to the reducer and back: fixed buckets, clipped before and after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oktopk.reducer import Reducer


@dataclass(frozen=True)
class Bucket:
    """Some parameters and the flat gradient they share."""

    layout: tuple[tuple[str, int], ...]
    parameters: tuple[nn.Parameter, ...]
    flat: Tensor

    def views(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        parts = self.flat.split([numel for _, numel in self.layout])
        return zip(self.parameters, parts, strict=True)


class Gradients:
    """The gradients of a model, reduced bucket by bucket.

    The buckets never change, so a resumed run selects from the very same vectors as one that was not interrupted.
    """

    def __init__(self, model: nn.Module, reducer: Reducer, bucket_mb: float) -> None:
        self._reducer = reducer
        self.buckets = make_buckets(model, int(bucket_mb * 2**20))

    def gather(self) -> None:
        """Copy every `.grad` into its bucket; a parameter that took no part has gradient zero."""
        for bucket in self.buckets:
            for parameter, part in bucket.views():
                part.zero_() if parameter.grad is None else part.copy_(parameter.grad.view(-1))

    def reduce(self) -> None:
        """Replace the buckets by their means over ranks."""
        futures = [self._reducer.submit(bucket.layout, bucket.flat) for bucket in self.buckets]
        for future in futures:
            future.wait()

    def scatter(self) -> None:
        """Point every `.grad` at its part of the bucket."""
        for bucket in self.buckets:
            for parameter, part in bucket.views():
                parameter.grad = part.view_as(parameter)

    def clip_(self, limit: float) -> None:
        """Scale all buckets so that their common norm is at most `limit`; a non-finite norm is left to the reducer."""
        norm = math.sqrt(sum(float(bucket.flat.double().square().sum()) for bucket in self.buckets))
        if math.isfinite(norm) and norm > limit:
            for bucket in self.buckets:
                bucket.flat.mul_(limit / norm)

    def flat(self) -> Tensor:
        """A copy of all buckets, one after the other."""
        return torch.cat([bucket.flat for bucket in self.buckets])

    def layout(self) -> list[tuple[str, int]]:
        return [pair for bucket in self.buckets for pair in bucket.layout]


def make_buckets(model: nn.Module, limit: int) -> list[Bucket]:
    """Parameters in reverse order, as backward finishes them, in buckets of one dtype and at most `limit` bytes."""
    groups: list[list[tuple[str, nn.Parameter]]] = []
    size = 0
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.requires_grad:
            nbytes = parameter.numel() * parameter.element_size()
            if not groups or size + nbytes > limit or groups[-1][0][1].dtype != parameter.dtype:
                groups.append([])
                size = 0
            groups[-1].append((name, parameter))
            size += nbytes
    return [_bucket(group) for group in groups]


def _bucket(group: Sequence[tuple[str, nn.Parameter]]) -> Bucket:
    layout = tuple((name, parameter.numel()) for name, parameter in group)
    first = group[0][1]
    flat = torch.zeros(sum(numel for _, numel in layout), dtype=first.dtype, device=first.device)
    return Bucket(layout, tuple(parameter for _, parameter in group), flat)
