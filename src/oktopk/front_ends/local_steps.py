"""Reduce updates, not gradients: every rank steps its own optimizer, and what is reduced is the change of weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from time import perf_counter
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack

from oktopk.config import Density, MeanOver
from oktopk.errors import CheckpointError, ConfigError, MismatchError, UnsupportedError
from oktopk.front_ends.every import Every, interval
from oktopk.front_ends.host_gradients import HostGradients
from oktopk.front_ends.local_defaults import chosen_updates, complete_options_
from oktopk.front_ends.local_state import inherit, inherit_same, load_optimizer_state, optimizer_state
from oktopk.front_ends.options import LocalOptions
from oktopk.front_ends.quiet import QuietDDP, count_skipped_steps
from oktopk.front_ends.shared_weights import SharedWeights
from oktopk.front_ends.update_reductions import UpdateReductions
from oktopk.front_ends.watch import Watch
from oktopk.front_ends.weights import check_weights, trained_by, unwrap_model, unwrap_optimizers
from oktopk.kernels.tensors import largest_magnitude
from oktopk.metrics import StepRecord
from oktopk.reducer import Reducer
from oktopk.reduction.rank_states import RankStates

log = logging.getLogger("oktopk")


def local_steps(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    density: Density | None = None,
    wire: str | None = None,
    every: Every = 1,
    *,
    algorithm: str | None = None,
    keep_owed: float | None = None,
    mean_over: MeanOver | None = None,
    overlap: bool = False,
    scaler: Any = None,
    **options: Unpack[LocalOptions],
) -> LocalSteps:
    """Let every rank step `optimizer` on its own gradients, and reduce the change of weights sparsely.

    The training loop stays as it is. `model` is a plain module or DDP, which then leaves gradients where they are;
    rank 0's weights and buffers are copied to every rank. Every rank must call this, with the same arguments.

    By default 0.3 of the entries are sent, each in its turn, in two bits (`algorithm="randomk"`): a 45th of the bytes
    of dense, no choice and no indices. `algorithm="oktopk"` sends the largest 0.05 in int8 instead. With `every=4` or
    more under Adam, AdamW or SGD, every rank sends the largest 0.06 in two bits (`algorithm="topka"`) and goes on
    from nearly the same weights: a 250th of the bytes between two ranks.

    `optimizer`: all that train the model; with several in a list, a step is one of the last.

    `every`: optimizer steps between synchronisations: a number, a function of the step, or "auto" (so that they take
        a tenth of the time, at most 64).
    `keep_owed`: which share of what this rank has changed and not sent its own weights contain. 1 (True): all. 0
        (False): they forget it until it is sent, and ranks start every interval from the same weights. None: a quarter
        where `every` is 4 or more, the optimizer is Adam, AdamW or SGD, or `mean_over` "senders", and there is no
        overlap, else all.
    `mean_over`: "all" divides the sum of an entry by the number of all workers; "senders" by that of those who sent it
        (`topka`), so that what one alone has learned, of a rare word say, counts whole, and what all agree on up to
        that many times. For SGD with few workers; not for Adam.
    `overlap`: let a reduction travel while the next steps are computed; it is applied at the next synchronisation.
    `scaler`: the GradScaler, if there is one. It may skip a step on one rank.
    `hosts`: how many consecutive ranks are one worker: they average gradients before each step, have the same weights,
        and reduce one part of the updates each. "auto" (the default) takes the ranks of a machine, where there are
        several machines with equally many, weights are on the CPU and there is no overlap; None: every rank is one.
    Other options are those of `Reducer`. Adam-like optimizers want about sqrt(workers) times the learning rate that is
    best for averaged gradients, since the gradients of one worker are noisier; `handle.workers` counts workers.

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
    optimizers, (ddp, module) = unwrap_optimizers(optimizer), unwrap_model(model)
    check_weights(module, optimizers)
    _refuse_twice(optimizers)
    if "reduce" in options:
        raise ConfigError("local_steps takes no reduce: it is updates that it reduces.")
    complete_options_(options, module, ddp, overlap, scaler)
    usual = chosen_updates(algorithm, keep_owed, mean_over, every, optimizers, overlap)
    density, wire = usual.density if density is None else density, wire or usual.wire
    reducer = Reducer(
        usual.algorithm, density, wire=wire, reduce="updates", keep_owed=usual.keep_owed, mean_over=usual.mean_over,
        **options,
    )  # fmt: skip
    try:
        return LocalSteps(module, optimizers, reducer, every, overlap, scaler, ddp)
    except BaseException:
        reducer.close()
        raise


def _refuse_twice(optimizers: Sequence[Optimizer]) -> None:
    hooks = [hook for optimizer in optimizers for hook in optimizer._optimizer_step_post_hooks.values()]
    if any(isinstance(getattr(hook, "__self__", None), LocalSteps) for hook in hooks):
        raise UnsupportedError("this optimizer's updates are reduced already: close that handle of local_steps first.")


class LocalSteps:
    """What `local_steps` returns: when to synchronise, the shared weights, and the state of both."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        reducer: Reducer,
        every: Every,
        overlap: bool,
        scaler: Any,
        ddp: DistributedDataParallel | None,
    ) -> None:
        """Made by `local_steps`, which has checked that these belong together."""
        self.reducer, self._optimizers = reducer, optimizers
        self._interval = interval(every, reducer)
        self._weights = SharedWeights(module, reducer)
        self._gradients = HostGradients(reducer, self._weights.trained, optimizers)
        terms = f" every {type(self._interval).__name__}, overlap {overlap}"
        self._reductions = UpdateReductions(reducer, self._weights, self._gradients, optimizers, overlap, terms)
        self.step = 0  # optimizer steps so far
        self._since = 0  # of them after the last synchronisation
        self._due = self._interval.steps(0)
        self._ended = perf_counter()  # the last synchronisation
        self._watch = Watch(self._weights, optimizers)
        self._undo = list(self._attach(scaler, ddp))

    def _attach(self, scaler: Any, ddp: DistributedDataParallel | None) -> Iterator[Callable[[], object]]:
        """Hook into the training loop; how to undo that."""
        for optimizer in self._optimizers:
            yield optimizer.register_step_pre_hook(self._before_step).remove
            yield optimizer.register_step_post_hook(self._after_step).remove
        yield from self._gradients.watch(self._weights.trained)
        if scaler is not None:
            yield count_skipped_steps(scaler, self._optimizers[-1], lambda: self.step, self._skipped_step)
            yield self._gradients.before_unscaling(scaler)
        if ddp is not None:
            yield QuietDDP(ddp).end

    @property
    def world_size(self) -> int:
        return self.reducer.world_size

    @property
    def workers(self) -> int:
        """How many there are that step by themselves: hosts, or ranks where each is alone."""
        return len(self.reducer.hosts.ranks)

    @property
    def notified(self) -> int:
        """The greatest number that any rank has told by `reducer.notify`; between two steps the same on all ranks.

        With overlap `reducer.notified` is not: what travels arrives earlier on some.
        """
        return self._reductions.notified if self.world_size > 1 else self.reducer.notified

    @property
    def completed(self) -> StepRecord | None:
        """The record of the reduction that moved weights in the last step; None if none did."""
        if not self._reductions.overlap:
            return self.reducer.record_of(self._last_step)
        return None if self._since else self._reductions.completed

    def wait(self) -> None:
        """Until nothing travels any more, so that its record is made. It is applied at the next synchronisation."""
        self._reductions.wait()

    def on_close(self, undo: Callable[[], object]) -> None:
        """Say what else closing must undo; the latest is undone first."""
        self._undo.append(undo)

    # -- stepping ------------------------------------------------------------------------------------------------

    def average_gradients(self) -> None:
        """Average gradients over the ranks of this host now, e.g. to clip their mean; `step` does so otherwise.

        Every rank of the host must call it; where every rank is a worker it does nothing.
        """
        for optimizer in self._optimizers:
            self._gradients.average_(optimizer)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._watch.refuse_while_lent("optimizer.step()")
        self._watch.check()
        itself, *rest = args
        closure = rest[0] if rest else kwargs.get("closure")
        if closure is None:
            self._gradients.average_(optimizer)
            self._drop_bad_gradients()
            return None
        averaging = self._averaging(optimizer, closure)
        return ((itself, averaging, *rest[1:]), kwargs) if rest else ((itself,), {**kwargs, "closure": averaging})

    def _averaging(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure computes gradients inside the step."""

        def averaged() -> Any:
            loss = closure()
            self._gradients.average_again_(optimizer)
            self._drop_bad_gradients()
            return loss

        return averaged

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._gradients.stepped(optimizer)
        if optimizer is self._optimizers[-1]:
            self.step += 1
            self._since += 1
            if self._since >= self._due:
                self._synchronize()
        self._watch.accept()

    def _skipped_step(self) -> None:
        log.warning("step %d: the scaler skipped it on rank %d.", self.step, self.reducer.rank)
        self._watch.check()
        self._after_step(self._optimizers[-1], (), {})

    def _drop_bad_gradients(self) -> None:
        """A step on gradients that are not finite would spoil weights and optimizer: this rank may sit it out."""
        if self.reducer.config.on_nonfinite != "skip":
            return
        trained = trained_by(self._optimizers)
        grads = [parameter.grad for parameter in trained if parameter.grad is not None]
        dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        if largest_magnitude(*dense) < inf:
            return
        log.warning(
            "step %d: the gradient of rank %d is not finite; it sits this step out.", self.step, self.reducer.rank
        )
        for parameter in trained:
            parameter.grad = None

    def synchronize(self) -> None:
        """Reduce what changed since the last time, now. Every rank must call it; `step` does so when it is due."""
        self._watch.refuse_while_lent("synchronize()")
        self._watch.check()
        self._synchronize()
        self._watch.accept()

    def _synchronize(self) -> None:
        began = perf_counter()
        computing = (began - self._ended) / max(1, self._since)
        travelling = self._reductions.await_arrival()
        if self._reductions.overlap:
            began = perf_counter()  # what training waited for does not come again once the interval is long enough
        if self.world_size > 1:
            self._reductions.start(self._last_step)
        self._ended = perf_counter()
        self._since = 0
        self._interval.observe(self._ended - began, computing, travelling)
        self._due = self._interval.steps(self.step)

    @property
    def _last_step(self) -> int:
        """Under whose number updates are reduced."""
        return max(0, self.step - 1)

    # -- the shared weights --------------------------------------------------------------------------------------

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, the model holds the shared weights (and buffers), which are the same on every rank."""
        if self._weights.is_lent:
            yield
            return
        self._watch.check()
        self._settle()
        try:
            with self._weights.lent():
                yield
        finally:
            self._watch.accept_returned()

    def owed(self) -> dict[str, Tensor]:
        """A copy of what this rank has changed and not sent, by name."""
        self._settle()
        return self._weights.owed()

    def finish(self) -> None:
        """One dense mean of what own weights hold back: all ranks end with the same weights. Every rank must call it.

        That is all that is owed, or with `keep_owed` below 1 the steps since the last synchronisation and what weights
        kept before them: what they forgot stays owed, since weights that learned to do without would be worse with it.
        Right after a synchronisation nothing has to travel then: all go back to the shared weights.
        """
        self._watch.refuse_while_lent("finish()")
        if self.world_size == 1:
            return
        self._watch.check()
        is_forgetful = self.reducer.config.keep_owed < 1
        if is_forgetful:
            self._agree_on_step()
        self._reductions.finish(self._last_step, is_level=is_forgetful and not self._since)
        self._since = 0
        self._watch.accept()

    def _agree_on_step(self) -> None:
        """A rank for which nothing has to travel would not notice that another has taken a further step."""
        steps = [row[0] for row in self.reducer.communicate(lambda transport: transport.agree([self.step]))]
        if len(set(steps)) > 1:
            raise MismatchError(f"ranks have taken {steps} steps: all must take equally many before finish().")

    def restart(self) -> None:
        """Take rank 0's weights and buffers as they are now for everyone's; drop what is owed and under way."""
        self._watch.refuse_while_lent("restart()")
        self._reductions.drop()
        self._weights.begin()
        self._watch.accept()

    def close(self) -> None:
        """Stop synchronising: the optimizer, DDP and the scaler are as before. Weights stay this rank's own."""
        undo, self._undo = self._undo, []
        for one in reversed(undo):
            one()
        self.reducer.close()

    def __enter__(self) -> LocalSteps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self) -> None:
        """Nobody writes any more. Alone there is nobody to owe anything to: own weights are the shared ones."""
        self._reductions.wait()
        if self.world_size == 1 and not self._weights.is_lent:
            self._weights.share_own()

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self, with_shared: bool = True, with_own: bool = True) -> dict[str, Any]:
        """This rank's state, that of its optimizer included: tensors and plain values only."""
        self._settle()
        return {
            "step": self.step,
            "since": self._since,
            "due": self._due,
            "synchronisations": self._reductions.count,
            "every": self._interval.state_dict(),
            **self._weights.state_dict(with_shared, with_own),
            "optimizers": [optimizer_state(optimizer) for optimizer in self._optimizers] if with_own else [],
            "reducer": self.reducer.state_dict(),
        }

    def rank_state(self) -> dict[str, Any]:
        """What the file of this rank holds: the shared weights are in that of rank 0, a host's in that of its first."""
        return self.state_dict(with_shared=self.reducer.rank == 0, with_own=self.reducer.hosts.local_rank == 0)

    def from_rank_states(self, states: RankStates) -> Mapping[str, Any]:
        """This rank's state. In a world of another size what is owed is shared out, and optimizers are averaged."""
        if states.is_same_world:
            return inherit_same(states)
        config = self.reducer.config
        sizes = [vector.own().numel for vector in self._weights.trained] if config.mean_over == "senders" else []
        over_senders = [index for index, numel in enumerate(sizes) if numel >= config.min_numel]
        return inherit(states, over_senders) | {"reducer": self.reducer.from_rank_states(states.part("reducer"))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the state was taken, in the middle of an interval too."""
        self._watch.refuse_while_lent("loading a state")
        self._reductions.complete()
        if len(state["optimizers"]) != len(self._optimizers):
            raise CheckpointError(
                f"this state is of {len(state['optimizers'])} optimizers, and here are {len(self._optimizers)}."
            )
        self._weights.load_state_dict(state)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            load_optimizer_state(optimizer, saved)
        self.reducer.load_state_dict(state["reducer"])
        self.step, self._since, self._due = int(state["step"]), int(state["since"]), int(state["due"])
        self._reductions.count = int(state["synchronisations"])
        self._interval.load_state_dict(state["every"])
        self._watch.accept()
