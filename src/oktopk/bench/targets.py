"""The figures that the benchmarks must reach, computed from their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from oktopk.bench.allreduce import AllreduceResult
from oktopk.bench.step import StepResult

FIXED = ("dense float32", "oktopk float32", "oktopk bfloat16", "oktopk int8")  # what auto chooses from


@dataclass(frozen=True)
class Target:
    """One figure."""

    figure: str
    must: float
    aim: float | None
    measured: float
    more_is_better: bool = True

    @property
    def holds(self) -> bool:
        return self.measured >= self.must if self.more_is_better else self.measured <= self.must


def targets(
    steps: Mapping[str, Sequence[StepResult]], scaling: Sequence[AllreduceResult], plan_errors: Sequence[float]
) -> list[Target]:
    """What can be computed from the runs at hand; `steps` by network label."""
    found = [target for network, results in steps.items() for target in _of_steps(network, _by_name(results))]
    found += _of_scaling(scaling)
    if plan_errors:
        found.append(Target("plan against measured step times, worst error", 0.30, 0.15, max(plan_errors), False))
    return found


def _of_steps(network: str, by: Mapping[str, StepResult]) -> Iterator[Target]:
    ours = _best_of_ours(by)
    dense, powersgd = by.get("ddp dense"), by.get("powersgd 1")
    if ours is not None and dense is not None and network in _OVERHEAD:
        must, aim = _OVERHEAD[network]
        ratio = dense.overhead_seconds / ours.overhead_seconds
        yield Target(f"overhead of DDP dense / {ours.contender}, {network}", must, aim, ratio)
        yield Target(f"speed-up of {ours.contender} over DDP dense, {network}", _SPEEDUP[network], None, ours.speedup)
    if ours is not None and powersgd is not None and network == "1gbit":
        ratio = powersgd.overhead_seconds / ours.overhead_seconds
        yield Target(f"overhead of PowerSGD rank 1 / {ours.contender}, {network}", 4, 8, ratio)
    if "oktopk bfloat16" in by and by["oktopk bfloat16"].wire_bytes > 0 and network == "1gbit":
        yield Target(
            "bytes on the interface / lower bound, oktopk bfloat16",
            0.95,
            0.80,
            _over_bound(by["oktopk bfloat16"]),
            False,
        )
    if "auto" in by and dense is not None and network != "1gbit":
        fixed = min(r.step_seconds for name, r in by.items() if name in FIXED)
        yield Target(f"better fixed choice / auto, {network}", 0.95, None, fixed / by["auto"].step_seconds)


def _of_scaling(results: Sequence[AllreduceResult]) -> Iterator[Target]:
    volumes = {(r.algorithm, r.world_size): r.bytes_received for r in results}
    if ("oktopk", 16) in volumes and ("oktopk", 2) in volumes:
        growth = volumes["oktopk", 16] / volumes["oktopk", 2]
        yield Target("volume of oktopk at 16 ranks over 2 ranks", 2.1, None, growth, False)
        yield Target("volume of topka at 16 ranks over 2 ranks", 14, None, volumes["topka", 16] / volumes["topka", 2])


def _best_of_ours(by: Mapping[str, StepResult]) -> StepResult | None:
    ours = [result for name, result in by.items() if name.startswith("oktopk ")]
    return min(ours, key=lambda result: result.step_seconds, default=None)


def _over_bound(result: StepResult) -> float:
    """The lower bound of any method is 2k(P-1)/P words of 32 bits; P is 4 on the page."""
    k = max(1, round(result.density * result.numel))
    return result.wire_bytes / (2 * k * 3 / 4 * 4)


def _by_name(results: Sequence[StepResult]) -> dict[str, StepResult]:
    return {result.contender: result for result in results}


_OVERHEAD = {"1gbit": (8, 16), "100mbit": (30, 50)}
_SPEEDUP = {"1gbit": 5, "100mbit": 20}
