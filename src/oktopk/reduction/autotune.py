"""`algorithm="auto"` and `wire="auto"`: which method is fastest for each bucket, found by trying, agreed by all ranks.

1. Try the sparse algorithm with each wire format for a few steps, and time a small message over the link.
2. Try dense too, unless the link says that it would take several times as long.
3. All ranks take the method whose slowest rank was fastest, say why, and keep to it until the next check.

A front end that can hand over gradients in several ways (DDP's buckets one by one, or all of them as one vector) lets
these be tried too: here whole steps are timed, because buckets travel while backward goes on.

With `wire="auto"` and an algorithm that was named, only the first of these is done, and only once. A front end that
chose the algorithm itself lets a rival of it be tried besides, with the wire format that was fastest.

Every method is a correct reduction with error feedback, so that trials cost time and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from oktopk.config import WIRES, require_positive
from oktopk.errors import ConfigError, nearest
from oktopk.reduction.gradient import Layout
from oktopk.transport.base import Transport, all_reduce_bytes
from oktopk.types import SparseVector
from oktopk.wire import Packed, Wire

log = logging.getLogger("oktopk")

Option = TypeVar("Option")

PROBE_BYTES = 64 * 1024  # to each peer: long enough to feel the bandwidth, short enough for slow links
DENSE_CUTOFF = 3.0  # dense is not tried when the link alone takes so many times as long as the best sparse method
SWITCH_GAIN = 0.97  # a new method must be this much faster than the one in use
COARSER_GAIN = (
    0.95  # a coarser wire format must be this much faster than a finer one: trials are noisy, and it rounds more
)


@dataclass(frozen=True)
class AutoConfig:
    """How the fastest method is looked for."""

    wires: tuple[str, ...] = ("float32", "bfloat16", "int8")  # value formats to try; fewer = shorter trials
    trial_steps: int = 5  # timed steps per method, after one that warms up; more = surer, longer trials
    recheck_every: int = 2000  # steps between trials; smaller = quicker to notice a changed network, more trials

    def __post_init__(self) -> None:
        require_positive("trial_steps", self.trial_steps)
        require_positive("recheck_every", self.recheck_every)
        for wire in self.wires:
            if wire not in WIRES:
                raise ConfigError(f"unknown wire format {wire!r}. {nearest(str(wire), WIRES)}")
        if not self.wires:
            raise ConfigError("wires must name at least one format to try, e.g. ('float32', 'bfloat16').")


WIRES_ONCE = AutoConfig(trial_steps=3, recheck_every=2**62)  # what `wire="auto"` tries


@dataclass(frozen=True)
class Method:
    """One way to reduce a bucket."""

    is_sparse: bool
    wire: str
    algorithm: str = ""  # that of the reducer, unless it is named

    @property
    def name(self) -> str:
        return f"{self.algorithm or 'sparse'} {self.wire}" if self.is_sparse else "dense"


DENSE = Method(False, "float32")


@dataclass(frozen=True)
class Decision:
    """What a bucket does from now on, and why."""

    method: Method
    reason: str

    @property
    def way(self) -> Method:
        """What `method` was called in 0.1."""
        return self.method


BY_BUCKET, BY_STEP = FUSINGS = ("bucket by bucket", "one vector per step")


def trials(config: AutoConfig) -> int:
    """How many steps pass at most until all is decided: every method with every fusing, then steps to compare these."""
    of_ways = (config.trial_steps + 1) * (len(config.wires) + 1)
    return len(FUSINGS) * (of_ways + config.trial_steps + 2)


def wire_trials() -> int:
    """How many steps pass at most until `wire="auto"` is decided: those of every wire, and of a rival."""
    return (WIRES_ONCE.trial_steps + 1) * (len(WIRES_ONCE.wires) + 1)


class Tuner:
    """Decides for every bucket. All ranks call it in the same order, so all are at the same point of every trial."""

    def __init__(
        self, config: AutoConfig, transport: Transport, across: Transport | None = None, is_sparse: bool = False
    ) -> None:
        """Vectors travel `across`, a world of one rank of each host: of all ranks, if each is a host by itself.

        `is_sparse`: dense does not compete.
        """
        self._config, self._transport, self._across = config, transport, across or transport
        self._is_sparse, self.preface = is_sparse, "auto: "
        self.rival = ""  # another algorithm, that competes over the fastest wire
        self._methods = [Method(True, wire) for wire in config.wires]
        self._buckets: dict[Layout, _Trial[Method]] = {}
        self._fusing = _Trial(FUSINGS)
        self._tried = False  # since the last call of `was_quiet`

    def choose(self, layout: Layout) -> Method:
        """How to reduce this bucket now."""
        return self._bucket(layout).now

    def observe(self, layout: Layout, method: Method, seconds: float) -> None:
        """Learn how long it took; the end of a trial is the same step on all ranks."""
        if self._is_sparse and not method.is_sparse:
            return
        bucket = self._bucket(layout)
        self._tried |= not bucket.is_decided
        if bucket.observe(method, seconds, self._config):
            self._conclude(layout, bucket)

    def was_quiet(self) -> bool:
        """Whether nothing was being tried on any bucket since the last call."""
        tried, self._tried = self._tried, False
        return not tried

    @property
    def fusing(self) -> str:
        """How gradients should be handed over now: one of FUSINGS."""
        return self._fusing.now

    def observe_fusing(self, seconds: float) -> bool:
        """Learn how long a step took; whether all were tried, so that `conclude_fusing` must follow on every rank."""
        return self._fusing.observe(self._fusing.now, seconds, self._config)

    def conclude_fusing(self) -> None:
        slowest = self._slowest(self._fusing.best())
        chosen = _unless_hardly(min(slowest, key=lambda name: slowest[name]), slowest, self._fusing.chosen)
        reason = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in slowest.items())
        self._fusing.decide(chosen, reason)
        if self._transport.rank == 0:
            log.info("auto: %s, because steps took: %s", chosen, reason)

    def decisions(self, layouts: Sequence[Layout]) -> dict[str, Decision]:
        """Of these buckets, by the name of their first parameter."""
        trials = {_name(layout): self._buckets[layout] for layout in layouts if layout in self._buckets}
        return {name: Decision(trial.chosen, trial.reason) for name, trial in trials.items() if trial.chosen}

    def state_dict(self) -> dict[str, Any]:
        buckets = [
            {"layout": [list(pair) for pair in layout], "is_sparse": method.is_sparse, "wire": method.wire,
             "algorithm": method.algorithm, "reason": bucket.reason, "steps": bucket.steps}
            for layout, bucket in self._buckets.items() if (method := bucket.chosen) is not None
        ]  # fmt: skip
        fusing = self._fusing
        return {"buckets": buckets, "fusing": [fusing.chosen, fusing.reason, fusing.steps] if fusing.chosen else []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep to what was decided; what was still being tried is tried again."""
        self._buckets, self._fusing = {}, _Trial(FUSINGS)
        for saved in state.get("buckets", []):
            layout = tuple((str(name), int(numel)) for name, numel in saved["layout"])
            method = Method(bool(saved["is_sparse"]), str(saved["wire"]), str(saved.get("algorithm", "")))
            self._bucket(layout).decide(method, str(saved["reason"]), int(saved["steps"]))
        if state.get("fusing"):
            chosen, reason, steps = state["fusing"]
            self._fusing.decide(str(chosen), str(reason), int(steps))

    def _bucket(self, layout: Layout) -> _Trial[Method]:
        if layout not in self._buckets:
            self._buckets[layout] = _Trial(self._methods)
        return self._buckets[layout]

    def _conclude(self, layout: Layout, bucket: _Trial[Method]) -> None:
        slowest = self._slowest(bucket.best())
        numel = sum(count for _, count in layout)
        if self.rival and all(method.algorithm != self.rival for method in slowest):
            bucket.also_try(replace(_fastest(slowest, None), algorithm=self.rival))
            return
        if self._is_sparse:
            reason = "dense was not tried"
        elif DENSE not in slowest:
            estimate = self._dense_estimate(4 * numel)
            if estimate < DENSE_CUTOFF * min(slowest.values()):
                bucket.also_try(DENSE)
                return
            reason = f"dense would take {estimate * 1e3:.1f} ms on this link"
        else:
            reason = f"dense {slowest[DENSE] * 1e3:.1f} ms"
        method = _fastest(slowest, bucket.chosen)
        sparse = ", ".join(f"{w.name} {s * 1e3:.1f} ms" for w, s in slowest.items() if w.is_sparse)
        bucket.decide(method, f"{sparse}, {reason}")
        if self._transport.rank == 0:
            log.info("%s%s for %s (%d entries): %s", self.preface, method.name, _name(layout), numel, bucket.reason)

    def _slowest(self, mine: Mapping[Option, float]) -> dict[Option, float]:
        """Seconds of the slowest rank, the same on all."""
        rows = self._transport.agree([round(seconds * 1e9) for seconds in mine.values()])
        return {option: max(row[column] for row in rows) / 1e9 for column, option in enumerate(mine)}

    def _dense_estimate(self, nbytes: int) -> float:
        """Seconds that the link alone needs for a dense all-reduce, as the slowest rank measures it."""
        if self._across.world_size == 1:
            return 0.0
        message = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
        seconds = []
        for _ in range(3):
            self._across.agree([0])
            started = perf_counter()
            for _ in self._across.all_to_all([message] * self._across.world_size, self._across.world_size):
                pass
            seconds.append(perf_counter() - started)
        per_byte = min(seconds) / (PROBE_BYTES * (self._across.world_size - 1))
        ranks_per_host = self._transport.world_size // self._across.world_size
        estimate = all_reduce_bytes(nbytes // ranks_per_host, self._across.world_size) * per_byte
        return self._slowest({DENSE: estimate})[DENSE]


class ChosenWire:
    """A wire whose value format changes from bucket to bucket; a message says itself what it holds."""

    def __init__(self, wires: Sequence[str]) -> None:
        self._wires = {name: Wire(name) for name in ("float32", *wires)}
        self._now = self._wires["float32"]

    @property
    def values(self) -> str:
        return self._now.values

    def use(self, name: str) -> None:
        self._now = self._wires[name]

    def pack(self, vector: SparseVector) -> Packed:
        return self._now.pack(vector)

    def pack_all(self, values: Tensor) -> Packed:
        return self._now.pack_all(values)

    def unpack(self, message: Tensor) -> SparseVector:
        return self._now.unpack(message)

    def unpack_all(self, message: Tensor) -> Tensor:
        return self._now.unpack_all(message)

    def limit(self, nnz: int, numel: int, dtype: torch.dtype) -> int:
        return self._now.limit(nnz, numel, dtype)


@dataclass
class _Trial(Generic[Option]):
    """Options that are tried one after the other, so many steps each; then the one chosen, until a re-check."""

    options: Sequence[Option]
    chosen: Option | None = None
    reason: str = ""
    steps: int = 0  # since the last decision
    _trying: list[Option] = field(init=False)  # the first is being tried
    _seconds: dict[Option, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trying = list(self.options)

    @property
    def now(self) -> Option:
        if self._trying:
            return self._trying[0]
        assert self.chosen is not None
        return self.chosen

    @property
    def is_decided(self) -> bool:
        return not self._trying

    def observe(self, option: Option, seconds: float, config: AutoConfig) -> bool:
        """Learn how long a step took with an option; whether all were tried just now, so that one must be chosen."""
        self.steps += 1
        if self.is_decided:
            if self.steps >= config.recheck_every:
                self._trying, self._seconds, self.steps = list(self.options), {}, 0
            return False
        self._seconds.setdefault(option, []).append(seconds)
        if option == self._trying[0] and len(self._seconds[option]) > config.trial_steps:
            self._trying.pop(0)
        return self.is_decided

    def also_try(self, option: Option) -> None:
        self._trying.append(option)

    def best(self) -> dict[Option, float]:
        """The fastest step with each option; the first does not count, it warms up."""
        return {option: min(times[1:] or times) for option, times in self._seconds.items()}

    def decide(self, chosen: Option, reason: str, steps: int = 0) -> None:
        self.chosen, self.reason, self.steps, self._trying, self._seconds = chosen, reason, steps, [], {}


def _fastest(slowest: Mapping[Method, float], current: Method | None) -> Method:
    best = min(slowest, key=lambda method: slowest[method])
    kept = _unless_hardly(best, slowest, current)
    if kept != best or not best.is_sparse:
        return kept
    # As they are listed, the finest first.
    return next(method for method in slowest if method.is_sparse and slowest[best] > COARSER_GAIN * slowest[method])


def _unless_hardly(best: Option, slowest: Mapping[Option, float], current: Option | None) -> Option:
    """The best option, unless the one in use is hardly slower."""
    if current is not None and current in slowest and slowest[best] > SWITCH_GAIN * slowest[current]:
        return current
    return best


def _name(layout: Layout) -> str:
    return layout[0][0] if layout else ""
