"""The collective alone: time by phase, and volume against what theory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from oktopk.algorithms import ALGORITHMS
from oktopk.bench.cluster import Cluster
from oktopk.bench.processes import run_ranks
from oktopk.bench.rank import RankContext
from oktopk.config import WIRES, require_density
from oktopk.errors import ConfigError, nearest
from oktopk.metrics import StepRecord
from oktopk.reducer import Reducer

WARMUP = 4  # until Ok-Topk has learned what to expect
SHARED = 0.5  # how much of a rank's gradient is the same on all: selections overlap partly, as in training


@dataclass(frozen=True)
class Sweep:
    """Every combination is measured."""

    numels: tuple[int, ...] = (1_000_000,)
    densities: tuple[float, ...] = (0.01,)
    world_sizes: tuple[int, ...] = (4,)
    algorithms: tuple[str, ...] = tuple(ALGORITHMS)
    wires: tuple[str, ...] = ("float32",)
    repeats: int = 5

    def __post_init__(self) -> None:
        for density in self.densities:
            require_density(density)
        for what, known in ((self.algorithms, tuple(ALGORITHMS)), (self.wires, WIRES)):
            for name in what:
                if name not in known:
                    raise ConfigError(f"unknown name {name!r}. {nearest(name, known)}")
        if min(*self.numels, *self.world_sizes, self.repeats, 1) < 1:
            raise ConfigError("numels, world_sizes and repeats must be 1 or more.")


@dataclass(frozen=True)
class AllreduceResult:
    """One combination."""

    algorithm: str
    wire: str
    numel: int
    density: float
    world_size: int
    seconds: float  # median over repeats of the slowest rank
    fastest: float
    slowest: float
    phases: dict[str, float]  # of rank 0
    bytes_received: float  # mean over ranks
    most_received: int  # by any rank
    messages: int  # sent by rank 0
    rounds: float  # messages that had to follow one another, mean over repeats
    selected_global: int

    @property
    def k(self) -> int:
        return max(1, round(self.density * self.numel))

    @property
    def words_over_k(self) -> float:
        """Words received per rank over k(P-1)/P: no method below 2, Ok-Topk never above 6."""
        return self.bytes_received / 4 / (self.k * (self.world_size - 1) / self.world_size)


def bench_allreduce(
    cluster: Cluster, sweep: Sweep, on_result: Callable[[AllreduceResult], None] = lambda result: None
) -> list[AllreduceResult]:
    """Measure every combination in the cluster, whose ranks must suffice for the largest world."""
    if max(sweep.world_sizes) > cluster.world_size or min(sweep.world_sizes) < 2:
        raise ConfigError(f"world sizes must be 2 to {cluster.world_size} (hosts x per-host), got {sweep.world_sizes}.")
    results: list[AllreduceResult] = []
    for world_size in sweep.world_sizes:
        results += _bench_world(first_hosts(cluster, world_size), sweep, on_result)
    return results


def _bench_world(cluster: Cluster, sweep: Sweep, on_result: Callable[[AllreduceResult], None]) -> list[AllreduceResult]:
    combinations = list(product(sweep.numels, sweep.densities, sweep.algorithms, sweep.wires))
    arguments = {"combinations": [c for c in combinations if not _repeats_dense(c, sweep)], "repeats": sweep.repeats}
    records = run_ranks(
        cluster, "oktopk.bench.allreduce:measure", arguments, 120.0 + 90.0 * len(combinations),
        lambda record: on_result(AllreduceResult(**record)),
    )  # fmt: skip
    return [AllreduceResult(**record) for record in records[0]]


def first_hosts(cluster: Cluster, world_size: int) -> Cluster:
    """The same cluster with fewer ranks."""
    per_host = min(cluster.per_host, world_size)
    if world_size % per_host:
        raise ConfigError(f"{world_size} ranks do not fill hosts of {per_host}.")
    return replace(cluster, hosts=world_size // per_host, per_host=per_host)


def measure(context: RankContext, combinations: Sequence[Sequence[Any]], repeats: int) -> None:
    """The work of one rank."""
    for numel, density, algorithm, wire in combinations:
        record = _measure_one(numel, density, algorithm, wire, repeats)
        if context.rank == 0:
            context.emit(
                algorithm=algorithm, wire=wire, numel=numel, density=density, world_size=context.world_size,
                **record,
            )  # fmt: skip


def _measure_one(numel: int, density: float, algorithm: str, wire: str, repeats: int) -> dict[str, Any]:
    reducer = Reducer(algorithm, density, wire=wire, hosts=None)
    gradients = _gradients(numel, reducer.rank)
    times, records = [], []
    for step in range(WARMUP + repeats):
        flat = gradients[step % len(gradients)].clone()
        dist.barrier()
        started = perf_counter()
        reducer.submit([("gradient", numel)], flat).wait()
        times.append(perf_counter() - started)
        records.append(reducer.last_step)
    reducer.close()
    return _summary(times[WARMUP:], records[WARMUP:])


def _summary(times: Sequence[float], records: Sequence[StepRecord]) -> dict[str, Any]:
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    received = median(record.bytes_received for record in records)
    most, total = torch.tensor([float(received)]), torch.tensor([float(received)], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(total, dist.ReduceOp.SUM)
    return {
        "seconds": median(slowest.tolist()), "fastest": float(slowest.min()), "slowest": float(slowest.max()),
        "phases": {name: median(r.seconds[name] for r in records) for name in records[0].seconds},
        "bytes_received": float(total) / dist.get_world_size(), "most_received": int(most),
        "messages": records[-1].messages, "rounds": mean(record.rounds for record in records),
        "selected_global": records[-1].selected_global,
    }  # fmt: skip


def _gradients(numel: int, rank: int) -> list[torch.Tensor]:
    """Two gradients of this rank, part of which all ranks share."""
    shared, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(100 + rank)
    return [
        SHARED * torch.randn(numel, generator=shared) + (1 - SHARED) * torch.randn(numel, generator=own)
        for _ in range(2)
    ]


def rounds_text(results: Sequence[AllreduceResult]) -> str:
    """Rounds by world size, in their order."""
    return " / ".join(f"{result.rounds:g}" for result in results)


def _repeats_dense(combination: tuple[int, float, str, str], sweep: Sweep) -> bool:
    """Dense knows neither density nor wire: measure it once."""
    _, density, algorithm, wire = combination
    return algorithm == "dense" and (density != sweep.densities[0] or wire != sweep.wires[0])
