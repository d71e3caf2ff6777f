"""Which buckets are reduced as one vector: each by itself, all of a step, or whichever makes steps shorter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from oktopk.front_ends.clipping import NormClip
from oktopk.reducer import Reducer
from oktopk.reduction.autotune import BY_BUCKET, BY_STEP, Tuner
from oktopk.reduction.streams import future_on

Pairs = Sequence[tuple[str, int]]
Future = torch.futures.Future[Tensor]


@dataclass(frozen=True)
class Bucket:
    """What DDP hands over at a time."""

    layout: Pairs
    flat: Tensor  # to be replaced by its mean
    unused: frozenset[str]  # names that took no part on this rank
    is_first: bool
    is_last: bool

    def pieces(self) -> list[tuple[str, Tensor]]:
        """A view of each parameter's part."""
        parts = self.flat.split([numel for _, numel in self.layout])
        return [(name, part) for (name, _), part in zip(self.layout, parts, strict=True)]


class Fusing(Protocol):
    def take(self, bucket: Bucket) -> Future:
        """Reduce a bucket in place, now or together with those that follow."""
        ...


class ByBucket:
    """Each bucket at once, so that it travels while backward goes on."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def take(self, bucket: Bucket) -> Future:
        return self._reducer.submit(bucket.layout, bucket.flat, bucket.unused)


class ByStep:
    """All buckets of a step as one vector, in the order of the model whatever DDP's buckets are.

    One per dtype, in models that have several: what rounding to a dtype takes must stay owed.
    """

    def __init__(self, reducer: Reducer, names: Mapping[int, str], clip: NormClip | None = None) -> None:
        self._reducer, self._clip = reducer, clip
        self._position = {name: position for position, name in enumerate(names.values())}
        self._buckets: list[tuple[Bucket, Future]] = []

    def take(self, bucket: Bucket) -> Future:
        if bucket.is_first:
            self._buckets = []
        reduced = future_on(bucket.flat.device)
        self._buckets.append((bucket, reduced))
        if bucket.is_last:
            buckets, self._buckets = self._buckets, []
            self._clip_([b.flat for b, _ in buckets])
            for dtype in dict.fromkeys(b.flat.dtype for b, _ in buckets):
                self._submit([(b, future) for b, future in buckets if b.flat.dtype == dtype])
        return reduced

    def _clip_(self, flats: Sequence[Tensor]) -> None:
        factor = self._clip.factor(flats) if self._clip is not None else 1.0
        if factor != 1.0:
            for flat in flats:
                flat.mul_(factor)

    def _submit(self, buckets: Sequence[tuple[Bucket, Future]]) -> None:
        pieces = [piece for bucket, _ in buckets for piece in bucket.pieces()]
        pieces.sort(key=lambda piece: self._position[piece[0]])
        layout = [(name, part.numel()) for name, part in pieces]
        unused = frozenset[str]().union(*(bucket.unused for bucket, _ in buckets))
        done = self._reducer.submit(layout, [part for _, part in pieces], unused)
        done.add_done_callback(lambda done: _pass_on(done, [future for _, future in buckets]))


class ByTrial:
    """As the tuner of the reducer says, which is told how long steps take from one first bucket to the next."""

    def __init__(self, reducer: Reducer, tuner: Tuner, names: Mapping[int, str]) -> None:
        self._reducer, self._tuner = reducer, tuner
        self._fusings: dict[str, Fusing] = {BY_BUCKET: ByBucket(reducer), BY_STEP: ByStep(reducer, names)}
        self._now = tuner.fusing
        self._began: float | None = None  # the latest step, unless it was the first in its way

    def take(self, bucket: Bucket) -> Future:
        if bucket.is_first:
            self._begin_step(perf_counter())
        return self._fusings[self._now].take(bucket)

    def _begin_step(self, now: float) -> None:
        # At this moment nothing is on its way, and all ranks have seen the same steps.
        before, self._began = self._began, now
        if self._tuner.was_quiet() and before is not None and self._tuner.observe_fusing(now - before):
            self._reducer.communicate(lambda _: self._tuner.conclude_fusing())
        if self._tuner.fusing != self._now:
            self._now, self._began = self._tuner.fusing, None


def _pass_on(done: Future, futures: Sequence[Future]) -> None:
    """Settle the futures of all buckets as that of their vector is."""
    error: Exception | None = None
    try:
        reduced = done.value()
    except Exception as failed:
        error = failed
    for future in futures:
        if error is not None:
            future.set_exception(error)  # type: ignore[arg-type]  # torch types it as the result
        else:
            future.set_result(reduced)
