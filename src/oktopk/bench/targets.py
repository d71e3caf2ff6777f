"""What the benchmarks hold us to, computed from their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from oktopk.bench.allreduce import AllreduceResult
from oktopk.bench.contenders import CHOICES, ONE_LINE
from oktopk.bench.measurement import Measurement
from oktopk.bench.overlap import OverlapResult
from oktopk.bench.sizes import SizeResult
from oktopk.bench.step import StepResult

FIXED = ("dense float32", "oktopk float32", "oktopk bfloat16", "oktopk int8")  # what auto chooses from


def targets(
    steps: Mapping[str, Sequence[StepResult]],
    scaling: Sequence[AllreduceResult],
    plan_errors: Sequence[float],
    line: Mapping[str, Sequence[StepResult]] | None = None,
    overlap: Mapping[str, OverlapResult] | None = None,
    sizes: Sequence[SizeResult] = (),
) -> list[Measurement]:
    """What can be computed from the runs at hand; `steps`, `line` (with the one line) and `overlap` by network."""
    found = [one for network, results in (line or {}).items() for one in _of_line(network, _by_name(results))]
    found += [one for network, results in steps.items() for one in _of_steps(network, _by_name(results))]
    found += _of_scaling(scaling)
    if sizes:
        text = "what the one line takes / fastest algorithm, worst of all sizes and 2 to 8 ranks"
        found.append(Measurement("sizes", text, max(one.over_fastest(one.register[0]) for one in sizes), 1.1))
    if overlap and "1gbit" in overlap:
        text = "share of communication hidden behind backward, 2 hosts on 2 cores, 1gbit"
        found.append(_at_least("hidden", text, overlap["1gbit"].hidden, 0.5, 0.7))
    if plan_errors:
        text = "plan against measured step times, worst error"
        found.append(Measurement("plan_error", text, max(plan_errors), 0.30, 0.15))
    return found


def _at_least(key: str, text: str, measured: float, must: float, aim: float | None = None) -> Measurement:
    return Measurement(key, text, measured, must, aim, higher=True)


def _by_name(results: Sequence[StepResult]) -> dict[str, StepResult]:
    return {result.contender: result for result in results}


def _of_line(network: str, by: Mapping[str, StepResult]) -> Iterator[Measurement]:
    """`oktopk.register(ddp, density=0.01)` and nothing else."""
    ours, dense, powersgd = by[ONE_LINE], by["ddp dense"], by.get("powersgd 1")
    ratio = dense.overhead_seconds / ours.overhead_seconds
    if network in _LINE_OVERHEAD:
        yield _at_least("line", f"overhead of DDP dense / the one line, {network}", ratio, *_LINE_OVERHEAD[network])
    if network == "1gbit" and powersgd is not None:
        ratio = powersgd.overhead_seconds / ours.overhead_seconds
        yield _at_least("line_powersgd", f"overhead of PowerSGD rank 1 / the one line, {network}", ratio, 4, 8)
    if network in _LINE_SPEEDUP:
        ratio = dense.step_seconds / ours.step_seconds
        text = f"speed-up of the one line over DDP dense, {network}"
        yield _at_least("line_speedup", text, ratio, *_LINE_SPEEDUP[network])
    if set(CHOICES) <= set(by):
        ratio = min(by[name].step_seconds for name in CHOICES) / ours.step_seconds
        yield _at_least("line_choice", f"best choice there is / the one line, step, {network}", ratio, 0.95)


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
    rounds = {r.world_size: r.rounds for r in results if r.algorithm == "oktopk"}
    for ranks, must in ((4, 4), (16, 5)):
        if ranks in rounds:
            yield Measurement("rounds", f"rounds of oktopk, {ranks} ranks", rounds[ranks], must, 3)
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


_LINE_OVERHEAD = {"1gbit": (14, 20), "100mbit": (60, 90)}
_LINE_SPEEDUP = {"1gbit": (5, 6), "10gbit": (1.3, 1.6), "loopback": (1.3, 1.6)}
_OVERHEAD = {"1gbit": (8, 16), "100mbit": (30, 50)}
_SPEEDUP = {"1gbit": 5, "100mbit": 20}
