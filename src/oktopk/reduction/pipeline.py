"""The way of one vector: agree, compensate, reduce, retain, record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any

from torch import Tensor

from oktopk.algorithms import ALGORITHMS, Algorithm
from oktopk.algorithms.base import Asks, Choice
from oktopk.algorithms.dense import Dense
from oktopk.config import AUTO, DenseConfig, ReducerConfig
from oktopk.errors import CheckpointError, CommunicationError, NonFiniteError, OkTopkError
from oktopk.kernels import Kernels, KernelsByDevice
from oktopk.metrics import Clock, Sink, timed
from oktopk.primitives.collectives import Tools
from oktopk.primitives.partition import told_words
from oktopk.reduction.agreement import Agreement, Terms, check_terms, end_together, refusal
from oktopk.reduction.autotune import DENSE, AutoConfig, ChosenWire, Method, Tuner
from oktopk.reduction.communication import Agreed
from oktopk.reduction.feedback import Feedback
from oktopk.reduction.gradient import Gradient, Layout
from oktopk.reduction.grouping import Grouping
from oktopk.reduction.hosts import Ranks
from oktopk.reduction.inside import ENDED, Inside, part_of_weights, scattered
from oktopk.reduction.records import Plan, Request, StepRecords
from oktopk.reduction.updates import Updates
from oktopk.schedule import Schedule
from oktopk.transport import MeteredTransport
from oktopk.types import Reduced, Source, SparseVector, Stats, to_dense
from oktopk.wire import Wire

_KERNEL_PHASES = {
    "all_below": "select", "accumulate_": "select", "add": "select", "select_topk": "select", "select_above": "select",
    "count_above": "select", "pick": "select", "magnitude_histogram": "select", "common": "select", "above": "select",
    "largest": "select", "retain_": "select", "scan": "select", "move_": "unpack", "sum_sparse": "sum",
    "fill_": "unpack",
}  # fmt: skip
_WIRE_PHASES = {"pack": "pack", "pack_all": "pack", "unpack": "unpack", "unpack_all": "unpack"}


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

    def __init__(self, settings: Settings, ranks: Ranks, sink: Sink | None) -> None:
        self.settings, self.hosts = settings, ranks.hosts
        self.clock = Clock()
        self.transport = MeteredTransport(ranks.world, self.clock)
        across = MeteredTransport(ranks.across, self.clock, self.transport.tally)
        self.schedule = Schedule(settings.shared.density, settings.shared.warmup_steps)
        self.tuner = self._tuner(across)
        self._wire = ChosenWire(settings.auto.wires) if settings.auto else Wire(settings.shared.wire)
        kernels = timed(KernelsByDevice(), self.clock, _KERNEL_PHASES)
        exact = timed(Wire("float32"), self.clock, _WIRE_PHASES)
        over_senders = settings.shared.mean_over == "senders"
        self.tools = Tools(across, timed(self._wire, self.clock, _WIRE_PHASES), exact, kernels, over_senders)
        self._room = told_words(across.world_size)
        self._dense = Dense(DenseConfig(), Tools(across, exact, exact, kernels))
        inside = MeteredTransport(ranks.inside, self.clock) if ranks.inside is not None else None
        # Inside a host bytes cost less than coding them.
        plain = timed(Wire("float32", "block16"), self.clock, _WIRE_PHASES)
        self.inside = Inside(inside, plain, ranks.devices) if inside is not None else None
        self.records = StepRecords(self.transport, inside, self.clock, sink)
        self.feedback = self._feedback(kernels)
        self.grouping = Grouping()
        self.unused: set[str] = set()  # names that took no part on any rank when they were last reduced
        self.notice = 0  # what this rank tells the others with its next reduction
        self.noticed = 0  # the greatest that any rank told so far, the same on all of them
        self.gradient_scale = 1.0
        self._open_step, self._skipped_step = -1, -1
        self.is_algorithm_fixed = True  # else what was saved goes on, whatever a rule chose here
        self._algorithm_class = ALGORITHMS["oktopk" if settings.algorithm == AUTO else settings.algorithm][1]
        self._method: Method | None = None  # that the tuner chose for the vector at hand
        self._algorithms: dict[tuple[Layout, str], Algorithm] = {}  # by name, "" is that of the settings
        self._loaded_algorithms: dict[str, Mapping[str, Any]] = {}
        self._steps: dict[str, int] = {}

    @property
    def step(self) -> int:
        """How many steps are behind us."""
        return max(self._steps.values(), default=0)

    def _feedback(self, kernels: Kernels) -> Feedback | Updates:
        shared = self.settings.shared
        if shared.reduce == "updates":
            return Updates(kernels, shared.keep_owed)
        return Feedback(kernels, shared.momentum_correction, shared.factor_masking)

    def _tuner(self, across: MeteredTransport) -> Tuner | None:
        auto, is_sparse = self.settings.auto, self.settings.algorithm != AUTO
        return Tuner(auto, self.transport, across, is_sparse) if auto is not None else None

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

    def end_together(self, error: Exception) -> None:
        """Take part in the next reduction of the others by saying that this rank ends, and why."""
        if self.inside is not None and isinstance(self.feedback, Updates):
            raise error  # where its neighbours wait, no other hosts do: who fails is told by itself
        if self.inside is not None:
            self.inside.is_common(ENDED)
        end_together(error, self.transport, self._room)

    def _share_of(self, whole: Gradient) -> Gradient:
        """What this rank reduces of it: all, or the part that it has among the ranks of its host."""
        if self.inside is None:
            return whole
        split = part_of_weights if isinstance(self.feedback, Updates) else scattered
        return split(whole, self.inside)

    def _reduce_group_(self, whole: Gradient, request: Request) -> None:
        self.records.restart()
        gradient = self._share_of(whole)
        plan = self._plan(gradient, request)
        self._open(plan.step)
        terms, choice, seconds = self._prepare(plan)
        agreed = self._agree(terms)
        self.noticed = max(self.noticed, agreed.notice)
        started = perf_counter() - seconds  # without the agreement, which waits for the last rank
        self.unused = (self.unused - whole.names) | agreed.unused
        skip = self._is_skipped(plan.step, agreed.skip)
        stats = Stats(0, 0)
        if skip:
            self.feedback.reject_(gradient)
        else:
            stats = self._reduce_plan_(plan, agreed, choice)
        self._steps |= dict.fromkeys(whole.names, plan.step + 1)
        self.records.take(plan, stats, self.feedback.norm(gradient.layout), skip)
        if not skip:
            self._observe(plan, perf_counter() - started)

    def _reduce_plan_(self, plan: Plan, agreed: Agreement, choice: Choice | None) -> Stats:
        """Reduce a finite gradient. Parameters that no rank used take no part, so that one has to choose again."""
        gradient, unused = plan.gradient, plan.gradient.own(agreed.unused)
        if choice is not None and agreed.told:
            choice = replace(choice, told=[agreed.told[rank] for rank in self.hosts.across])
        choice = None if agreed.unused else choice
        if plan.with_feedback and self.settings.shared.on_nonfinite == "skip":
            self.feedback.remember(gradient, unused)
        gradient.zero_(unused)
        with self.feedback.withheld(gradient.layout, unused):
            acc = self.feedback.compensate(gradient, plan.wanted, plan.with_feedback)
            reduced = self._reduce(acc, plan, choice)
            self.feedback.retain(gradient, reduced, plan.with_feedback)
        return reduced.stats if self.inside is None else replace(reduced.stats, selected_global=self.inside.gathered)

    def _reduce(self, acc: Source, plan: Plan, choice: Choice | None) -> Reduced:
        if plan.is_sparse and not plan.gradient.numel:  # a part of something small
            nothing = SparseVector.empty(0, to_dense(acc))
            return Reduced(nothing, nothing)
        algorithm = self._algorithm_of(plan)
        return algorithm.reduce(to_dense(acc) if algorithm.asks == "everything" else acc, plan.share, choice)

    # -- deciding ------------------------------------------------------------------------------------------------

    def _plan(self, gradient: Gradient, request: Request) -> Plan:
        step, whole = request.step, gradient.whole
        if step is None:
            step = max((self._steps.get(name, 0) for name in whole.names), default=0)
        k = self.k_at(step, whole.numel) if not request.dense else 0
        k = k if k and self._follow_tuner(whole.layout) else 0
        is_sparse = bool(k)
        share = min(gradient.numel, self.schedule.k_at(step, gradient.numel)) if is_sparse else gradient.numel
        is_rounding = self._is_rounding_dense(step) and not request.dense
        with_feedback = is_sparse or is_rounding or self.feedback.owes(gradient.layout)
        return Plan(
            gradient,
            step,
            k or whole.numel,
            share,
            is_sparse,
            is_rounding,
            with_feedback,
            request.unused & whole.names,
            request.terms,
            wanted=0 if not is_sparse else min(share, 1) if self.asks == "some" else share,
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
        self._method = self.tuner.choose(layout)
        assert isinstance(self._wire, ChosenWire)
        self._wire.use(self._method.wire)
        return self._method.is_sparse

    def _observe(self, plan: Plan, seconds: float) -> None:
        whole = plan.gradient.whole
        if self.tuner is not None and whole.numel >= self.settings.shared.min_numel:
            method = self._method if plan.is_sparse else DENSE
            assert method is not None  # the plan followed the tuner
            self.tuner.observe(whole.layout, method, seconds)

    def _prepare(self, plan: Plan) -> tuple[Terms, Choice | None, float]:
        """What this rank can do before ranks agree, without changing anything: its terms, its choice, and seconds."""
        started, whole = perf_counter(), plan.gradient.whole
        fault = refusal(whole)
        finite = fault is None and plan.gradient.is_there and self.feedback.is_finite(plan.gradient, plan.wanted)
        acc = self.feedback.ahead(plan.gradient) if finite and plan.is_sparse and plan.share else None
        choice = self._algorithm_of(plan).choose(acc, plan.share) if acc is not None else None
        terms = Terms(
            whole.layout, whole.dtype, plan.step, plan.k, self.settings.text + plan.terms, finite, fault,
            plan.unused, self.notice, choice.words if choice is not None else (),
            self.inside.kind(whole) if self.inside is not None else "",
        )  # fmt: skip
        return terms, choice, perf_counter() - started

    def _agree(self, mine: Terms) -> Agreement:
        """Compare notes; raises on every rank when ranks differ, or when one of them has a bad gradient."""
        try:
            return check_terms(mine, self.transport, self.settings.shared.on_nonfinite, self._room)
        except (CommunicationError, Agreed):
            raise
        except NonFiniteError as error:
            raise Agreed(NonFiniteError(f"{error}{self._whose}")) from error
        except OkTopkError as error:
            raise Agreed(error) from error

    @property
    def _whose(self) -> str:
        if self.hosts.is_flat:
            return ""
        return " That rank sums a part of its host's gradients: look at all ranks of its host."

    def reopen(self) -> None:
        """What comes next under the number of the last step is another one: it is not skipped because that was."""
        self._open_step, self._skipped_step = -1, -1

    def _open(self, step: int) -> None:
        if step != self._open_step:
            self._open_step = step
            self.feedback.forget()

    def _is_skipped(self, step: int, skip: bool) -> bool:
        """A step with a non-finite bucket is skipped whole, those already reduced are undone."""
        if skip and step != self._skipped_step:
            self._skipped_step = step
            self.feedback.undo()
        return step == self._skipped_step

    def _algorithm_of(self, plan: Plan) -> Algorithm:
        """One per layout, since what it remembers belongs to that; dense ones that do not round remember nothing."""
        if not plan.is_sparse and not plan.is_rounding:
            return self._dense
        return self.algorithm_of(plan.gradient.whole.layout)

    def algorithm_of(self, layout: Layout) -> Algorithm:
        """The one that remembers what it did with this layout before."""
        name = self._method.algorithm if self._method is not None else ""
        if (layout, name) not in self._algorithms:
            self._algorithms[layout, name] = self._made_for(layout) if not name else _made(name, self.tools)
        return self._algorithms[layout, name]

    def _made_for(self, layout: Layout) -> Algorithm:
        algorithm: Algorithm = self._algorithm_class(self.settings.algorithm_config, self.tools)
        saved = self._loaded_algorithms.pop(_key(layout), None)
        if saved is not None:
            algorithm.load_state_dict(saved)
        return algorithm

    # -- state ---------------------------------------------------------------------------------------------------

    def residuals(self) -> dict[str, Tensor]:
        """A flat copy of what this rank owes, by parameter: zeros where another rank of its host owes it."""
        owed = self.feedback.state_dict()
        if self.inside is None:
            return owed
        part, sizes = self.inside.part, dict(pair for group in self.grouping.current for pair in group)
        return {part.parameter(name): part.spread(r, sizes[part.parameter(name)]) for name, r in owed.items()}

    def state_dict(self) -> dict[str, Any]:
        own = {layout: algorithm for (layout, name), algorithm in self._algorithms.items() if not name}
        in_use = {_key(layout): algorithm.state_dict() for layout, algorithm in own.items()}
        algorithms: dict[str, Any] = {**self._loaded_algorithms, **in_use}
        groups = self.grouping.current
        return {
            "version": 1,
            "algorithm": self.settings.algorithm,
            "rank": self.transport.rank,
            "world_size": self.transport.world_size,
            "ranks_per_host": self.hosts.ranks_per_host,
            "steps": dict(self._steps),
            "gradient_scale": self.gradient_scale,
            "groups": [[list(pair) for pair in group] for group in groups],
            "residuals": self.feedback.state_dict(),
            "velocities": self.feedback.velocities(),
            "algorithms": {key: algorithms[key] for key in map(_key, groups) if key in algorithms},
            "decisions": self.tuner.state_dict() if self.tuner is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state["algorithm"]
        if not self.is_algorithm_fixed and saved != self.settings.algorithm and saved in ALGORITHMS:
            self._change_algorithm(saved)
        mine = {
            "algorithm": self.settings.algorithm,
            "world_size": self.transport.world_size,
            "rank": self.transport.rank,
            "ranks_per_host": self.hosts.ranks_per_host,
        }
        for what, expected in mine.items():
            if state.get(what, 1) != expected:  # what was saved before there were hosts had one rank on each
                raise CheckpointError(
                    f"this state is of {what} {state.get(what, 1)!r}, but this reducer has {expected!r}: "
                    "load the state that the same rank saved with the same settings."
                )
        self._steps = {str(name): int(step) for name, step in state["steps"].items()}
        self.gradient_scale = float(state["gradient_scale"])
        self.reopen()
        self.grouping.resume(state["groups"])
        self.feedback.load_state_dict(state["residuals"], state["velocities"])
        self._algorithms, self._loaded_algorithms = {}, dict(state["algorithms"])
        if self.tuner is not None:
            self.tuner.load_state_dict(state["decisions"])

    def _change_algorithm(self, name: str) -> None:
        config_class, self._algorithm_class = ALGORITHMS[name]
        self.settings = replace(self.settings, algorithm=name, algorithm_config=config_class())
        self.__dict__.pop("asks", None)


def _made(name: str, tools: Tools) -> Algorithm:
    """A rival, with its usual configuration."""
    config_class, algorithm_class = ALGORITHMS[name]
    algorithm: Algorithm = algorithm_class(config_class(), tools)
    return algorithm


def _key(layout: Layout) -> str:
    return ",".join(f"{name}:{numel}" for name, numel in layout)
