"""What a reduction tells a program: one `StepRecord` per reduction, and where the records go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from time import perf_counter
from typing import Any, Protocol

PHASES = ("select", "pack", "exchange", "sum", "gather", "unpack")


@dataclass(frozen=True)
class StepRecord:
    """One reduction of one bucket on one rank, or (see `merge`) of all buckets of a step."""

    step: int
    phase: str  # "dense" or "sparse"
    bucket: str  # name of its first parameter
    numel: int
    k: int  # numel on dense steps
    selected_local: int  # entries this rank put forward
    selected_global: int  # entries of the mean that may be non-zero
    bytes_sent: int
    bytes_received: int
    dense_bytes: int  # what a dense all-reduce would have sent
    messages: int  # sent
    threshold_local: float
    threshold_global: float
    imbalance: float  # largest block over the mean block
    residual_norm: float
    seconds: Mapping[str, float]  # select, pack, exchange, sum, gather, unpack
    message_sizes: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # operation -> bytes -> messages sent
    final_bytes: int = 0  # of those sent: a dense mean that ended local steps in the same step as a synchronisation
    inside_bytes: int = 0  # sent besides, to ranks of the same host: over its memory, not its network
    skipped: bool = False  # a rank's gradient was not finite and the policy was to skip
    rounds: int = 0  # messages that had to follow one another, of all buckets together

    @property
    def sparsity(self) -> float:
        """Fraction of the mean that is zero: 0.0 on dense steps."""
        return 1.0 - self.selected_global / self.numel if self.numel else 0.0

    @property
    def compression_ratio(self) -> float:
        """Gradient entries per entry of the mean: 1.0 on dense steps. An empty mean counts as one entry."""
        return self.numel / max(1, self.selected_global) if self.numel else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON, the derived ones included."""
        record = asdict(self)
        record["seconds"] = dict(self.seconds)
        record["message_sizes"] = {
            operation: {str(size): count for size, count in sizes.items()}
            for operation, sizes in self.message_sizes.items()
        }
        return record | {"sparsity": self.sparsity, "compression_ratio": self.compression_ratio}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> StepRecord:
        known = {f.name: record[f.name] for f in fields(StepRecord) if f.name in record}
        known["message_sizes"] = {
            operation: {int(size): count for size, count in sizes.items()}
            for operation, sizes in known.get("message_sizes", {}).items()
        }
        return StepRecord(**known)


def merge(records: Sequence[StepRecord]) -> StepRecord:
    """All buckets of one step as one record: counts add up, thresholds are those of the largest bucket."""
    largest = max(records, key=lambda record: record.numel)

    def total(name: str) -> int:
        return sum(getattr(record, name) for record in records)

    return replace(
        largest,
        phase="sparse" if any(record.phase == "sparse" for record in records) else "dense",
        bucket=records[0].bucket,
        **{name: total(name) for name in _SUMMED},
        imbalance=max(record.imbalance for record in records),
        residual_norm=sum(record.residual_norm**2 for record in records) ** 0.5,
        seconds={phase: sum(r.seconds.get(phase, 0.0) for r in records) for phase in PHASES},
        message_sizes=merge_sizes(record.message_sizes for record in records),
        skipped=any(record.skipped for record in records),
    )


_SUMMED = (
    "numel", "k", "selected_local", "selected_global", "bytes_sent", "bytes_received", "dense_bytes", "messages",
    "final_bytes", "inside_bytes", "rounds",
)  # fmt: skip


def merge_sizes(parts: Iterable[Mapping[str, Mapping[int, int]]]) -> dict[str, dict[int, int]]:
    """Message-size distributions added up."""
    merged: dict[str, dict[int, int]] = {}
    for part in parts:
        for operation, sizes in part.items():
            into = merged.setdefault(operation, {})
            for size, count in sizes.items():
                into[size] = into.get(size, 0) + count
    return merged


class Clock:
    """Seconds per phase, and which phase is on. A phase inside another pauses the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._open: list[str] = []
        self._since = 0.0
        self.last = "idle"  # the phase that was on most recently: what an error names

    @property
    def current(self) -> str:
        return self._open[-1] if self._open else "idle"

    def restart(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return _Phase(self, name)

    def begin(self, name: str) -> None:
        self._charge()
        self._open.append(name)
        self.last = name

    def end(self) -> None:
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now = perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


class _Phase:
    """`with clock.phase(...)`; a generator would cost three times as much, and a step has dozens."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._clock.begin(self._name)

    def __exit__(self, *_: object) -> None:
        self._clock.end()


def timed(instance: Any, clock: Clock, phases: Mapping[str, str]) -> Any:
    """The same object, whose named methods run inside a phase of the clock."""
    return _Timed(instance, clock, phases)


class _Timed:
    def __init__(self, instance: Any, clock: Clock, phases: Mapping[str, str]) -> None:
        self._instance = instance
        for method, phase in phases.items():
            setattr(self, method, _inside(clock, phase, getattr(instance, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._instance, name)


def _inside(clock: Clock, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with clock.phase(phase):
            return call(*args, **kwargs)

    return run


class Sink(Protocol):
    """Where records go. Called on the communication thread, so it must be quick."""

    def __call__(self, record: StepRecord) -> None: ...


class MemorySink:
    """Keeps records until they are drained; safe between threads."""

    def __init__(self) -> None:
        self._records: list[StepRecord] = []
        self._lock = threading.Lock()

    def __call__(self, record: StepRecord) -> None:
        with self._lock:
            self._records.append(record)

    def drain(self) -> list[StepRecord]:
        """Everything since the last call, in order."""
        with self._lock:
            records, self._records = self._records, []
        return records
