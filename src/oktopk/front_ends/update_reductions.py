"""Reductions of a model's updates, one at a time, which may travel while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor
from torch.optim import Optimizer

from oktopk.front_ends.buffers import is_look_due
from oktopk.front_ends.host_gradients import HostGradients
from oktopk.front_ends.shared_weights import SharedWeights
from oktopk.front_ends.weights import describe
from oktopk.metrics import StepRecord
from oktopk.reducer import Reducer
from oktopk.reduction.gradient import Gradient
from oktopk.reduction.records import Request


class UpdateReductions:
    """What is submitted to a reducer for the weights of a model, and applied to them when it has arrived."""

    def __init__(
        self,
        reducer: Reducer,
        weights: SharedWeights,
        gradients: HostGradients,
        optimizers: Sequence[Optimizer],
        overlap: bool,
        terms: str,  # what else ranks must have in common
    ) -> None:
        self._terms = terms
        self._reducer, self._weights, self._gradients, self._optimizers = reducer, weights, gradients, optimizers
        self._updates = weights.updates
        self._updates.deferred = overlap
        self.count = 0
        self.notified = 0  # what all ranks had been told by the end of the last reduction that is complete
        self.completed: StepRecord | None = None  # with overlap: its record, when the next is under way
        self._under_way: list[torch.futures.Future[Tensor]] = []
        self._submitted = perf_counter()
        self._arrived: list[float] = []  # when the last reduction had travelled, once it has

    @property
    def overlap(self) -> bool:
        """Whether they are applied later: when the next one starts."""
        return self._updates.deferred

    def start(self, step: int, dense: bool = False, only_buffers: bool = False) -> None:
        """Reduce what changed up to a step, after what is under way. Without overlap it is done on return."""
        self.complete()
        self.count += 1
        if dense or is_look_due(self.count):
            self._weights.find_moving()
        self._gradients.average_buffers_(self._weights.moving)
        terms = describe(self._optimizers) + self._terms
        dense |= len(self._reducer.hosts.ranks) == 1  # with nobody to send to, nothing is chosen and nothing is owed
        vectors = self._weights.moving if only_buffers else self._weights.vectors
        if not vectors:
            return
        given = [(v.own(), Request(step=step, terms=terms, dense=dense or v.dense)) for v in vectors]
        if self.overlap:
            for own, request in given:  # before any is submitted: kernels serve one thread at a time
                self._choose(own, step, request.dense)
        # A list of its own: who waits for a future may go on before what was to be done with it is done.
        self._submitted, self._arrived = perf_counter(), (arrived := [])
        self._under_way += [self._reducer._submit(own, request) for own, request in given]
        self._under_way[-1].add_done_callback(lambda _: arrived.append(perf_counter()))
        if not self.overlap:
            self.complete()

    def _choose(self, own: Gradient, step: int, dense: bool) -> None:
        """What is going to travel, now: own weights change meanwhile."""
        pipeline = self._reducer._pipeline
        only_some = pipeline.asks != "everything" and not dense
        k = pipeline.k_at(step, own.numel) if only_some else 0
        self._updates.choose(own, k, pipeline.algorithm_of(own.layout).ask_ahead)

    def finish(self, step: int, is_level: bool) -> None:
        """Reduce all that own weights hold back, densely, and apply it at once.

        `is_level`: no rank has stepped since a synchronisation after which own weights forget what is owed. They go
        back to the shared ones; only buffers may have to be averaged.
        """
        self.complete()
        self._reducer._pipeline.reopen()
        if self._reducer.config.on_nonfinite == "skip":  # the last mean cannot be made up for by a later one
            self._weights.rest()
        if is_level:
            self._weights.forget_owed()
        deferred, self._updates.deferred = self._updates.deferred, False
        try:
            with self._updates.forgotten_set_aside():
                self.start(step, dense=True, only_buffers=is_level)
        finally:
            self._updates.deferred = deferred
        self.completed = self._reducer.record_of(step)

    def complete(self) -> None:
        """Wait for what is under way, and apply it if that was put off."""
        under_way, self._under_way = self._under_way, []
        for future in under_way:
            future.wait()
        self.notified = self._reducer.notified
        if not self.overlap:
            return
        self.completed = self._reducer.last_step if under_way else None
        for vector in self._weights.vectors:
            self._updates.apply(vector.own())

    def wait(self) -> None:
        """Until nothing travels any more; it is not applied."""
        for future in self._under_way:
            future.wait()

    def await_arrival(self) -> float:
        """Wait for the reduction that travels beside training, if one does; how many seconds it took."""
        if not self._under_way:
            return 0.0
        self.wait()
        return (self._arrived[0] if self._arrived else perf_counter()) - self._submitted

    def drop(self) -> None:
        """Begin anew, without what is under way."""
        self.wait()
        self._under_way.clear()
        self.count, self.completed = 0, None
