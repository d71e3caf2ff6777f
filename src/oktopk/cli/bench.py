"""`oktopk bench ...`: measure kernels, wire formats, collectives and training steps."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from oktopk.cli.console import bytes_text, console, table

if TYPE_CHECKING:
    from oktopk.bench.allreduce import AllreduceResult
    from oktopk.bench.cluster import Cluster
    from oktopk.bench.overlap import OverlapBench
    from oktopk.bench.step import StepResult

COMMANDS: dict[str, str] = {
    "step": "oktopk.cli.bench:BenchStep",
    "allreduce": "oktopk.cli.bench:BenchAllreduce",
    "scaling": "oktopk.cli.bench:BenchScaling",
    "overlap": "oktopk.cli.bench:BenchOverlap",
    "kernels": "oktopk.cli.bench_kernels:BenchKernels",
    "gpu": "oktopk.cli.bench_gpu:BenchGpu",
    "wire": "oktopk.cli.bench_wire:BenchWire",
    "rivals": "oktopk.cli.bench_rivals:BenchRivals",
    "target": "oktopk.cli.bench_target:BenchTarget",
    "all": "oktopk.cli.bench:BenchAll",
}


@dataclass(frozen=True)
class BenchStep:
    """Real training steps side by side: DDP dense, fp16, PowerSGD, our algorithms, and no synchronisation (the floor).

    The ranks are real processes. As root they run on emulated hosts whose network has the given rate; without root
    or iproute2 they share loopback, and the numbers say so.

    Example:
      oktopk bench step --hosts 2 --network 1gbit --numel 1000000 --contenders floor "ddp dense" "oktopk bfloat16"
    """

    hosts: int = 4  # emulated hosts
    network: str = "1gbit"  # rate of each host's link: 100mbit, 1gbit, 10gbit, or loopback for unshaped
    latency: str = "0ms"  # one way; needs netem in the kernel
    ranks_per_host: int = 1  # processes on each host, behind its one link
    numel: int = 27_570_000  # parameters of the stand-in model
    model: str = ""  # a workload and its preset instead of the stand-in: speech:lstman4, vision:vgg16
    density: float = 0.01  # fraction of the gradient that sparse algorithms send
    contenders: tuple[str, ...] = ()  # who takes part; default: everyone
    seconds: float = 4.0  # measured per contender and round; slow ones get at least three steps
    repeats: int = 2  # rounds over all contenders; the best round of each counts; one is enough above 5 s per step
    bucket_cap_mb: int = 25  # DDP's bucket size; PowerSGD always gets one bucket (it hangs on Gloo with more)
    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda: one GPU for each rank; auto: GPUs where there are any
    json: Path | None = None  # file for the results, as JSON lines; `oktopk plan --validate` reads it
    plot: Path | None = None  # folder for a plot, as SVG

    def __call__(self) -> int:
        from oktopk.bench.contenders import EVERYONE
        from oktopk.bench.plots import step_times
        from oktopk.bench.result_file import header, write_results
        from oktopk.bench.step import StepBench, bench_step_with_costs
        from oktopk.plotting.drawing import write_svg
        from oktopk.training.devices import kind_of

        bench = StepBench(
            self.numel, self.model, self.density, self.contenders or EVERYONE, self.seconds, self.repeats,
            bucket_cap_mb=self.bucket_cap_mb, device=kind_of(self.device),
        )  # fmt: skip
        with _cluster(self.hosts, self.network, self.latency, self.ranks_per_host) as cluster:
            with console().status("starting the ranks") as status:
                results, costs = bench_step_with_costs(
                    cluster, bench, lambda r: status.update(f"{r.contender}: {r.step_seconds * 1e3:.0f} ms per step")
                )
            # The planner's costs are those of processors.
            run = header("step", _command(), cluster, costs.to_json() if bench.device == "cpu" else None)
        console().print(table(f"training steps on {_where(cluster)}", [_step_row(r) for r in results]))
        if self.json:
            write_results(self.json, run, results)
        if self.plot:
            path = self.plot / f"step-{cluster.network.label}.svg"
            write_svg(path, f"One training step, {_where(cluster)}", step_times(results))
        return 0


@dataclass(frozen=True)
class BenchAllreduce:
    """The collective alone: a sweep over sizes, densities, worlds, algorithms and wire formats.

    Volume is given in words over k(P-1)/P: no method can do with less than 2, Ok-Topk never needs more than 6.

    Example:
      oktopk bench allreduce --hosts 2 --world-sizes 2 --numels 100000 --algorithms topka oktopk
    """

    hosts: int = 4  # emulated hosts
    network: str = "1gbit"  # rate of each host's link: 100mbit, 1gbit, 10gbit, or loopback for unshaped
    latency: str = "0ms"  # one way; needs netem in the kernel
    ranks_per_host: int = 1  # processes on each host, behind its one link
    numels: tuple[int, ...] = (1_000_000,)  # gradient lengths
    densities: tuple[float, ...] = (0.001, 0.01)  # fractions sent
    world_sizes: tuple[int, ...] = (2, 4)  # ranks that take part
    algorithms: tuple[str, ...] = ("dense", "topka", "topkdsa", "gtopk", "gaussiank", "randomk", "oktopk")
    wires: tuple[str, ...] = ("float32", "bfloat16")  # value formats
    repeats: int = 5  # reductions per combination
    json: Path | None = None  # file for the results, as JSON lines
    plot: Path | None = None  # folder for a plot, as SVG

    def __call__(self) -> int:
        from oktopk.bench.allreduce import Sweep, bench_allreduce
        from oktopk.bench.plots import volume_against_bounds
        from oktopk.bench.result_file import header, write_results
        from oktopk.plotting.drawing import write_svg

        sweep = Sweep(self.numels, self.densities, self.world_sizes, self.algorithms, self.wires, self.repeats)
        with _cluster(self.hosts, self.network, self.latency, self.ranks_per_host) as cluster:
            with console().status("starting the ranks") as status:
                results = bench_allreduce(cluster, sweep, lambda r: status.update(f"{r.algorithm} {r.wire}"))
            run = header("allreduce", _command(), cluster)
        console().print(table(f"the collective alone on {_where(cluster)}", [_allreduce_row(r) for r in results]))
        if self.json:
            write_results(self.json, run, results)
        if self.plot:
            largest = [r for r in results if r.world_size == max(self.world_sizes)]
            title = f"Volume, {max(self.world_sizes)} ranks"
            write_svg(self.plot / "allreduce.svg", title, volume_against_bounds(largest))
        return 0


@dataclass(frozen=True)
class BenchScaling:
    """One gradient, growing worlds: whose volume grows with the number of ranks?

    More ranks than cores are fine: volumes and rounds are exact, only times are labelled oversubscribed.

    Example:
      oktopk bench scaling --ranks 2 4 --numel 200000
    """

    ranks: tuple[int, ...] = (2, 4, 8, 16)  # world sizes
    numel: int = 2_000_000  # gradient length
    density: float = 0.01  # fraction sent
    wire: str = "float32"  # value format
    json: Path | None = None  # file for the results, as JSON lines
    plot: Path | None = None  # folder for a plot, as SVG

    def __call__(self) -> int:
        from oktopk.bench.allreduce import Sweep, bench_allreduce
        from oktopk.bench.plots import volume_by_world
        from oktopk.bench.result_file import header, write_results
        from oktopk.plotting.drawing import write_svg

        sweep = Sweep((self.numel,), (self.density,), self.ranks, wires=(self.wire,), repeats=2)
        with _cluster(max(self.ranks), "loopback", "0ms", 1) as cluster:
            with console().status("starting the ranks") as status:
                results = bench_allreduce(cluster, sweep, lambda r: status.update(f"{r.algorithm} x{r.world_size}"))
            run = header("scaling", _command(), cluster)
        console().print(table("received per rank, by number of ranks", scaling_rows(results)))
        _say_notes(run.notes)
        if self.json:
            write_results(self.json, run, results)
        if self.plot:
            title = f"Volume by world size, {self.numel:,} entries, density {self.density:g}"
            write_svg(self.plot / "scaling.svg", title, volume_by_world(results))
        return 0


@dataclass(frozen=True)
class BenchOverlap:
    """The same buckets reduced while backward runs, and after it: how much of the cost does backward hide?

    With --reduce updates: local steps without synchronisation, with one after every step, and with one that travels
    while the next step is computed.

    Example:
      oktopk bench overlap --steps 4 --numel 1000000
    """

    hosts: int = 2  # emulated hosts
    network: str = "100mbit"  # rate of each host's link
    numel: int = 4_000_000  # parameters of the stand-in model
    batch: int = 128  # samples per rank; more = a longer backward to hide behind
    reduce: Literal["gradients", "updates"] = "gradients"  # what is sent
    algorithm: str | None = None  # dense, topka, ... oktopk; None: what `register` chooses, for updates randomk
    density: float | None = None  # fraction sent; None: 0.01, for updates that of local_steps
    wire: str | None = None  # value format; None: float32, for updates that of local_steps
    bucket_cap_mb: float = 2.0  # DDP's bucket size; smaller = more buckets, earlier starts, more rounds
    steps: int = 12  # measured, of each variant in turns
    device: Literal["cpu", "cuda"] = "cpu"  # cuda: one GPU for each rank, shared if there are fewer
    json: Path | None = None  # file for the results, as JSON lines

    def __call__(self) -> int:
        from oktopk.bench.overlap import bench_overlap
        from oktopk.bench.overlap_updates import bench_overlap_of_updates
        from oktopk.bench.result_file import header, write_results

        bench = self._bench()
        measure = bench_overlap_of_updates if self.reduce == "updates" else bench_overlap
        with _cluster(self.hosts, self.network, "0ms", 1) as cluster, console().status("measuring"):
            result = measure(cluster, bench)
            run = header("overlap", _command(), cluster)
        rows = [
            {"variant": name, "step ms": round(getattr(result, name) * 1e3, 1)}
            for name in ("overlapped", "serialised", "floor")
        ]
        title = f"{self.reduce}, {bench.algorithm} {bench.wire} at density {bench.density:g}"
        console().print(table(f"{title}, {result.buckets} buckets, on {_where(cluster)}", rows))
        hiding = "training" if self.reduce == "updates" else "backward"
        console().print(f"{hiding} hides {result.hidden:.0%} of the synchronisation.")
        if result.waiting is not None:
            console().print(
                f"{result.waiting:.0%} of it is waiting, which is all that a core of its own can hide: "
                f"{result.hidden_waiting:.0%} of that is hidden.",
                soft_wrap=True,
            )
        if self.json:
            write_results(self.json, run, [result])
        return 0

    def _bench(self) -> OverlapBench:
        from oktopk.bench.overlap import OverlapBench
        from oktopk.config import update_defaults
        from oktopk.front_ends.defaults import default_algorithm
        from oktopk.training.devices import kind_of

        usual = OverlapBench()
        chosen = default_algorithm(self.numel, self.hosts, self.density or usual.density)[0]
        updates = update_defaults(self.algorithm)
        algorithm = updates.algorithm if self.reduce == "updates" else self.algorithm or chosen
        sent = updates if self.reduce == "updates" else usual
        density, wire = self.density if self.density is not None else sent.density, self.wire or sent.wire
        sizes, device = (self.numel, self.batch), kind_of(self.device)
        return OverlapBench(*sizes, algorithm, density, wire, self.bucket_cap_mb, self.steps, device)


@dataclass(frozen=True)
class BenchAll:
    """Run every benchmark and write the page docs/benchmarks.md with tables, plots, commands and spread.

    Takes about half an hour on two cores; needs root and iproute2 for the emulated networks.

    Example:
      oktopk bench all --quick --docs build/docs
    """

    docs: Path = Path("docs")  # folder of the page; plots go to img/ in it, results to bench/
    quick: bool = False  # a small model and short measurements: a smoke test, not figures to quote
    only: tuple[str, ...] = ()  # parts to run again (step-1gbit, scaling, ...); others keep their last results

    def __call__(self) -> int:
        from oktopk.bench.page import page_targets, target_row, write_page
        from oktopk.bench.suite import parts, run_part

        for name in parts(self.quick, self.only):
            with console().status(f"measuring {name}") as status:
                seconds = run_part(name, self.docs / "bench", self.quick, lambda text: status.update(text))
            console().print(f"{name}: {seconds:.0f} s", markup=False)
        page = write_page(self.docs, f"oktopk bench all{' --quick' if self.quick else ''}")
        console().print(table("what we hold ourselves to", [target_row(one) for one in page_targets(self.docs)]))
        console().print(f"page: {page}", markup=False, soft_wrap=True)
        return 0


def scaling_rows(results: Sequence[AllreduceResult]) -> list[Mapping[str, Any]]:
    """One row per algorithm, one column per world size, the growth from the smallest to the largest, and rounds."""
    from oktopk.bench.allreduce import rounds_text

    sizes = sorted({r.world_size for r in results})
    rows: list[Mapping[str, Any]] = []
    for algorithm in dict.fromkeys(r.algorithm for r in results):
        mine = {r.world_size: r for r in results if r.algorithm == algorithm}
        growth = mine[sizes[-1]].bytes_received / mine[sizes[0]].bytes_received
        cells: dict[str, Any] = {f"P={size}": bytes_text(mine[size].bytes_received) for size in sizes}
        rounds = rounds_text([mine[size] for size in sizes])
        rows.append({"algorithm": algorithm, **cells, "growth": round(growth, 2), "rounds": rounds})
    return rows


@contextmanager
def _cluster(hosts: int, network: str, latency: str, per_host: int) -> Iterator[Cluster]:
    from oktopk.bench.cluster import open_cluster
    from oktopk.bench.host import busy_notes
    from oktopk.bench.network import Network

    notes = busy_notes()
    with open_cluster(hosts, Network.parse(network, latency), per_host) as cluster:
        _say_notes((*cluster.notes, *notes))
        yield replace(cluster, notes=(*cluster.notes, *notes))


def _say_notes(notes: Sequence[str]) -> None:
    for note in notes:
        console().print(f"note: {note}", markup=False, soft_wrap=True)


def _where(cluster: Cluster) -> str:
    kind = "emulated hosts" if cluster.emulated else "processes on loopback"
    per_host = f" x {cluster.per_host} ranks" if cluster.per_host > 1 else ""
    return f"{cluster.hosts} {kind}{per_host}, {cluster.network.label}"


def _command() -> str:
    return shlex.join(["oktopk", *sys.argv[1:]])


def _step_row(result: StepResult) -> dict[str, Any]:
    row: dict[str, Any] = {
        "contender": result.contender,
        "step ms": round(result.step_seconds * 1e3),
        "spread ms": f"{result.fastest * 1e3:.0f}-{result.slowest * 1e3:.0f}",
        "overhead ms": round(result.overhead_seconds * 1e3),
        "CPU ms": round(result.cpu_seconds * 1e3),
        "speed-up": round(result.speedup, 2),
    }
    if result.bytes_sent >= 0:
        row["counted by us"] = bytes_text(result.bytes_sent)
    if result.wire_bytes >= 0:
        row["by the kernel"] = bytes_text(result.wire_bytes)
    return row


def _allreduce_row(result: AllreduceResult) -> dict[str, Any]:
    phases = {f"{name} ms": round(seconds * 1e3, 1) for name, seconds in result.phases.items()}
    return {
        "algorithm": result.algorithm,
        "wire": result.wire,
        "numel": result.numel,
        "density": result.density,
        "P": result.world_size,
        "time ms": round(result.seconds * 1e3, 1),
        "words/k": round(result.words_over_k, 2),
        "rounds": round(result.rounds, 1),
        **phases,
    }
