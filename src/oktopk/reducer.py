"""The way of one gradient: agree, compensate, reduce, retain, record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property
from math import isfinite
from time import perf_counter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from oktopk.algorithms import ALGORITHMS, Algorithm
from oktopk.algorithms.base import less
from oktopk.algorithms.dense import Dense
from oktopk.config import DenseConfig, Density, ReducerConfig, split_options
from oktopk.errors import CheckpointError, CommunicationError, ConfigError, NonFiniteError, OkTopkError, nearest
from oktopk.kernels import choose
from oktopk.metrics import Clock, Sink, StepRecord, timed
from oktopk.primitives.collectives import Tools
from oktopk.reduction.agreement import Agreement, Terms, check_terms, refusal
from oktopk.reduction.autotune import AUTO, DENSE, AutoConfig, ChosenWire, Decision, Tuner, Way
from oktopk.reduction.communication import Agreed, CommunicationThread
from oktopk.reduction.feedback import Feedback, residual_dtype
from oktopk.reduction.gradient import Gradient, Layout
from oktopk.reduction.grouping import Grouping
from oktopk.reduction.recording import Recorder, Turn
from oktopk.schedule import Schedule
from oktopk.transport import MeteredTransport, Transport, open_transport
from oktopk.types import Reduced, SparseVector, Stats
from oktopk.wire import Wire

log = logging.getLogger("oktopk")

T = TypeVar("T")

_KERNEL_PHASES = {
    "all_finite": "select", "accumulate_": "select", "add": "select", "select_topk": "select", "select_above": "select",
    "count_above": "select", "magnitude_histogram": "select", "common": "select", "above": "select",
    "retain_": "select", "sum_sparse": "sum", "fill_": "unpack",
}  # fmt: skip


class Reducer:
    """Reduces gradients over ranks, and remembers what is still owed.

    Example (one process; under torchrun every rank does the same):

    >>> import torch, oktopk
    >>> reducer = oktopk.Reducer(algorithm="oktopk", density=0.01)
    >>> mean = reducer.reduce("weight", torch.randn(100, 100))
    >>> mean.count_nonzero().item(), reducer.last_step.phase
    (100, 'sparse')
    >>> reducer.close()
    """

    def __init__(
        self,
        algorithm: str = "oktopk",
        density: Density = 0.01,
        group: Any = None,
        warmup_steps: int = 0,
        wire: str = "float32",
        *,
        metrics: Sink | None = None,
        timeout: timedelta | float | None = None,
        **options: Any,
    ) -> None:
        """Make a reducer; every rank of `group` (a ProcessGroup, a Transport, or None for all) must do the same.

        `options` are fields of the algorithm's configuration and of `ReducerConfig`.
        """
        if algorithm not in (*ALGORITHMS, AUTO):
            raise ConfigError(f"unknown algorithm {algorithm!r}. {nearest(str(algorithm), [*ALGORITHMS, AUTO])}")
        self.algorithm = algorithm
        config_class, self._algorithm_class = ALGORITHMS["oktopk" if algorithm == AUTO else algorithm]
        own, shared, *tuning = split_options(
            options, config_class, ReducerConfig, *([AutoConfig] if algorithm == AUTO else [])
        )
        self._algorithm_config = config_class(**own)
        self._auto_config = AutoConfig(**tuning[0]) if tuning else None
        self.config = ReducerConfig(density=density, warmup_steps=warmup_steps, wire=wire, **shared)
        self.schedule = Schedule(self.config.density, self.config.warmup_steps)
        self._metrics = metrics
        self._open(open_transport(group, timeout))

    def _open(self, transport: Transport) -> None:
        self._clock = Clock()
        self._transport = MeteredTransport(transport, self._clock)
        self._recorder = Recorder(self._transport, self._clock, self._metrics)
        self.rank, self.world_size = transport.rank, transport.world_size
        self.kernels_choice = choose(transport.device)
        kernels = timed(self.kernels_choice.kernels, self._clock, _KERNEL_PHASES)
        phases = {"pack": "pack", "unpack": "unpack"}
        exact = timed(Wire("float32"), self._clock, phases)
        auto = self._auto_config
        self.tuner = Tuner(auto, self._transport) if auto else None
        self._wire = Wire(self.config.wire) if auto is None else ChosenWire(auto.wires)
        rounding = timed(self._wire, self._clock, phases)
        self._tools = Tools(self._transport, rounding, exact, kernels)
        self._dense = Dense(DenseConfig(), Tools(self._transport, exact, exact, kernels))
        self.feedback = Feedback(kernels, self.config.momentum_correction, self.config.factor_masking)
        self.grouping = Grouping()
        self.unused: set[str] = set()  # names that took no part on any rank when they were last reduced
        self._gradient_scale = 1.0
        self._open_step, self._skipped_step = -1, -1
        self._algorithms: dict[Layout, Algorithm] = {}
        self._loaded_algorithms: dict[str, Mapping[str, Any]] = {}
        self._steps: dict[str, int] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._thread = CommunicationThread(self._transport, lambda: (self.step, self._clock.last))

    # -- reducing ------------------------------------------------------------------------------------------------

    def reduce(self, name: str, grad: Tensor) -> Tensor:
        """The mean over ranks of `grad` and what is owed to `name`. Blocks; `grad` stays as it is."""
        self._shapes[name] = grad.shape
        flat = grad.detach().reshape(-1).clone()
        return self.submit([(name, flat.numel())], flat).wait().view(grad.shape)

    def submit(
        self, layout: Sequence[tuple[str, int]], bucket: Tensor | Sequence[Tensor], unused: Collection[str] = ()
    ) -> torch.futures.Future[Tensor]:
        """Reduce a bucket of several parameters in place, on the communication thread.

        `layout` lists (name, numel) in the order they lie in `bucket`, a flat tensor; or give one flat tensor for each
        name: then nothing is copied together, and there is a second residual instead. Buckets are reduced in the order
        of submission, which must be the same on all ranks. `unused` names parameters that took no part in this rank's
        backward: one that is unused on every rank keeps its residual, and its mean is zero. The future holds the
        (first) tensor.
        """
        gradient = Gradient.of(layout, bucket)
        return self._thread.submit(lambda: self._reduce_(gradient, frozenset(unused)), gradient.pieces[0])

    def communicate(self, work: Callable[[Transport], T]) -> T:
        """Run `work(transport)` on the communication thread, after all that was submitted. Every rank must do it."""
        return self._thread.run(lambda: work(self._transport))

    def set_gradient_scale(self, scale: float) -> None:
        """Say in which unit gradients come from now on, as a GradScaler sets it: residuals follow."""
        if not scale > 0.0:
            raise ConfigError(f"the gradient scale must be above 0, got {scale}.")
        self._thread.run(lambda: self._rescale(scale))

    def _rescale(self, scale: float) -> None:
        if scale != self._gradient_scale:
            self.feedback.scale_(scale / self._gradient_scale)
            self._gradient_scale = scale

    @property
    def step(self) -> int:
        """How many steps are behind us."""
        return max(self._steps.values(), default=0)

    @property
    def last_step(self) -> StepRecord:
        """All buckets of the latest step as one record."""
        return self._recorder.last_step

    @property
    def decisions(self) -> dict[str, Decision]:
        """What `algorithm="auto"` has decided, and why, by the name of a bucket's first parameter."""
        return self.tuner.decisions(self.grouping.current) if self.tuner is not None else {}

    def _reduce_(self, gradient: Gradient, unused: frozenset[str]) -> Tensor:
        for group in gradient.groups(self.grouping.split(gradient.layout)):
            self._reduce_group_(group, unused & group.names)
        return gradient.pieces[0]

    def _reduce_group_(self, gradient: Gradient, unused: frozenset[str]) -> None:
        self._recorder.restart()
        turn = self._begin(gradient, unused)
        agreed = self._agree(turn)
        self.unused = (self.unused - gradient.names) | agreed.unused
        skip = self._follow_step(turn.step, agreed.skip)
        started = perf_counter()  # after the agreement, which waits for the last rank
        if skip:
            gradient.fill_(float("nan"))
            stats = Stats(0, 0)
        else:
            stats = self._reduce_used_(turn, agreed.unused).stats
        self._steps |= dict.fromkeys((name for name, _ in gradient.layout), turn.step + 1)
        self._recorder.take(turn, stats, self.feedback.norm(gradient.layout), skip)
        if self.tuner is not None and gradient.numel >= self.config.min_numel and not skip:
            way = Way(True, self._tools.wire.values) if turn.is_sparse else DENSE
            self.tuner.observe(gradient.layout, way, perf_counter() - started)

    def _begin(self, gradient: Gradient, unused: frozenset[str]) -> Turn:
        """Decide what to do with a bucket."""
        numel = gradient.numel
        step = max((self._steps.get(name, 0) for name in gradient.names), default=0)
        is_sparse = self._is_sparse(step, numel) and self._follow_tuner(gradient.layout)
        k = self.schedule.k_at(step, numel) if is_sparse else numel
        with_feedback = is_sparse or self._is_rounding_dense(step)
        return Turn(gradient, step, k, is_sparse, with_feedback, unused)

    def _follow_tuner(self, layout: Layout) -> bool:
        """Whether this bucket goes sparse, over the wire format that the tuner chose for it; without one it does."""
        if self.tuner is None:
            return True
        way = self.tuner.choose(layout)
        assert isinstance(self._wire, ChosenWire)
        self._wire.use(way.wire)
        return way.is_sparse

    def _follow_step(self, step: int, skip: bool) -> bool:
        """Whether to skip: a step with a non-finite bucket is skipped whole, those already reduced are undone."""
        if step != self._open_step:
            self._open_step = step
            self.feedback.forget()
        if skip and step != self._skipped_step:
            self._skipped_step = step
            self.feedback.undo()
        return step == self._skipped_step

    def _reduce_used_(self, turn: Turn, unused: frozenset[str]) -> Reduced:
        """Reduce a finite bucket, of which the `unused` parameters take no part."""
        gradient = turn.gradient
        if self.config.on_nonfinite == "skip" and (turn.with_feedback or self.feedback.owes(gradient.layout)):
            self.feedback.remember(gradient)
        gradient.zero_(unused)
        with self.feedback.withheld(gradient.layout, unused):
            if turn.with_feedback:
                return self._reduce_with_feedback_(turn)
            return self._reduce_dense_(turn)

    def _is_sparse(self, step: int, numel: int) -> bool:
        if self._algorithm_class is Dense or self.schedule.is_warmup(step):
            return False
        return numel >= max(1, self.config.min_numel)

    def _is_rounding_dense(self, step: int) -> bool:
        """Dense by choice over a wire that rounds: the rounding error must stay owed. Warm-up is exact."""
        return self._algorithm_class is Dense and self._tools.is_rounding and not self.schedule.is_warmup(step)

    def _agree(self, turn: Turn) -> Agreement:
        """Compare notes; raises on every rank when ranks differ, or when one of them has a bad gradient."""
        gradient = turn.gradient
        fault = refusal(gradient)
        finite = fault is None and self._is_finite(turn)
        mine = Terms(gradient.layout, gradient.dtype, turn.step, turn.k, self._digestible, finite, fault, turn.unused)
        try:
            return check_terms(mine, self._transport, self.config.on_nonfinite)
        except (CommunicationError, Agreed):
            raise
        except OkTopkError as error:
            raise Agreed(error) from error

    def _is_finite(self, turn: Turn) -> bool:
        finite = self.feedback.prepare(turn.gradient, turn.wanted)
        if finite is not None:
            return finite
        return all(self._tools.kernels.all_finite(piece) for piece in turn.gradient.pieces)

    def _reduce_with_feedback_(self, turn: Turn) -> Reduced:
        gradient = turn.gradient
        acc = self.feedback.compensate(gradient, turn.wanted)
        if not isfinite(self.feedback.norm(gradient.layout)):
            raise NonFiniteError(f"the sum of the gradient and what is owed overflows {acc.dtype}: training diverges.")
        reduced = self._algorithm_for(gradient.layout).reduce(acc, turn.k)
        sent = reduced.sent
        if isinstance(reduced.mean, SparseVector):
            mean, lost = _rounded(reduced.mean, gradient.dtype)
            self._tools.kernels.fill_(gradient.pieces, mean)
            # Each rank keeps what the rounding of the mean took: summed over ranks, that is all of it.
            sent = less(sent, lost) if lost is not None and isinstance(sent, SparseVector) else sent
        else:
            gradient.copy_(reduced.mean)
        self.feedback.retain(gradient.layout, sent)
        return reduced

    def _reduce_dense_(self, turn: Turn) -> Reduced:
        gradient = turn.gradient
        owes = self.feedback.owes(gradient.layout)
        acc = (
            self.feedback.compensate(gradient)
            if owes
            else self.feedback.joined(gradient).to(residual_dtype(gradient.dtype))
        )
        reduced = self._dense.reduce(acc, gradient.numel)
        gradient.copy_(cast(Tensor, reduced.mean))
        if owes:
            self.feedback.retain(gradient.layout, reduced.sent)
        return reduced

    def _algorithm_for(self, layout: Layout) -> Algorithm:
        if layout not in self._algorithms:
            algorithm: Algorithm = self._algorithm_class(self._algorithm_config, self._tools)
            saved = self._loaded_algorithms.pop(_key(layout), None)
            if saved is not None:
                algorithm.load_state_dict(saved)
            self._algorithms[layout] = algorithm
        return self._algorithms[layout]

    # -- state ---------------------------------------------------------------------------------------------------

    def residuals(self) -> dict[str, Tensor]:
        """A copy of what is still owed, by parameter name."""
        flat = self.feedback.state_dict()
        return {name: r.view(self._shapes[name]) if name in self._shapes else r for name, r in flat.items()}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors and plain values only. Every rank has its own."""
        in_use = {_key(layout): algorithm.state_dict() for layout, algorithm in self._algorithms.items()}
        algorithms: dict[str, Any] = {**self._loaded_algorithms, **in_use}
        groups = self.grouping.current
        return {
            "version": 1,
            "algorithm": self.algorithm,
            "rank": self.rank,
            "world_size": self.world_size,
            "steps": dict(self._steps),
            "gradient_scale": self._gradient_scale,
            "groups": [[list(pair) for pair in group] for group in groups],
            "residuals": self.feedback.state_dict(),
            "velocities": self.feedback.velocities(),
            "algorithms": {key: algorithms[key] for key in map(_key, groups) if key in algorithms},
            "decisions": self.tuner.state_dict() if self.tuner is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the state was taken."""
        for what, mine in (("algorithm", self.algorithm), ("world_size", self.world_size), ("rank", self.rank)):
            if state[what] != mine:
                raise CheckpointError(
                    f"this state is of {what} {state[what]!r}, but this reducer has {mine!r}: "
                    "load the state that the same rank saved with the same settings."
                )
        self._steps = {str(name): int(step) for name, step in state["steps"].items()}
        self._gradient_scale = float(state["gradient_scale"])
        self._open_step, self._skipped_step = -1, -1
        self.grouping.resume(state["groups"])
        self.feedback.load_state_dict(state["residuals"], state["velocities"])
        self._algorithms, self._loaded_algorithms = {}, dict(state["algorithms"])
        if self.tuner is not None:
            self.tuner.load_state_dict(state["decisions"])

    def close(self) -> None:
        """Stop the communication thread and leave the process group. The reducer cannot be used afterwards."""
        self._thread.close()

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _digestible(self) -> str:
        """What must be the same on all ranks, as text."""
        shared = {name: value for name, value in asdict(self.config).items() if name != "density"}
        return f"{self.algorithm} {self._algorithm_config} {shared}"


def _rounded(mean: SparseVector, dtype: torch.dtype) -> tuple[SparseVector, SparseVector | None]:
    """The mean as `dtype` can hold it, and what that leaves over."""
    if mean.values.dtype == dtype:
        return mean, None
    limit = torch.finfo(dtype).max
    rounded = mean.with_values(mean.values.clamp(-limit, limit).to(dtype).to(mean.values.dtype))
    return rounded, mean.with_values(mean.values - rounded.values)


def _key(layout: Layout) -> str:
    return ",".join(f"{name}:{numel}" for name, numel in layout)
