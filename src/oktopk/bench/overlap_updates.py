"""Does a synchronisation of updates hide behind training? The same local steps with it, beside it and without it."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from oktopk.bench import models
from oktopk.bench.cluster import Cluster
from oktopk.bench.overlap import WARMUP, OverlapBench, OverlapResult, slowest
from oktopk.bench.processes import run_ranks
from oktopk.bench.rank import RankContext
from oktopk.front_ends.local_steps import local_steps


def bench_overlap_of_updates(cluster: Cluster, bench: OverlapBench) -> OverlapResult:
    """Measure every variant in one run, in turns."""
    records = run_ranks(cluster, "oktopk.bench.overlap_updates:measure", vars(bench), 60.0 + 60.0 * bench.steps)
    return OverlapResult(**records[0][0])


def measure(context: RankContext, **options: Any) -> None:
    """The work of one rank: each variant takes all its steps before the next, since a reduction may still travel."""
    bench = OverlapBench(**options)
    names = ("floor", "serialised", "overlapped")
    found = {name: slowest(_times(name, bench, context)) for name in names}
    if context.rank == 0:
        context.emit(**found, buckets=1)


def _times(name: str, bench: OverlapBench, context: RankContext) -> list[float]:
    torch.manual_seed(0)
    model, loss = models.synthetic(bench.numel, context.rank, bench.batch, context.place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    every = WARMUP + bench.steps + 1 if name == "floor" else 1
    with local_steps(
        model, optimizer, bench.density, bench.wire, every, algorithm=bench.algorithm, overlap=name == "overlapped"
    ):
        dist.barrier()
        ends = []  # no barrier between steps: a reduction that travels would be waited for there, off the clock
        for _ in range(WARMUP + bench.steps):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
            context.place.finish()
            ends.append(perf_counter())
    return [after - before for before, after in pairwise(ends[WARMUP - 1 :])]
