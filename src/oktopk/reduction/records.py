"""What one reduction does with one vector, and the record that is kept of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from oktopk.errors import OkTopkError
from oktopk.metrics import Clock, Sink, StepRecord, merge
from oktopk.reduction.gradient import Gradient
from oktopk.transport import MeteredTransport
from oktopk.transport.base import all_reduce_bytes
from oktopk.transport.metered import Tally
from oktopk.types import Stats

log = logging.getLogger("oktopk")


@dataclass(frozen=True)
class Request:
    """What a front end says about a vector that it hands over."""

    unused: frozenset[str] = frozenset()  # names that took no part in this rank's backward
    step: int | None = None  # None: one more than the last
    terms: str = ""  # what else must be the same on all ranks
    dense: bool = False  # send all of it, exactly


@dataclass(frozen=True)
class Plan:
    """What is going to be done with one vector in one step."""

    gradient: Gradient
    step: int
    k: int  # of the whole gradient
    share: int  # of that, what is selected on this rank: all of it, unless ranks of a host share the work
    is_sparse: bool
    is_rounding: bool  # dense, over a wire that rounds
    with_feedback: bool  # what is owed is added, and what does not arrive stays owed
    unused: frozenset[str]  # names that took no part in this rank's backward
    terms: str = ""  # what else must be the same on all ranks
    wanted: int = 0  # how many of the largest entries will be asked for, at least 1; 0 if all are sent


class StepRecords:
    """Counts and times what happens between `restart` and `take`, and keeps the records of the latest step."""

    def __init__(
        self, transport: MeteredTransport, inside: MeteredTransport | None, clock: Clock, sink: Sink | None
    ) -> None:
        """`inside`: between the ranks of a host, if these reduce together first."""
        self._transport, self._clock, self._sink = transport, clock, sink
        self._inside, self._ranks_per_host = (inside.tally, inside.world_size) if inside is not None else (Tally(), 1)
        self._latest: list[StepRecord] = []

    def restart(self) -> None:
        self._transport.tally.restart()
        self._clock.restart()

    def take(self, plan: Plan, stats: Stats, residual_norm: float, skipped: bool) -> None:
        """Make the record of a reduction and hand it on."""
        record = self._record(plan, stats, residual_norm, skipped)
        self._inside.restart()  # not before: ranks of a host may have averaged gradients since the last reduction
        others = [r for r in self._latest if r.step == record.step and r.bucket != record.bucket]
        self._latest = [*others, record]
        self._hand_on(record)

    @property
    def last_step(self) -> StepRecord:
        """All buckets of the latest step as one record."""
        if not self._latest:
            raise OkTopkError("nothing has been reduced yet: last_step exists after the first reduce.")
        return merge(self._latest)

    def of(self, step: int) -> StepRecord | None:
        """As `last_step`, if that was the latest."""
        return self.last_step if self._latest and self._latest[0].step == step else None

    def _hand_on(self, record: StepRecord) -> None:
        """To the sink. One that fails (a full disk) is dropped: records are not worth a training."""
        if self._sink is None:
            return
        try:
            self._sink(record)
        except Exception:
            log.exception("the metrics sink failed at step %d: training goes on without it.", record.step)
            self._sink = None

    def _record(self, plan: Plan, stats: Stats, residual_norm: float, skipped: bool) -> StepRecord:
        meter, gradient = self._transport.tally, plan.gradient.whole
        return StepRecord(
            step=plan.step,
            phase="sparse" if plan.is_sparse else "dense",
            bucket=gradient.layout[0][0] if gradient.layout else "",
            numel=gradient.numel,
            k=plan.k,
            selected_local=stats.selected_local,
            selected_global=stats.selected_global,
            bytes_sent=meter.bytes_sent,
            bytes_received=meter.bytes_received,
            dense_bytes=all_reduce_bytes(gradient.nbytes, self._transport.world_size) // self._ranks_per_host,
            messages=meter.messages,
            threshold_local=stats.threshold_local,
            threshold_global=stats.threshold_global,
            imbalance=stats.imbalance,
            residual_norm=residual_norm,
            seconds=dict(self._clock.seconds),
            message_sizes={operation: dict(sizes) for operation, sizes in meter.message_sizes.items()},
            inside_bytes=self._inside.bytes_sent,
            skipped=skipped,
            rounds=meter.rounds,
        )
