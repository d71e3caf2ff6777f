"""The way of one vector: agree, compensate, reduce, retain, record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from time import perf_counter
from typing import Any

from torch import Tensor

from oktopk.algorithms import ALGORITHMS, Algorithm
from oktopk.algorithms.base import Asks
from oktopk.algorithms.dense import Dense
from oktopk.config import DenseConfig, ReducerConfig
from oktopk.errors import CheckpointError, CommunicationError, OkTopkError
from oktopk.kernels import Kernels, KernelsByDevice
from oktopk.metrics import Clock, Sink, timed
from oktopk.primitives.collectives import Tools
from oktopk.reduction.agreement import Agreement, Terms, check_terms, refusal
from oktopk.reduction.autotune import AUTO, DENSE, AutoConfig, ChosenWire, Method, Tuner
from oktopk.reduction.communication import Agreed
from oktopk.reduction.feedback import Feedback
from oktopk.reduction.gradient import Gradient, Layout
from oktopk.reduction.grouping import Grouping
from oktopk.reduction.records import Plan, Request, StepRecords
from oktopk.reduction.updates import Updates
from oktopk.schedule import Schedule
from oktopk.transport import MeteredTransport, Transport
from oktopk.types import Stats, to_dense
from oktopk.wire import Wire

_KERNEL_PHASES = {
    "all_below": "select", "accumulate_": "select", "add": "select", "select_topk": "select", "select_above": "select",
    "count_above": "select", "pick": "select", "magnitude_histogram": "select", "common": "select", "above": "select",
    "retain_": "select", "scan": "select", "move_": "unpack", "sum_sparse": "sum", "fill_": "unpack",
}  # fmt: skip
_WIRE_PHASES = {"pack": "pack", "unpack": "unpack"}


@dataclass(frozen=True)
class Settings:
    """What all ranks must have in common."""

    algorithm: str
    algorithm_config: Any
    shared: ReducerConfig
    auto: AutoConfig | None

    @cached_property
    def text(self) -> str:
        """What ranks compare. Density has its own place among what is compared, as k."""
        shared = {name: value for name, value in asdict(self.shared).items() if name != "density"}
        return f"{self.algorithm} {self.algorithm_config} {shared}"


class Pipeline:
    """Takes vectors through a reduction, one after the other, on one thread; remembers what is still owed."""

    def __init__(self, settings: Settings, transport: Transport, sink: Sink | None) -> None:
        self.settings = settings
        self.clock = Clock()
        self.transport = MeteredTransport(transport, self.clock)
        self.records = StepRecords(self.transport, self.clock, sink)
        self.schedule = Schedule(settings.shared.density, settings.shared.warmup_steps)
        self.tuner = Tuner(settings.auto, self.transport) if settings.auto else None
        self._wire = ChosenWire(settings.auto.wires) if settings.auto else Wire(settings.shared.wire)
        kernels = timed(KernelsByDevice(), self.clock, _KERNEL_PHASES)
        exact = timed(Wire("float32"), self.clock, _WIRE_PHASES)
        self.tools = Tools(self.transport, timed(self._wire, self.clock, _WIRE_PHASES), exact, kernels)
        self._dense = Dense(DenseConfig(), Tools(self.transport, exact, exact, kernels))
        self.feedback = self._feedback(kernels)
        self.grouping = Grouping()
        self.unused: set[str] = set()  # names that took no part on any rank when they were last reduced
        self.notice = 0  # what this rank tells the others with its next reduction
        self.noticed = 0  # the greatest that any rank told so far, the same on all of them
        self.gradient_scale = 1.0
        self._open_step, self._skipped_step = -1, -1
        self._algorithm_class = ALGORITHMS["oktopk" if settings.algorithm == AUTO else settings.algorithm][1]
        self._algorithms: dict[Layout, Algorithm] = {}
        self._loaded_algorithms: dict[str, Mapping[str, Any]] = {}
        self._steps: dict[str, int] = {}

    @property
    def step(self) -> int:
        """How many steps are behind us."""
        return max(self._steps.values(), default=0)

    def _feedback(self, kernels: Kernels) -> Feedback | Updates:
        shared = self.settings.shared
        if shared.reduce == "updates":
            return Updates(kernels)
        return Feedback(kernels, shared.momentum_correction, shared.factor_masking)

    def reduce_(self, gradient: Gradient, request: Request) -> Tensor:
        """Replace a gradient by its mean over ranks, group by group; or bring weights together."""
        for group in gradient.groups(self.grouping.split(gradient.layout)):
            self._reduce_group_(group, request)
        return gradient.pieces[0]

    def rescale(self, scale: float) -> None:
        """Gradients come in another unit from now on: so does what is owed."""
        if scale != self.gradient_scale:
            self.feedback.scale_(scale / self.gradient_scale)
            self.gradient_scale = scale

    def _reduce_group_(self, gradient: Gradient, request: Request) -> None:
        self.records.restart()
        plan = self._plan(gradient, request)
        agreed = self._agree(plan)
        self.noticed = max(self.noticed, agreed.notice)
        started = perf_counter()  # after the agreement, which waits for the last rank
        self.unused = (self.unused - gradient.names) | agreed.unused
        skip = self._follow_step(plan.step, agreed.skip)
        stats = Stats(0, 0)
        if skip:
            self.feedback.reject_(gradient)
        else:
            stats = self._reduce_plan_(plan, agreed.unused)
        self._steps |= dict.fromkeys(gradient.names, plan.step + 1)
        self.records.take(plan, stats, self.feedback.norm(gradient.layout), skip)
        if not skip:
            self._observe(plan, perf_counter() - started)

    def _reduce_plan_(self, plan: Plan, unused: frozenset[str]) -> Stats:
        """Reduce a finite gradient, of which the `unused` parameters take no part."""
        gradient = plan.gradient
        if plan.with_feedback and self.settings.shared.on_nonfinite == "skip":
            self.feedback.remember(gradient)
        gradient.zero_(unused)
        with self.feedback.withheld(gradient.layout, unused):
            acc = self.feedback.compensate(gradient, plan.wanted, plan.with_feedback)
            algorithm = self._algorithm_of(plan)
            reduced = algorithm.reduce(to_dense(acc) if algorithm.asks == "everything" else acc, plan.k)
            self.feedback.retain(gradient, reduced, plan.with_feedback)
        return reduced.stats

    # -- deciding ------------------------------------------------------------------------------------------------

    def _plan(self, gradient: Gradient, request: Request) -> Plan:
        step = request.step
        if step is None:
            step = max((self._steps.get(name, 0) for name in gradient.names), default=0)
        k = self.k_at(step, gradient.numel) if not request.dense else 0
        is_sparse = bool(k) and self._follow_tuner(gradient.layout)
        is_rounding = self._is_rounding_dense(step) and not request.dense
        with_feedback = is_sparse or is_rounding or self.feedback.owes(gradient.layout)
        return Plan(
            gradient,
            step,
            k if is_sparse else gradient.numel,
            is_sparse,
            is_rounding,
            with_feedback,
            request.unused & gradient.names,
            request.terms,
            wanted=0 if not is_sparse else 1 if self.asks == "some" else k,
        )

    def k_at(self, step: int, numel: int) -> int:
        """How many of `numel` entries are selected at a step; 0 if all are sent."""
        is_dense = self._algorithm_class is Dense or self.schedule.is_warmup(step)
        if is_dense or numel < max(1, self.settings.shared.min_numel):
            return 0
        return self.schedule.k_at(step, numel)

    @cached_property
    def asks(self) -> Asks:
        """What the algorithm asks of a vector."""
        algorithm: Algorithm = self._algorithm_class(self.settings.algorithm_config, self.tools)
        return algorithm.asks

    def _is_rounding_dense(self, step: int) -> bool:
        """Dense by choice over a wire that rounds: the rounding error must stay owed. Warm-up is exact."""
        return self._algorithm_class is Dense and self.tools.is_rounding and not self.schedule.is_warmup(step)

    def _follow_tuner(self, layout: Layout) -> bool:
        """Whether this bucket goes sparse, over the wire format that the tuner chose for it; without one it does."""
        if self.tuner is None:
            return True
        method = self.tuner.choose(layout)
        assert isinstance(self._wire, ChosenWire)
        self._wire.use(method.wire)
        return method.is_sparse

    def _observe(self, plan: Plan, seconds: float) -> None:
        if self.tuner is not None and plan.gradient.numel >= self.settings.shared.min_numel:
            method = Method(True, self.tools.wire.values) if plan.is_sparse else DENSE
            self.tuner.observe(plan.gradient.layout, method, seconds)

    def _agree(self, plan: Plan) -> Agreement:
        """Compare notes; raises on every rank when ranks differ, or when one of them has a bad gradient."""
        gradient = plan.gradient
        fault = refusal(gradient)
        finite = fault is None and self.feedback.is_finite(gradient, plan.wanted)
        text = self.settings.text + plan.terms
        mine = Terms(
            gradient.layout, gradient.dtype, plan.step, plan.k, text, finite, fault, plan.unused, self.notice
        )  # fmt: skip
        try:
            return check_terms(mine, self.transport, self.settings.shared.on_nonfinite)
        except (CommunicationError, Agreed):
            raise
        except OkTopkError as error:
            raise Agreed(error) from error

    def _follow_step(self, step: int, skip: bool) -> bool:
        """Whether to skip: a step with a non-finite bucket is skipped whole, those already reduced are undone."""
        if step != self._open_step:
            self._open_step = step
            self.feedback.forget()
        if skip and step != self._skipped_step:
            self._skipped_step = step
            self.feedback.undo()
        return step == self._skipped_step

    def _algorithm_of(self, plan: Plan) -> Algorithm:
        """One per layout, since what it remembers belongs to that; dense ones that do not round remember nothing."""
        if not plan.is_sparse and not plan.is_rounding:
            return self._dense
        return self.algorithm_of(plan.gradient.layout)

    def algorithm_of(self, layout: Layout) -> Algorithm:
        """The one that remembers what it did with this layout before."""
        if layout not in self._algorithms:
            algorithm: Algorithm = self._algorithm_class(self.settings.algorithm_config, self.tools)
            saved = self._loaded_algorithms.pop(_key(layout), None)
            if saved is not None:
                algorithm.load_state_dict(saved)
            self._algorithms[layout] = algorithm
        return self._algorithms[layout]

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        in_use = {_key(layout): algorithm.state_dict() for layout, algorithm in self._algorithms.items()}
        algorithms: dict[str, Any] = {**self._loaded_algorithms, **in_use}
        groups = self.grouping.current
        return {
            "version": 1,
            "algorithm": self.settings.algorithm,
            "rank": self.transport.rank,
            "world_size": self.transport.world_size,
            "steps": dict(self._steps),
            "gradient_scale": self.gradient_scale,
            "groups": [[list(pair) for pair in group] for group in groups],
            "residuals": self.feedback.state_dict(),
            "velocities": self.feedback.velocities(),
            "algorithms": {key: algorithms[key] for key in map(_key, groups) if key in algorithms},
            "decisions": self.tuner.state_dict() if self.tuner is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine = {
            "algorithm": self.settings.algorithm,
            "world_size": self.transport.world_size,
            "rank": self.transport.rank,
        }
        for what, expected in mine.items():
            if state[what] != expected:
                raise CheckpointError(
                    f"this state is of {what} {state[what]!r}, but this reducer has {expected!r}: "
                    "load the state that the same rank saved with the same settings."
                )
        self._steps = {str(name): int(step) for name, step in state["steps"].items()}
        self.gradient_scale = float(state["gradient_scale"])
        self._open_step, self._skipped_step = -1, -1
        self.grouping.resume(state["groups"])
        self.feedback.load_state_dict(state["residuals"], state["velocities"])
        self._algorithms, self._loaded_algorithms = {}, dict(state["algorithms"])
        if self.tuner is not None:
            self.tuner.load_state_dict(state["decisions"])


def _key(layout: Layout) -> str:
    return ",".join(f"{name}:{numel}" for name, numel in layout)
