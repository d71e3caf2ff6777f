"""Reduce updates, not gradients: every rank steps its own optimizer, and what is reduced is the change of weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack

from oktopk.config import Density
from oktopk.errors import CheckpointError, OkTopkError
from oktopk.front_ends.broadcast import broadcast_
from oktopk.front_ends.every import Every, interval
from oktopk.front_ends.local_state import (
    inherit_optimizer,
    inherit_weights,
    load_optimizer_state,
    optimizer_state,
    plain,
    reduced_from,
)
from oktopk.front_ends.options import LocalOptions
from oktopk.front_ends.quiet import QuietDDP, count_skipped_steps
from oktopk.front_ends.weights import (
    Weights,
    check_weights,
    count_trained,
    describe,
    unwrap_model,
    unwrap_optimizer,
    weights_of,
)
from oktopk.kernels.tensors import largest_magnitude
from oktopk.reducer import Reducer
from oktopk.reduction.rank_states import RankStates
from oktopk.reduction.records import Request
from oktopk.reduction.updates import Updates

log = logging.getLogger("oktopk")


def local_steps(
    model: nn.Module,
    optimizer: Optimizer,
    density: Density = 0.3,
    wire: str = "codebook2",
    every: Every = 1,
    *,
    algorithm: str = "randomk",
    overlap: bool = False,
    scaler: Any = None,
    **options: Unpack[LocalOptions],
) -> LocalSteps:
    """Let every rank step `optimizer` on its own gradients, and reduce the change of weights sparsely.

    The training loop stays as it is. `model` is a plain module or DDP, which then leaves gradients where they are;
    rank 0's weights and buffers are copied to every rank. Every rank must call this, with the same arguments.

    By default every entry is sent in turn, in two bits (`algorithm="randomk"`): a 45th of the bytes of dense, no choice
    and no indices. `algorithm="oktopk", density=0.05, wire="int8"` sends the largest entries instead.

    `every`: optimizer steps between synchronisations: a number, a function of the step, or "auto" (so that they take
        a tenth of the time, at most 64).
    `overlap`: let a reduction travel while the next steps are computed; it is applied at the next synchronisation.
    `scaler`: the GradScaler, if there is one. It may skip a step on one rank.
    Other options are those of `Reducer`. Adam-like optimizers want about sqrt(world size) times the learning rate that
    is best for averaged gradients, since the gradients of one rank are noisier.

    >>> import torch, oktopk
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> handle = oktopk.local_steps(model, optimizer)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> with handle.shared():  # what all ranks have in common: evaluate and save this
    ...     weights = model.state_dict()
    >>> handle.finish()  # all ranks end with the same weights
    >>> handle.close()
    """
    inner, (ddp, module) = unwrap_optimizer(optimizer), unwrap_model(model)
    check_weights(module, inner)
    if scaler is not None:
        options.setdefault("on_nonfinite", "skip")
    if ddp is not None:
        options.setdefault("group", ddp.process_group)
    reducer = Reducer(algorithm, density, wire=wire, reduce="updates", hosts=None, **options)
    try:
        return LocalSteps(module, inner, reducer, every, overlap, scaler, ddp)
    except BaseException:
        reducer.close()
        raise


class LocalSteps:
    """What `local_steps` returns: when to synchronise, the shared weights, and the state of both."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        reducer: Reducer,
        every: Every,
        overlap: bool,
        scaler: Any,
        ddp: DistributedDataParallel | None,
    ) -> None:
        """Made by `local_steps`, which has checked that these belong together."""
        self.reducer, self._optimizer, self._ddp = reducer, optimizer, ddp
        self._updates.deferred = overlap
        self._interval = interval(every, self.reducer)
        tensors = [*module.parameters(), *module.buffers()]
        self.reducer.communicate(lambda transport: broadcast_(tensors, transport))
        self._vectors = list(weights_of(module))
        for vector in self._vectors:
            self._updates.begin(vector.own())
        self.step = 0  # optimizer steps so far
        self._since = 0  # of them after the last synchronisation
        self._due = self._interval.steps(0)
        self._is_lent = self._is_closed = False
        self._under_way: list[torch.futures.Future[Tensor]] = []
        self._ended = perf_counter()
        self._hooks: list[Any] = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        self._forget_scaler: Callable[[], None] = lambda: None
        if scaler is not None:
            self._forget_scaler = count_skipped_steps(scaler, self._optimizer, lambda: self.step, self._skipped_step)
        if self._ddp is not None:
            self._quiet = QuietDDP(self._ddp)
        self._versions = self._version_of_weights()

    @property
    def _updates(self) -> Updates:
        feedback = self.reducer._pipeline.feedback
        assert isinstance(feedback, Updates)
        return feedback

    @property
    def world_size(self) -> int:
        return self.reducer.world_size

    # -- stepping ------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_lent:
            raise OkTopkError("optimizer.step() inside handle.shared(): the model holds the shared weights there.")
        if self._version_of_weights() != self._versions:
            raise OkTopkError(
                "the weights were changed since the last optimizer.step(), e.g. by load_state_dict: they must only "
                "change in steps, or ranks come apart. Call handle.restart() after loading weights, on every rank."
            )
        known = sum(len(vector.tensors) for vector in self._vectors if not vector.dense)
        if count_trained(self._optimizer) - known:
            raise OkTopkError(
                "a parameter group was added to the optimizer after local_steps: close the handle, and call "
                "local_steps again with all groups in place."
            )
        if self.reducer.config.on_nonfinite == "skip":
            self._drop_bad_gradients()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.step += 1
        self._since += 1
        if self._since >= self._due:
            self.synchronize()
        self._versions = self._version_of_weights()

    def _skipped_step(self) -> None:
        log.warning("step %d: the scaler skipped it on rank %d.", self.step, self.reducer.rank)
        self._after_step(self._optimizer, (), {})

    def _drop_bad_gradients(self) -> None:
        """A step on gradients that are not finite would spoil weights and optimizer: this rank sits it out."""
        grads = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        if largest_magnitude(*dense) < inf:
            return
        log.warning(
            "step %d: the gradient of rank %d is not finite; it sits this step out.", self.step, self.reducer.rank
        )
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def synchronize(self) -> None:
        """Reduce what changed since the last time, now. Every rank must call it; `step` does so when it is due."""
        if self._is_lent:
            raise OkTopkError("synchronize() inside handle.shared(): leave the context first.")
        began = perf_counter()
        computing = (began - self._ended) / max(1, self._since)
        if self.world_size > 1:
            self._reduce(dense=False)
        self._ended = perf_counter()
        self._since = 0
        self._interval.observe(self._ended - began, computing)
        self._due = self._interval.steps(self.step)

    def _reduce(self, dense: bool) -> None:
        self._complete()
        terms, step = describe(self._optimizer), max(0, self.step - 1)
        pipeline = self.reducer._pipeline
        given = [(v.own(), Request(step=step, terms=terms, dense=dense or v.dense)) for v in self._vectors]
        if self._updates.deferred:
            for own, request in given:  # before any is submitted: kernels serve one thread at a time
                only_some = pipeline.asks != "everything" and not request.dense
                k = pipeline.k_at(step, own.numel) if only_some else 0
                self._updates.choose(own, k, pipeline.algorithm_of(own.layout).ask_ahead)
        self._under_way += [self.reducer._submit(own, request) for own, request in given]
        if not self._updates.deferred:
            self._complete()

    def _complete(self) -> None:
        """Wait for what is under way, and apply it if that was put off."""
        under_way, self._under_way = self._under_way, []
        for future in under_way:
            future.wait()
        if self._updates.deferred:
            for vector in self._vectors:
                self._updates.apply(vector.own())

    # -- the shared weights --------------------------------------------------------------------------------------

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, the model holds the shared weights (and buffers), which are the same on every rank."""
        if self._is_lent:
            yield
            return
        self._wait()
        if self.world_size == 1:
            self._share_own()
        self._exchange()
        self._is_lent = True
        try:
            yield
        finally:
            self._is_lent = False
            self._exchange()
            self._versions = self._version_of_weights()

    def owed(self) -> dict[str, Tensor]:
        """A copy of what this rank has changed and not sent, by name."""
        self._wait()
        if self.world_size == 1:
            self._share_own()
        parts: dict[str, Tensor] = {}
        for vector in self._vectors:
            parts |= vector.by_name(self._updates.owed(vector.own()))
        return parts

    def finish(self) -> None:
        """One dense mean of what is owed: all ranks end with the same weights. Every rank must call it."""
        if self.world_size == 1:
            return
        self._complete()
        deferred, self._updates.deferred = self._updates.deferred, False
        try:
            self._reduce(dense=True)
        finally:
            self._updates.deferred = deferred
        self._since = 0
        self._versions = self._version_of_weights()

    def restart(self) -> None:
        """Take rank 0's weights and buffers as they are now for everyone's; drop what is owed."""
        self._complete()
        own = [vector.own() for vector in self._vectors]
        pieces = [piece for weights in own for piece in weights.pieces]
        self.reducer.communicate(lambda transport: broadcast_(pieces, transport))
        for weights in own:
            self._updates.begin(weights)
        self._versions = self._version_of_weights()

    def close(self) -> None:
        """Stop synchronising: the optimizer, DDP and the scaler are as before. Weights stay this rank's own."""
        if self._is_closed:
            return
        self._is_closed = True
        for hook in self._hooks:
            hook.remove()
        self._forget_scaler()
        if self._ddp is not None:
            self._quiet.end()
        self.reducer.close()

    def __enter__(self) -> LocalSteps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _share_own(self) -> None:
        """Alone there is nobody to owe anything to: own weights are shared when somebody asks."""
        for vector in self._vectors:
            self._updates.begin(vector.own())

    def _wait(self) -> None:
        for future in self._under_way:
            future.wait()

    def _exchange(self) -> None:
        """Own and shared weights change places, a tensor at a time."""
        for vector in self._vectors:
            own = vector.own()
            shared = self._updates.shared(own.layout)
            for piece, part in zip(own.pieces, shared.split([p.numel() for p in own.pieces]), strict=True):
                before = piece.clone()
                piece.copy_(part)
                part.copy_(before)

    def _version_of_weights(self) -> list[int]:
        """Counts the writes to each parameter that torch sees."""
        return [tensor._version for vector in self._vectors if not vector.dense for tensor in vector.tensors]

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self, with_shared: bool = True) -> dict[str, Any]:
        """This rank's state, that of its optimizer included: tensors and plain values only."""
        self._wait()
        if self.world_size == 1:
            self._share_own()
        weights = [self._state_of(vector, with_shared) for vector in self._vectors]
        return {
            "step": self.step,
            "since": self._since,
            "due": self._due,
            "every": self._interval.state_dict(),
            "weights": weights,
            "optimizer": optimizer_state(self._optimizer),
            "reducer": self.reducer.state_dict(),
        }

    def rank_state(self) -> dict[str, Any]:
        """What the file of this rank holds: the shared weights are in that of rank 0."""
        return self.state_dict(with_shared=self.reducer.rank == 0)

    def from_rank_states(self, states: RankStates) -> Mapping[str, Any]:
        """This rank's state. In a world of another size what is owed is shared out, and optimizers are averaged."""
        weights = [states.part("weights").part(index) for index in range(len(states.first["weights"]))]
        if states.is_same_world:
            whole = [{**part.nearest, "shared": part.first["shared"]} for part in weights]
            return {**states.nearest, "weights": whole}
        return {
            **states.first,
            "weights": [inherit_weights(part) for part in weights],
            "optimizer": inherit_optimizer(states.part("optimizer")),
            "reducer": self.reducer.from_rank_states(states.part("reducer")),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the state was taken, in the middle of an interval too."""
        self._complete()
        if len(state["weights"]) != len(self._vectors):
            raise CheckpointError("this state is of another model: it has other dtypes or buffers.")
        for vector, saved in zip(self._vectors, state["weights"], strict=True):
            self._restore(vector, saved)
        load_optimizer_state(self._optimizer, state["optimizer"])
        self.reducer.load_state_dict(state["reducer"])
        self.step, self._since, self._due = int(state["step"]), int(state["since"]), int(state["due"])
        self._interval.load_state_dict(state["every"])
        self._versions = self._version_of_weights()

    def _state_of(self, vector: Weights, with_shared: bool) -> dict[str, Any]:
        own, updates = vector.own(), self._updates
        arrived = updates.arrived(own.layout)
        return {
            "own": vector.by_name(torch.cat(own.pieces)),
            "owed": vector.by_name(updates.owed(own)),
            "shared": vector.by_name(updates.shared(own.layout).clone()) if with_shared else {},
            "arrived": plain(arrived),
        }

    def _restore(self, vector: Weights, saved: Mapping[str, Any]) -> None:
        own = vector.own()
        if {name: part.numel() for name, part in saved["own"].items()} != dict(own.layout):
            raise CheckpointError("this state is of another model: its parameters have other names or shapes.")
        names = [name for name, _ in own.layout]
        for name, piece in zip(names, own.pieces, strict=True):
            piece.copy_(saved["own"][name])
        shared, owed = (torch.cat([saved[part][name] for name in names]) for part in ("shared", "owed"))
        self._updates.restore(own, shared, owed)
        self._updates.resume_arrived(own.layout, reduced_from(saved["arrived"], own.numel))
