"""Does synchronisation hide behind backward? The same buckets, reduced while backward runs and after it."""

from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from oktopk.bench import models
from oktopk.bench.cluster import Cluster
from oktopk.bench.processes import run_ranks
from oktopk.bench.rank import RankContext
from oktopk.errors import ConfigError
from oktopk.reducer import Reducer
from oktopk.reduction.streams import future_on
from oktopk.training.devices import DeviceName, Place

WARMUP = 3


@dataclass(frozen=True)
class OverlapBench:
    """What to measure: a backward that computes a while, in several buckets."""

    numel: int = 4_000_000
    batch: int = 128  # samples per rank; more = a longer backward to hide behind
    algorithm: str = "oktopk"
    density: float = 0.01
    wire: str = "float32"
    bucket_cap_mb: float = 2.0
    steps: int = 12
    device: DeviceName = "cpu"

    def __post_init__(self) -> None:
        if self.batch < 1 or self.steps < 1 or self.bucket_cap_mb <= 0:
            raise ConfigError("batch, steps and bucket_cap_mb must be positive.")


@dataclass(frozen=True)
class OverlapResult:
    """Median seconds of a step on the slowest rank."""

    overlapped: float
    serialised: float
    floor: float  # no synchronisation at all
    buckets: int
    busy: float | None = None  # processor seconds of the synchronisation, mean over ranks; None: nobody counted

    @property
    def hidden(self) -> float:
        """Fraction of the synchronisation that backward hides."""
        return _share(self.serialised - self.overlapped, self.serialised - self.floor)

    @property
    def waiting(self) -> float | None:
        """Fraction of the synchronisation that is not processor time: all that a rank with one core can hide."""
        cost = self.serialised - self.floor
        return None if self.busy is None else _share(max(0.0, cost - self.busy), cost)

    @property
    def hidden_waiting(self) -> float | None:
        """What backward hides, as a fraction of the waiting; above 1 where processors have time for both."""
        waiting = self.waiting
        return None if waiting is None else _share(self.hidden, waiting)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def bench_overlap(cluster: Cluster, bench: OverlapBench) -> OverlapResult:
    """Measure every variant in one run, in turns."""
    records = run_ranks(cluster, "oktopk.bench.overlap:measure", vars(bench), 60.0 + 60.0 * bench.steps)
    return OverlapResult(**records[0][0])


def measure(context: RankContext, **options: Any) -> None:
    """The work of one rank."""
    bench = OverlapBench(**options)
    times: dict[str, list[float]] = {"overlapped": [], "serialised": [], "floor": []}
    busy: dict[str, list[float]] = {name: [] for name in times}
    variants = {name: _Variant(name, bench, context.rank, context.place) for name in times}
    for step in range(WARMUP + bench.steps):
        for name, variant in variants.items():
            before = process_time()
            seconds = variant.step()
            if step >= WARMUP:
                times[name].append(seconds)
                busy[name].append(process_time() - before)
    found = {name: slowest(seconds) for name, seconds in times.items()}
    of_synchronisation = mean_over_ranks(median(busy["serialised"]) - median(busy["floor"]))
    if context.rank == 0:
        context.emit(**found, buckets=variants["serialised"].buckets, busy=of_synchronisation)
    for variant in variants.values():
        variant.reducer.close()


class _Variant:
    """A model whose buckets are reduced at once, after backward, or never."""

    def __init__(self, name: str, bench: OverlapBench, rank: int, place: Place) -> None:
        torch.manual_seed(0)
        self._place = place
        self.reducer, self.buckets = Reducer(bench.algorithm, bench.density, wire=bench.wire), 0
        self._name, self._waiting = name, list[tuple[list[tuple[str, int]], Tensor]]()
        model, self._loss = models.synthetic(bench.numel, rank, bench.batch, place)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._ddp = DistributedDataParallel(
            model, bucket_cap_mb=bench.bucket_cap_mb, gradient_as_bucket_view=True, init_sync=False
        )
        self._ddp.register_comm_hook(self, _hook)
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=1e-4)

    def step(self) -> float:
        dist.barrier()
        started = perf_counter()
        self._optimizer.zero_grad()
        self._loss(self._ddp).backward()
        for layout, flat in self._waiting:
            self.reducer.submit(layout, flat).wait()
        self._waiting.clear()
        self._optimizer.step()
        self._place.finish()
        return perf_counter() - started

    def take(self, bucket: Any) -> torch.futures.Future[Tensor]:
        layout = [(self._names[id(parameter)], parameter.numel()) for parameter in bucket.parameters()]
        self.buckets = max(self.buckets, bucket.index() + 1)
        if self._name == "overlapped":
            return self.reducer.submit(layout, bucket.buffer())
        if self._name == "serialised":
            self._waiting.append((layout, bucket.buffer()))
        done: torch.futures.Future[Tensor] = future_on(bucket.buffer().device)
        done.set_result(bucket.buffer())
        return done


def _hook(state: _Variant, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.take(bucket)


def mean_over_ranks(seconds: float) -> float:
    """Of all ranks."""
    total = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def slowest(seconds: list[float]) -> float:
    """The median over steps of the slowest rank's seconds."""
    over_ranks = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(over_ranks, dist.ReduceOp.MAX)
    return float(median(over_ranks.tolist()))
