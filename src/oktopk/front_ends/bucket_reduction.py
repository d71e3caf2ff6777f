"""The buckets of a DDP module on their way through a reducer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from oktopk.front_ends.attached import AttachedReducer
from oktopk.front_ends.clipping import scale_of
from oktopk.front_ends.fusing import Bucket, Fusing, Future
from oktopk.front_ends.parameters import Named
from oktopk.reduction.streams import future_on


class BucketReduction:
    """How the buckets of a DDP module go through a reducer."""

    def __init__(
        self,
        reducer: AttachedReducer,
        names: Mapping[int, str],
        fusing: Fusing,
        used: UsedParameters | None,
        scaler: Any,
    ) -> None:
        self.reducer = reducer
        self._names, self._fusing, self._used, self._scaler = names, fusing, used, scaler
        self._pending: list[Future] = []

    def take(self, bucket: GradBucket) -> Future:
        if bucket.index() == 0:
            self._begin_step()
        flat, settled = bucket.buffer(), future_on(bucket.buffer().device)
        reduced = self._fusing.take(self._describe(bucket))
        reduced.add_done_callback(lambda _: settled.set_result(flat))
        self._pending.append(reduced)
        if bucket.is_last():
            self._end_step()
        return settled

    def detach(self) -> None:
        """Take hooks off the parameters."""
        if self._used is not None:
            self._used.detach()

    def _describe(self, bucket: GradBucket) -> Bucket:
        layout = [(self._names[id(parameter)], parameter.numel()) for parameter in bucket.parameters()]
        unused = frozenset(name for name, _ in layout if self._used is not None and name not in self._used.names)
        return Bucket(layout, bucket.buffer(), unused, bucket.index() == 0, bucket.is_last())

    def _begin_step(self) -> None:
        self._pending.clear()
        if self._scaler is not None:
            self.reducer.set_gradient_scale(scale_of(self._scaler))

    def _end_step(self) -> None:
        if self._used is not None:
            self._used.names.clear()
        if torch._C._current_graph_task_id() == -1:
            self._surface()  # a rank that has left `join` runs its hook outside backward
            return
        # An exception inside a future would reach the training thread without its type, and leave DDP half-way. So the
        # future succeeds, DDP finishes, and then, in a callback queued by a callback and hence after DDP's own, the
        # original exception leaves `backward`.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._surface))

    def _surface(self) -> None:
        pending, self._pending = self._pending, []
        for reduced in pending:
            reduced.wait()


class UsedParameters:
    """Which parameters took part in backward since `names` was last cleared, kept up by hooks."""

    def __init__(self, parameters: Sequence[Named]) -> None:
        self.names: set[str] = set()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(_note, self.names, name))
            for name, parameter in parameters
            if parameter.requires_grad
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()


def _note(used: set[str], name: str, _: torch.Tensor) -> None:
    used.add(name)
