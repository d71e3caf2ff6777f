"""All benchmarks of the page, one after the other, each to its own file."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from oktopk.bench.allreduce import Sweep, bench_allreduce
from oktopk.bench.cluster import Cluster, open_cluster
from oktopk.bench.contenders import CHOICES, EVERYONE, ONE_LINE
from oktopk.bench.host import busy_notes
from oktopk.bench.network import Network
from oktopk.bench.overlap import OverlapBench, bench_overlap
from oktopk.bench.result_file import header, write_results
from oktopk.bench.sizes import SIZES
from oktopk.bench.step import StepBench, bench_step_with_costs
from oktopk.errors import ConfigError, nearest
from oktopk.front_ends.defaults import default_algorithm

FAST_NETWORKS = (
    "floor",
    "ddp dense",
    "powersgd 1",
    "dense float32",
    "oktopk float32",
    "oktopk bfloat16",
    "oktopk int8",
    "auto",
    ONE_LINE,
)
LINE = ("floor", "ddp dense", "powersgd 1", ONE_LINE, *CHOICES)
ALLREDUCE_FLAGS = "--numels 1000000 10000000 --world-sizes 4 --repeats 3"
SIZES_FLAGS = (
    "--hosts 8 --world-sizes 2 4 8 --numels 100000 300000 1000000 3000000 10000000 --densities 0.01 --wires float32 "
    "--algorithms topka gtopk oktopk --repeats 9"
)
QUICK_NUMEL = 300_000

Say = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """One run of the page: where, and how it is asked for on the command line."""

    hosts: int
    network: str
    command: str
    work: Callable[[Cluster, bool, Say], tuple[Sequence[Any], dict[str, object]]]


def parts(quick: bool, only: Sequence[str] = ()) -> list[str]:
    """Names of the parts to run, in order."""
    for name in only:
        if name not in PARTS:
            raise ConfigError(f"unknown part {name!r}. {nearest(name, PARTS)}")
    return [name for name in PARTS if not only or name in only]


def run_part(name: str, folder: Path, quick: bool, say: Say) -> float:
    """Measure one part, write FOLDER/NAME.jsonl, return how many seconds it took."""
    part, started, notes = PARTS[name], perf_counter(), busy_notes()
    with open_cluster(part.hosts, Network.parse(part.network)) as cluster:
        rows, costs = part.work(cluster, quick, say)
        run = header(_kind(name), part.command, cluster, costs, notes)
    write_results(folder / f"{name}.jsonl", run, rows)
    return perf_counter() - started


def _kind(name: str) -> str:
    """Of results."""
    kind = name.partition("-")[0]
    return "step" if kind == "line" else kind


def _step(contenders: tuple[str, ...], repeats: int, seconds: float) -> Callable[[Cluster, bool, Say], Any]:
    def work(cluster: Cluster, quick: bool, say: Say) -> Any:
        bench = StepBench(contenders=contenders, repeats=repeats, seconds=seconds)
        if quick:
            bench = StepBench(numel=QUICK_NUMEL, contenders=contenders, repeats=1, seconds=0.3)
        results, costs = bench_step_with_costs(
            cluster, bench, lambda r: say(f"{r.contender}: {r.step_seconds * 1e3:.0f} ms per step")
        )
        return results, costs.to_json()

    return work


def _allreduce(cluster: Cluster, quick: bool, say: Say) -> Any:
    numels = (QUICK_NUMEL // 10,) if quick else (1_000_000, 10_000_000)
    sweep = Sweep(
        numels, (0.001, 0.01), (cluster.world_size,), wires=("float32", "bfloat16"), repeats=2 if quick else 3
    )
    return bench_allreduce(cluster, sweep, lambda r: say(f"{r.algorithm} {r.wire}")), {}


def _scaling(cluster: Cluster, quick: bool, say: Say) -> Any:
    worlds = (2, 4) if quick else (2, 4, 8, 16)
    sweep = Sweep((QUICK_NUMEL // 10 if quick else 2_000_000,), world_sizes=worlds, repeats=2)
    return bench_allreduce(cluster, sweep, lambda r: say(f"{r.algorithm}, {r.world_size} ranks")), {}


def _sizes(cluster: Cluster, quick: bool, say: Say) -> Any:
    sweep = replace(SIZES, numels=(QUICK_NUMEL // 10,), world_sizes=(2,), repeats=2) if quick else SIZES
    return bench_allreduce(cluster, sweep, lambda r: say(f"{r.algorithm}, {r.numel:,} entries")), {}


def _overlap(cluster: Cluster, quick: bool, say: Say) -> Any:
    bench = OverlapBench(numel=QUICK_NUMEL, steps=2) if quick else OverlapBench()
    algorithm, _ = default_algorithm(bench.numel, cluster.world_size, bench.density)
    return [bench_overlap(cluster, replace(bench, algorithm=algorithm))], {}


def _step_part(network: str, contenders: tuple[str, ...], repeats: int, seconds: float) -> Part:
    """Many short rounds rather than few long ones: a machine that is shared is slow for minutes at a time."""
    command = f"oktopk bench step --network {network} --repeats {repeats} --seconds {seconds:g}"
    return Part(4, network, command, _step(contenders, repeats, seconds))


def _line_part(network: str, repeats: int) -> Part:
    """As someone would compare it by hand: the one line, what it is held against, and what it might have chosen."""
    part = _step_part(network, LINE, repeats, 2)
    return replace(part, command=f"{part.command} --contenders {shlex.join(LINE)}")


PARTS: dict[str, Part] = {
    "line-1gbit": _line_part("1gbit", 3),
    "line-100mbit": _line_part("100mbit", 3),
    "line-10gbit": _line_part("10gbit", 3),
    "line-loopback": _line_part("loopback", 3),
    "step-1gbit": _step_part("1gbit", EVERYONE, 3, 2),
    "step-100mbit": _step_part("100mbit", EVERYONE, 2, 2),
    "step-10gbit": _step_part("10gbit", FAST_NETWORKS, 3, 2),
    "step-loopback": _step_part("loopback", FAST_NETWORKS, 3, 2),
    "allreduce": Part(4, "1gbit", f"oktopk bench allreduce {ALLREDUCE_FLAGS}", _allreduce),
    "scaling": Part(16, "loopback", "oktopk bench scaling", _scaling),
    "sizes": Part(8, "1gbit", f"oktopk bench allreduce {SIZES_FLAGS}", _sizes),
    "overlap-100mbit": Part(2, "100mbit", "oktopk bench overlap --network 100mbit", _overlap),
    "overlap-1gbit": Part(2, "1gbit", "oktopk bench overlap --network 1gbit", _overlap),
}
