"""`algorithm="auto"`: which way is fastest for each bucket, found by trying, and agreed between ranks.

1. Try the sparse algorithm with each wire format for a few steps, and time a small message over the link.
2. Try dense too, unless the link says that it would take several times as long.
3. All ranks take the way whose slowest rank was fastest, say why, and keep to it until the next check.

Every way is a correct reduction with error feedback, so that trials cost time and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from oktopk.config import WIRES, require_positive
from oktopk.errors import ConfigError, nearest
from oktopk.gradient import Layout
from oktopk.transport.base import Transport, all_reduce_bytes
from oktopk.types import SparseVector
from oktopk.wire import Packed, Wire

log = logging.getLogger("oktopk")

AUTO = "auto"
PROBE_BYTES = 64 * 1024  # to each peer: long enough to feel the bandwidth, short enough for slow links
HOPELESS = 3.0  # dense is not tried when the link alone would take this many times as long as the best sparse way
HABIT = 0.97  # a new way must be this much faster than the one in use
COARSER = 0.9  # a coarser wire format must be this much faster than a finer one: trials are noisy, and it rounds more


@dataclass(frozen=True)
class AutoConfig:
    """How the fastest way is looked for."""

    wires: tuple[str, ...] = ("float32", "bfloat16", "int8")  # value formats to try; fewer = shorter trials
    trial_steps: int = 5  # timed steps per way, after one that warms up; more = surer, longer trials
    recheck_every: int = 2000  # steps between trials; smaller = quicker to notice a changed network, more trials

    def __post_init__(self) -> None:
        require_positive("trial_steps", self.trial_steps)
        require_positive("recheck_every", self.recheck_every)
        for wire in self.wires:
            if wire not in WIRES:
                raise ConfigError(f"unknown wire format {wire!r}. {nearest(str(wire), WIRES)}")
        if not self.wires:
            raise ConfigError("wires must name at least one format to try, e.g. ('float32', 'bfloat16').")


@dataclass(frozen=True)
class Way:
    """One way to reduce a bucket."""

    is_sparse: bool
    wire: str

    @property
    def name(self) -> str:
        return f"sparse {self.wire}" if self.is_sparse else "dense"


DENSE = Way(False, "float32")


@dataclass(frozen=True)
class Decision:
    """What a bucket does from now on, and why."""

    way: Way
    reason: str


def trials(config: AutoConfig) -> int:
    """How many steps the trials of one bucket take at most."""
    return (config.trial_steps + 1) * (len(config.wires) + 1)


class Tuner:
    """Decides for every bucket. All ranks call it in the same order, so all are at the same point of every trial."""

    def __init__(self, config: AutoConfig, transport: Transport) -> None:
        self._config, self._transport = config, transport
        self._buckets: dict[Layout, _Bucket] = {}

    def choose(self, layout: Layout) -> Way:
        """How to reduce this bucket now."""
        bucket = self._buckets.setdefault(layout, _Bucket(_sparse_ways(self._config)))
        return bucket.trying[0] if bucket.trying or bucket.decision is None else bucket.decision.way

    def observe(self, layout: Layout, way: Way, seconds: float) -> None:
        """Learn how long it took; the end of a trial is the same step on all ranks."""
        bucket = self._buckets.setdefault(layout, _Bucket(_sparse_ways(self._config)))
        bucket.steps += 1
        if bucket.decision is not None and not bucket.trying:
            if bucket.steps >= self._config.recheck_every:
                bucket.restart(_sparse_ways(self._config))
            return
        bucket.seconds.setdefault(way, []).append(seconds)
        if bucket.trying and way == bucket.trying[0] and len(bucket.seconds[way]) > self._config.trial_steps:
            bucket.trying.pop(0)
            if not bucket.trying:
                self._conclude(layout, bucket)

    def decisions(self) -> dict[str, Decision]:
        """By the name of the bucket's first parameter."""
        return {_name(layout): b.decision for layout, b in self._buckets.items() if b.decision is not None}

    def state_dict(self) -> list[dict[str, Any]]:
        return [
            {"layout": [list(pair) for pair in layout], "is_sparse": d.way.is_sparse, "wire": d.way.wire,
             "reason": d.reason, "steps": bucket.steps}
            for layout, bucket in self._buckets.items() if (d := bucket.decision) is not None
        ]  # fmt: skip

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Keep to what was decided; what was still being tried is tried again."""
        self._buckets = {}
        for saved in state:
            decision = Decision(Way(bool(saved["is_sparse"]), str(saved["wire"])), str(saved["reason"]))
            layout = tuple((str(name), int(numel)) for name, numel in saved["layout"])
            self._buckets[layout] = _Bucket([], decision, steps=int(saved["steps"]))

    def _conclude(self, layout: Layout, bucket: _Bucket) -> None:
        slowest = self._slowest({way: min(times[1:] or times) for way, times in bucket.seconds.items()})
        numel = sum(count for _, count in layout)
        if DENSE not in slowest:
            estimate = self._dense_estimate(4 * numel)
            if estimate < HOPELESS * min(slowest.values()):
                bucket.trying.append(DENSE)
                return
            reason = f"dense would take {estimate * 1e3:.1f} ms on this link"
        else:
            reason = f"dense {slowest[DENSE] * 1e3:.1f} ms"
        way = _fastest(slowest, bucket.decision)
        sparse = ", ".join(f"{w.name} {s * 1e3:.1f} ms" for w, s in slowest.items() if w.is_sparse)
        bucket.decision, bucket.steps, bucket.seconds = Decision(way, f"{sparse}, {reason}"), 0, {}
        if self._transport.rank == 0:
            log.info("auto: %s for %s (%d entries): %s", way.name, _name(layout), numel, bucket.decision.reason)

    def _slowest(self, mine: Mapping[Way, float]) -> dict[Way, float]:
        """Seconds of the slowest rank, the same on all."""
        rows = self._transport.agree([round(seconds * 1e9) for seconds in mine.values()])
        return {way: max(row[column] for row in rows) / 1e9 for column, way in enumerate(mine)}

    def _dense_estimate(self, nbytes: int) -> float:
        """Seconds that the link alone needs for a dense all-reduce, as the slowest rank measures it."""
        if self._transport.world_size == 1:
            return 0.0
        message = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=self._transport.device)
        seconds = []
        for _ in range(3):
            self._transport.agree([0])
            started = perf_counter()
            for _ in self._transport.all_to_all([message] * self._transport.world_size, self._transport.world_size):
                pass
            seconds.append(perf_counter() - started)
        per_byte = min(seconds) / (PROBE_BYTES * (self._transport.world_size - 1))
        estimate = all_reduce_bytes(nbytes, self._transport.world_size) * per_byte
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

    def unpack(self, message: Tensor) -> SparseVector:
        return self._now.unpack(message)

    def limit(self, nnz: int, numel: int, dtype: torch.dtype) -> int:
        return self._now.limit(nnz, numel, dtype)


@dataclass
class _Bucket:
    trying: list[Way]  # the first is being tried
    decision: Decision | None = None
    seconds: dict[Way, list[float]] = field(default_factory=dict)
    steps: int = 0

    def restart(self, ways: list[Way]) -> None:
        self.trying, self.seconds, self.steps = ways, {}, 0


def _sparse_ways(config: AutoConfig) -> list[Way]:
    return [Way(True, wire) for wire in config.wires]


def _fastest(slowest: Mapping[Way, float], current: Decision | None) -> Way:
    best = min(slowest, key=lambda way: slowest[way])
    if current is not None and current.way in slowest and slowest[best] > HABIT * slowest[current.way]:
        return current.way
    if not best.is_sparse:
        return best
    # As they are listed, the finest first.
    return next(way for way in slowest if way.is_sparse and slowest[best] > COARSER * slowest[way])


def _name(layout: Layout) -> str:
    return layout[0][0] if layout else ""
