"""Does a synchronisation of updates hide behind training? The same local steps with it, beside it and without it."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist

from oktopk.bench import models
from oktopk.bench.cluster import Cluster
from oktopk.bench.overlap import WARMUP, OverlapBench, OverlapResult, mean_over_ranks, slowest
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
    timed = {name: _times(name, bench, context) for name in ("floor", "serialised", "overlapped")}
    found = {name: slowest(seconds) for name, (seconds, _) in timed.items()}
    busy = mean_over_ranks(max(0.0, timed["serialised"][1] - timed["floor"][1]))
    if context.rank == 0:
        context.emit(**found, buckets=1, busy=busy)


def _times(name: str, bench: OverlapBench, context: RankContext) -> tuple[list[float], float]:
    """Seconds of every step, and processor seconds of all threads in a mean one."""
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
            ends.append((perf_counter(), process_time()))
    seconds = [after - before for (before, _), (after, _) in pairwise(ends[WARMUP - 1 :])]
    return seconds, (ends[-1][1] - ends[WARMUP - 1][1]) / bench.steps
