"""Real training steps, side by side in one run: what does synchronisation cost, and who pays least?"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oktopk.bench import models
from oktopk.bench.advise import measure_machine_in
from oktopk.bench.cluster import Cluster
from oktopk.bench.contenders import DEFAULT_CAP_MB, EVERYONE, ONE_LINE, Attached, attach, require_known
from oktopk.bench.machine import Machine
from oktopk.bench.processes import Record, run_ranks
from oktopk.bench.rank import RankContext
from oktopk.errors import ConfigError
from oktopk.front_ends.optimizer import DistributedOptimizer
from oktopk.training.devices import DeviceName, Place

MOST_STEPS, LEAST_STEPS, FLOOR_STEPS = 30, 3, 5


@dataclass(frozen=True)
class StepBench:
    """What to measure."""

    numel: int = 27_570_000  # parameters of the stand-in model
    model: str = ""  # a workload instead of the stand-in, with its preset: "speech:lstman4", "vision:vgg16"
    density: float = 0.01
    contenders: tuple[str, ...] = EVERYONE
    seconds: float = 4.0  # of measuring per contender and repeat; slower ones still get three steps
    repeats: int = 2  # rounds over all contenders; the best round of each counts
    steady_seconds: float = 5.0  # who takes this long per step waits for the network, which is steady: gets one round
    bucket_cap_mb: int = DEFAULT_CAP_MB
    device: DeviceName = "cpu"

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.seconds <= 0:
            raise ConfigError(f"repeats and seconds must be positive, got {self.repeats} and {self.seconds}.")
        require_known(self.contenders)
        if "floor" not in self.contenders:
            raise ConfigError("contenders must include 'floor': synchronisation overhead is the step minus the floor.")


@dataclass(frozen=True)
class StepResult:
    """One contender in one round, or (see `best`) its best round."""

    contender: str
    step_seconds: float  # median over steps of the slowest rank
    fastest: float
    slowest: float
    steps: int
    bytes_sent: int  # per rank and step, by our own account; -1 if nobody counts
    wire_bytes: int  # per rank and step, by the kernel's counter of the interface; -1 without an emulated cluster
    phases: dict[str, float]
    numel: int
    density: float
    bucket_bytes: int
    cpu_seconds: float  # of processor time per rank and step, in all threads; hardly depends on who else computes
    floor_seconds: float  # as step_seconds, of steps without synchronisation just before
    overhead_seconds: float = 0.0  # step minus floor
    speedup: float = 0.0  # DDP dense over this; 0 if dense did not take part


def bench_step(
    cluster: Cluster, bench: StepBench, on_result: Callable[[StepResult], None] = lambda result: None
) -> list[StepResult]:
    """Measure every contender in the cluster; one result each, the floor first.

    Every round has processes of its own: what memory a process keeps, which `DistributedOptimizer` changes for all of
    it, makes a step faster or slower for the rest of its life.
    """
    results: list[StepResult] = []

    def hear(record: Record) -> None:
        results.append(StepResult(**record))
        on_result(results[-1])

    for _ in range(bench.repeats):
        contenders = _still_noisy(bench, results)
        if not contenders:
            break
        arguments = {
            "numel": bench.numel, "model": bench.model, "density": bench.density,
            "contenders": contenders, "seconds": bench.seconds,
            "cap_mb": bench.bucket_cap_mb, "counted": cluster.emulated, "per_host": cluster.per_host,
            "device": bench.device,
        }  # fmt: skip
        limit = 120.0 + len(bench.contenders) * (20 * bench.seconds + 120)
        run_ranks(cluster, "oktopk.bench.step:measure", arguments, limit, hear)
    return best(results)


def _still_noisy(bench: StepBench, results: Sequence[StepResult]) -> list[str]:
    """Who takes part in the next round."""
    steady = {result.contender for result in results if result.step_seconds > bench.steady_seconds}
    return [name for name in bench.contenders if name not in steady]


def bench_step_with_costs(
    cluster: Cluster, bench: StepBench, on_result: Callable[[StepResult], None] = lambda result: None
) -> tuple[list[StepResult], Machine]:
    """The steps, and what the planner must know of the machine: its costs before and after, whichever were less."""
    before = measure_machine_in(cluster, bench.density)
    results = bench_step(cluster, bench, on_result)
    return results, before.best_with(measure_machine_in(cluster, bench.density))


def best(results: Sequence[StepResult]) -> list[StepResult]:
    """The best round of each contender, with overhead and speed-up."""
    chosen: dict[str, StepResult] = {}
    for result in results:
        known = chosen.get(result.contender)
        chosen[result.contender] = result if known is None or result.step_seconds < known.step_seconds else known
    dense = chosen.get("ddp dense")
    return [
        replace(
            result,
            overhead_seconds=result.step_seconds - result.floor_seconds,
            speedup=dense.step_seconds / result.step_seconds if dense else 0.0,
        )
        for result in chosen.values()
    ]


def measure(
    context: RankContext, numel: int, model: str, density: float, contenders: Sequence[str], seconds: float,
    cap_mb: int, counted: bool, per_host: int,
) -> None:  # fmt: skip
    """The work of one rank in one round: all contenders, one record each.

    The floor is measured again before each of them: the machine may be another one a minute later.
    """
    floor, floor_loss = _attached("floor", context, numel, model, density, cap_mb, per_host)
    below, is_untouched = 0.0, True  # the last floor; whether nobody made the process keep memory
    for name in contenders:
        if name == "floor":
            attached, loss = floor, floor_loss
        else:
            below = _measure_floor(context.place, floor, floor_loss) if is_untouched else below
            attached, loss = _attached(name, context, numel, model, density, cap_mb, per_host)
        record = _measure_one(context, attached, loss, seconds, counted, per_host)
        if attached is floor:
            below = record["step_seconds"]
        else:
            attached.close()
        is_untouched = is_untouched and name != ONE_LINE and not isinstance(attached.optimizer, DistributedOptimizer)
        if context.rank == 0:
            count = sum(parameter.numel() for parameter in attached.model.parameters())
            buckets = attached.bucket_mb << 20
            context.emit(
                contender=name, numel=count, density=density, bucket_bytes=buckets, floor_seconds=below, **record
            )
        del attached, loss
        gc.collect()


def _attached(
    name: str, context: RankContext, numel: int, model: str, density: float, cap_mb: int, per_host: int
) -> tuple[Attached, models.Loss]:
    torch.manual_seed(0)
    if model:
        module, loss = models.workload(model, context.rank, context.world_size, context.place)
    else:
        module, loss = models.synthetic(numel, context.rank, place=context.place)
    return attach(name, module, density, cap_mb, per_host), loss


def _measure_floor(place: Place, floor: Attached, loss: models.Loss) -> float:
    times = [_timed_step(place, floor, loss) for _ in range(FLOOR_STEPS + 1)][1:]
    return float(median(_over_ranks(torch.tensor(times), dist.ReduceOp.MAX).tolist()))


def _measure_one(
    context: RankContext,
    attached: Attached,
    loss: models.Loss,
    seconds: float,
    counted: bool,
    per_host: int,
) -> Record:
    for _ in range(attached.warmup):
        probe = _timed_step(context.place, attached, loss)
    steps = _agreed_steps(probe, seconds)
    before, busy = context.wire_bytes()[0], process_time()
    times, phases = [], []
    for _ in range(steps):
        times.append(_timed_step(context.place, attached, loss))
        phases.append(attached.phases())
    busy = (process_time() - busy) / steps
    dist.barrier()
    wire = (context.wire_bytes()[0] - before) / (steps * per_host)
    slowest = _over_ranks(torch.tensor(times), dist.ReduceOp.MAX)
    means = _over_ranks(torch.tensor([float(attached.sent()), wire, busy]), dist.ReduceOp.SUM) / context.world_size
    return {
        "step_seconds": median(slowest.tolist()), "fastest": float(slowest.min()), "slowest": float(slowest.max()),
        "steps": steps, "bytes_sent": round(float(means[0])), "wire_bytes": round(float(means[1])) if counted else -1,
        "cpu_seconds": float(means[2]), "phases": _median_phases(phases),
    }  # fmt: skip


def _timed_step(place: Place, attached: Attached, loss: models.Loss) -> float:
    dist.barrier()
    started = perf_counter()
    attached.optimizer.zero_grad()
    loss(attached.model).backward()
    attached.optimizer.step()
    place.finish()
    return perf_counter() - started


def _agreed_steps(probe: float, seconds: float) -> int:
    slowest = float(_over_ranks(torch.tensor([probe]), dist.ReduceOp.MAX))
    return max(LEAST_STEPS, min(MOST_STEPS, int(seconds / slowest)))


def _over_ranks(values: Tensor, op: Any) -> Tensor:
    dist.all_reduce(values, op)
    return values


def _median_phases(phases: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: median(one[name] for one in phases) for name in (phases[0] if phases else {})}
