"""What the benchmarks hold us to, computed from their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from oktopk.bench.allreduce import AllreduceResult
from oktopk.bench.measurement import Measurement
from oktopk.bench.step import StepResult

FIXED = ("dense float32", "oktopk float32", "oktopk bfloat16", "oktopk int8")  # what auto chooses from


def targets(
    steps: Mapping[str, Sequence[StepResult]], scaling: Sequence[AllreduceResult], plan_errors: Sequence[float]
) -> list[Measurement]:
    """What can be computed from the runs at hand; `steps` by network label."""
    by_name = {network: {r.contender: r for r in results} for network, results in steps.items()}
    found = [one for network, results in by_name.items() for one in _of_steps(network, results)]
    found += _of_scaling(scaling)
    if plan_errors:
        text = "plan against measured step times, worst error"
        found.append(Measurement("plan_error", text, max(plan_errors), 0.30, 0.15))
    return found


def _at_least(key: str, text: str, measured: float, must: float, aim: float | None = None) -> Measurement:
    return Measurement(key, text, measured, must, aim, higher=True)


def _of_steps(network: str, by: Mapping[str, StepResult]) -> Iterator[Measurement]:
    ours = _best_of_ours(by)
    dense, powersgd = by.get("ddp dense"), by.get("powersgd 1")
    if ours is not None and dense is not None and network in _OVERHEAD:
        must, aim = _OVERHEAD[network]
        ratio = dense.overhead_seconds / ours.overhead_seconds
        yield _at_least("overhead", f"overhead of DDP dense / {ours.contender}, {network}", ratio, must, aim)
        text = f"speed-up of {ours.contender} over DDP dense, {network}"
        yield _at_least("speedup", text, ours.speedup, _SPEEDUP[network])
    if ours is not None and powersgd is not None and network == "1gbit":
        ratio = powersgd.overhead_seconds / ours.overhead_seconds
        yield _at_least("over_powersgd", f"overhead of PowerSGD rank 1 / {ours.contender}, {network}", ratio, 4, 8)
    if "oktopk bfloat16" in by and by["oktopk bfloat16"].wire_bytes > 0 and network == "1gbit":
        text = "bytes on the interface / lower bound, oktopk bfloat16"
        yield Measurement("bytes_over_bound", text, _over_bound(by["oktopk bfloat16"]), 0.95, 0.80)
    if "auto" in by and dense is not None and network != "1gbit":
        fixed = min(r.step_seconds for name, r in by.items() if name in FIXED)
        ratio = fixed / by["auto"].step_seconds
        yield _at_least("auto", f"better fixed choice / auto, {network}", ratio, 0.95)


def _of_scaling(results: Sequence[AllreduceResult]) -> Iterator[Measurement]:
    volumes = {(r.algorithm, r.world_size): r.bytes_received for r in results}
    if ("oktopk", 16) in volumes and ("oktopk", 2) in volumes:
        growth = volumes["oktopk", 16] / volumes["oktopk", 2]
        yield Measurement("oktopk_growth", "volume of oktopk at 16 ranks over 2 ranks", growth, 2.1)
        others = volumes["topka", 16] / volumes["topka", 2]
        yield _at_least("topka_growth", "volume of topka at 16 ranks over 2 ranks", others, 14)


def _best_of_ours(by: Mapping[str, StepResult]) -> StepResult | None:
    ours = [result for name, result in by.items() if name.startswith("oktopk ")]
    return min(ours, key=lambda result: result.step_seconds, default=None)


def _over_bound(result: StepResult) -> float:
    """The lower bound of any method is 2k(P-1)/P words of 32 bits; P is 4 on the page."""
    k = max(1, round(result.density * result.numel))
    return result.wire_bytes / (2 * k * 3 / 4 * 4)


_OVERHEAD = {"1gbit": (8, 16), "100mbit": (30, 50)}
_SPEEDUP = {"1gbit": 5, "100mbit": 20}
