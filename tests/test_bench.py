"""Benchmarks: real processes, numbers that add up, a page that says what was measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from oktopk.bench import contenders, models
from oktopk.bench import step as step_module
from oktopk.bench.allreduce import AllreduceResult, Sweep, bench_allreduce
from oktopk.bench.cluster import Cluster, missing_for_emulation, namespaces, open_cluster
from oktopk.bench.contenders import CHOICES, EVERYONE, require_known
from oktopk.bench.network import Network
from oktopk.bench.overlap import OverlapBench, OverlapResult, bench_overlap
from oktopk.bench.overlap_updates import bench_overlap_of_updates
from oktopk.bench.page import write_page
from oktopk.bench.result_file import header, write_results
from oktopk.bench.sizes import SIZES, by_size
from oktopk.bench.step import StepBench, StepResult, bench_step, best
from oktopk.bench.suite import PARTS
from oktopk.bench.targets import targets
from oktopk.cli import main
from oktopk.cli.bench import BenchOverlap
from oktopk.errors import ConfigError

needs_root = pytest.mark.skipif(missing_for_emulation() is not None, reason="no emulated network here")
NUMEL = 40_000


@pytest.mark.parametrize("numel", [16, 100, 4_097, 1_000_003, 27_570_000])
def test_the_stand_in_has_exactly_the_parameters_asked_for(numel: int) -> None:
    with torch.device("meta"):
        model = models.Synthetic(numel)
    assert sum(parameter.numel() for parameter in model.parameters()) == numel


def test_every_parameter_of_the_stand_in_gets_a_gradient() -> None:
    model, loss = models.synthetic(5_000, rank=0)
    loss(model).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_workload_can_be_measured_too() -> None:
    model, loss = models.workload("ptb:small", rank=0, world_size=2)
    loss(model).backward()
    assert any(p.grad is not None for p in model.parameters())


def test_a_contender_without_a_third_word_is_ddps_buckets_whatever_register_would_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused: list[str | None] = []
    monkeypatch.setattr(contenders, "_ddp", lambda model, _: model)
    monkeypatch.setattr(contenders, "_watched", lambda *_: None)
    monkeypatch.setattr(contenders, "register", lambda *_, fuse=None, **__: fused.append(fuse))
    for name in ("oktopk float32", "oktopk float32 flat", "oktopk bfloat16 fused"):
        contenders.attach(name, torch.nn.Linear(2, 2), 0.1)
    assert fused == ["bucket", "bucket", "step"]


def test_an_unknown_contender_is_refused_before_anything_starts() -> None:
    require_known(EVERYONE)
    require_known(["gtopk bfloat16", "topka int8 fused"])
    with pytest.raises(ConfigError, match="Did you mean 'oktopk bfloat16'"):
        require_known(["oktopk bfloat"])
    with pytest.raises(ConfigError, match="floor"):
        StepBench(contenders=("ddp dense",))


@pytest.mark.processes
@needs_root
def test_steps_are_measured_side_by_side_and_the_kernel_agrees_with_our_meter() -> None:
    ours = ("oktopk float32", "oktopk bfloat16 fused", "oktopk bfloat16 optimizer")
    contenders = ("floor", "ddp dense", "ddp fp16", "powersgd 1", *ours)
    bench = StepBench(numel=NUMEL, contenders=contenders, seconds=0.2, repeats=1)
    with open_cluster(2, Network.parse("1gbit")) as cluster:
        results = {r.contender: r for r in bench_step(cluster, bench)}
    assert tuple(results) == contenders
    assert results["floor"].overhead_seconds == 0.0 and results["ddp dense"].speedup == 1.0
    dense = results["ddp dense"]
    assert dense.bytes_sent == 4 * NUMEL
    # Headers of frames and of Gloo, acknowledgements, and the barrier before each step.
    assert dense.bytes_sent < dense.wire_bytes < 1.25 * dense.bytes_sent
    sparse = results["oktopk float32"]
    # One is of a single step, the other the mean of all: a step whose guess was wrong sends a few kilobytes more.
    assert sparse.bytes_sent - 3_000 < sparse.wire_bytes < sparse.bytes_sent + 12_000
    assert sparse.wire_bytes < dense.wire_bytes / 4
    assert all(result.floor_seconds > 0 for result in results.values())


@needs_root
@pytest.mark.slow
def test_two_ranks_on_a_host_share_its_counter() -> None:
    bench = StepBench(numel=NUMEL, contenders=("floor", "ddp dense"), seconds=0.2, repeats=1)
    with open_cluster(2, Network(None), per_host=2) as cluster:
        results = {r.contender: r for r in bench_step(cluster, bench)}
    ring = 2 * 4 * NUMEL * 3 / 4
    assert 0.3 * ring < results["ddp dense"].wire_bytes < 1.1 * ring, "one of two ring neighbours is on the same host"


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_of_four_ranks_puts_on_its_link_what_one_rank_would() -> None:
    bench = StepBench(numel=12_000_000, contenders=("floor", "oktopk float32 fused"), seconds=0.2, repeats=1)
    sent = {}
    for per_host in (1, 4):
        with open_cluster(2, Network(None), per_host=per_host) as cluster:
            results = {r.contender: r for r in bench_step(cluster, bench)}
        sent[per_host] = per_host * results["oktopk float32 fused"].wire_bytes
    assert sent[4] <= 1.1 * sent[1]


def test_who_waits_for_the_network_is_measured_once_and_the_others_in_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds: list[list[str]] = []

    def run(cluster: Cluster, task: str, arguments: dict, limit: float, hear: Callable[[dict], None]) -> None:
        rounds.append(arguments["contenders"])
        for name in arguments["contenders"]:
            hear(asdict(_step(name, 7.0 if name == "ddp dense" else 0.2)))

    monkeypatch.setattr(step_module, "run_ranks", run)
    results = bench_step(Cluster(2), StepBench(contenders=("floor", "ddp dense", "oktopk int8"), repeats=3))
    assert rounds == [["floor", "ddp dense", "oktopk int8"]] + 2 * [["floor", "oktopk int8"]]
    assert [result.contender for result in results] == ["floor", "ddp dense", "oktopk int8"]


@pytest.mark.processes
def test_the_collective_alone_stays_between_its_bounds() -> None:
    sweep = Sweep((100_000,), (0.01,), (2,), ("topka", "oktopk"), ("float32",), repeats=2)
    results = {r.algorithm: r for r in bench_allreduce(Cluster(2), sweep)}
    # 32-bit values and about 8 bits of index, once for topka; counts and quantiles come on top for oktopk.
    assert 2.0 < results["topka"].words_over_k < 2.0 * 2
    assert 2.0 < results["oktopk"].words_over_k < 6.0
    assert results["oktopk"].phases["exchange"] > 0
    assert results["topka"].rounds == 2 and 3 <= results["oktopk"].rounds <= 4  # few steps: one guess may miss


def test_a_world_larger_than_the_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 to 2"):
        bench_allreduce(Cluster(2), Sweep(world_sizes=(4,)))


@pytest.mark.slow
def test_overlap_is_measured_both_ways() -> None:
    result = bench_overlap(Cluster(2), OverlapBench(numel=NUMEL, batch=4, bucket_cap_mb=0.05, steps=2))
    assert result.buckets >= 2 and min(result.overlapped, result.serialised, result.floor) > 0
    updates = bench_overlap_of_updates(
        Cluster(2), BenchOverlap(reduce="updates", numel=NUMEL, batch=4, steps=2)._bench()
    )
    assert min(updates.overlapped, updates.serialised, updates.floor) > 0


def test_the_command_of_the_page_measures_what_the_page_shows() -> None:
    assert BenchOverlap()._bench() == OverlapBench(algorithm="topka")  # what `register` chooses for two ranks
    assert BenchOverlap(hosts=8)._bench() == OverlapBench(algorithm="oktopk")
    updates = BenchOverlap(reduce="updates")._bench()
    assert (updates.algorithm, updates.density, updates.wire) == ("randomk", 0.3, "codebook2")
    largest = BenchOverlap(reduce="updates", algorithm="oktopk", wire="int4")._bench()
    assert (largest.density, largest.wire) == (0.05, "int4")


def test_hidden_is_the_part_that_overlap_saves() -> None:
    assert OverlapResult(overlapped=1.25, serialised=2.0, floor=1.0, buckets=4).hidden == pytest.approx(0.75)


def test_what_waits_can_be_hidden_by_one_core_and_what_computes_cannot() -> None:
    result = OverlapResult(overlapped=1.8, serialised=2.0, floor=1.0, buckets=4, busy=0.6)
    assert result.waiting == pytest.approx(0.4) and result.hidden_waiting == pytest.approx(0.5)
    unknown = replace(result, busy=None)
    assert unknown.waiting is None and unknown.hidden_waiting is None
    assert replace(result, busy=1.2).hidden_waiting == 0.0  # no waiting, nothing to hide


def test_what_the_one_line_takes_is_compared_with_the_fastest() -> None:
    def one(name: str, numel: int, ranks: int, seconds: float) -> AllreduceResult:
        return replace(_volume(ranks, 1.0, name), numel=numel, seconds=seconds)

    sweep = [one("topka", 1000, 4, 2.0), one("gtopk", 1000, 4, 1.0), one("oktopk", 1000, 4, 3.0)]
    sweep += [one("topka", 4_000_000, 4, 4.0), one("oktopk", 4_000_000, 4, 2.0), one("oktopk", 1000, 2, 1.0)]
    two, small, large = by_size(sweep)
    assert (two.world_size, small.register, large.register) == (2, ("topka", "rule"), ("oktopk", "tried"))
    assert small.over_fastest("topka") == pytest.approx(2) and large.over_fastest("oktopk") == 1
    assert small.row()["that / fastest"] == "2.00" and small.row()["oktopk / fastest"] == "3.00"
    (found,) = targets({}, [], [], sizes=[small, large])
    assert found.key == "sizes" and found.measured == pytest.approx(2) and not found.ok
    assert PARTS["sizes"].command.endswith(f"--repeats {SIZES.repeats}")


def test_the_one_line_has_targets_of_its_own() -> None:
    rows = best([_step("floor", 0.1), _step("ddp dense", 1.6), _step("powersgd 1", 0.5), _step("register", 0.2)])
    overlap = {"1gbit": OverlapResult(overlapped=1.8, serialised=2.0, floor=1.0, buckets=4)}
    found = {t.key: t for t in targets({}, [_volume(4, 1.0, "oktopk")], [], {"1gbit": rows}, overlap)}
    assert found["line"].measured == pytest.approx(15) and found["line"].ok
    assert found["line_powersgd"].measured == pytest.approx(4)
    assert found["line_speedup"].measured == pytest.approx(8)
    assert not found["hidden"].ok and "rounds" in found and "line_choice" not in found


def test_the_one_line_is_held_against_the_best_that_it_could_have_chosen() -> None:
    rows = [_step("floor", 0.1), _step("ddp dense", 1.6), _step("register", 0.2)]
    rows += [_step(name, 0.15 + 0.1 * place) for place, name in enumerate(CHOICES)]
    found = {t.key: t for t in targets({}, [], [], {"10gbit": best(rows)})}
    assert found["line_choice"].measured == pytest.approx(0.75) and not found["line_choice"].ok
    assert all(f"'{name}'" in PARTS["line-1gbit"].command for name in CHOICES)


def test_the_best_round_counts_with_overhead_and_speedup() -> None:
    rounds = [_step("floor", 0.1), _step("ddp dense", 2.2), _step("oktopk int8", 0.5), _step("oktopk int8", 0.4)]
    rounds[2:] = [replace(rounds[2], floor_seconds=0.1), replace(rounds[3], floor_seconds=0.2)]
    by = {r.contender: r for r in best(rounds)}
    assert by["oktopk int8"].overhead_seconds == pytest.approx(0.2)
    assert by["oktopk int8"].speedup == pytest.approx(5.5)


def test_targets_are_ratios_of_overheads() -> None:
    rows = best([_step("floor", 0.1), _step("ddp dense", 1.5), _step("powersgd 1", 0.9), _step("oktopk int8", 0.2)])
    volumes = [_volume(size, size * 1.0, name) for name in ("topka", "oktopk") for size in (2, 16)]
    found = {t.text: t for t in targets({"1gbit": rows}, volumes, [0.1, 0.4])}
    assert found["overhead of DDP dense / oktopk int8, 1gbit"].measured == pytest.approx(14)
    assert found["overhead of DDP dense / oktopk int8, 1gbit"].ok
    assert found["overhead of PowerSGD rank 1 / oktopk int8, 1gbit"].measured == pytest.approx(8)
    assert not found["plan against measured step times, worst error"].ok


def test_the_page_has_machine_commands_spread_and_plots(tmp_path: Path) -> None:
    steps = best([_step("floor", 0.1), _step("ddp dense", 1.5), _step("oktopk bfloat16", 0.2)])
    costs = {
        "per_entry": {"dense": 1e-9, "oktopk": 1e-9, **dict.fromkeys(("topka", "topkdsa", "gtopk", "gaussiank"), 1e-9)},
        "fused_per_entry": 8e-10,
        "per_pair": dict.fromkeys(("float32", "float16", "bfloat16", "int8"), 1e-8),
        "bytes_per_pair": {"float32": 5.0, "float16": 3.0, "bfloat16": 3.0, "int8": 2.0},
        "density": 0.01, "round_seconds": 1e-5, "message_seconds": 5e-6, "stack_bytes_per_second": 1e9, "cores": 2,
    }  # fmt: skip
    cluster = Cluster(4, Network(1e9), notes=("a note for readers",))
    emulated = type("Emulated", (Cluster,), {"emulated": True})(**vars(cluster))
    folder = tmp_path / "bench"
    write_results(folder / "step-1gbit.jsonl", header("step", "oktopk bench step", emulated, costs), steps)
    volumes = [_volume(size, size / 2, name) for name in ("topka", "oktopk") for size in (2, 16)]
    write_results(folder / "scaling.jsonl", header("scaling", "oktopk bench scaling", cluster), volumes)
    write_results(folder / "allreduce.jsonl", header("allreduce", "oktopk bench allreduce", cluster), volumes)
    overlap = OverlapResult(overlapped=1.2, serialised=2.0, floor=1.0, buckets=4)
    write_results(folder / "overlap-1gbit.jsonl", header("overlap", "oktopk bench overlap", cluster), [overlap])
    page = write_page(tmp_path, "oktopk bench all").read_text()
    for expected in ("oktopk bench step", "a note for readers", "processor", "spread", "80%", "10000", "missed"):
        assert expected in page
    images = {path.name for path in (tmp_path / "img").iterdir()}
    assert {f"bench-{name}.svg" for name in ("step-1gbit", "allreduce", "scaling", "plan", "scale")} == images
    assert all(f"(img/{name})" in page for name in images)
    assert "nan" not in page.lower().replace("nanos", "")


@needs_root
@pytest.mark.slow
def test_the_step_command_prints_a_table_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    flags = ["--hosts", "2", "--network", "1gbit", "--numel", "20000", "--seconds", "0.1", "--repeats", "1"]
    outputs = ["--json", str(tmp_path / "run.jsonl"), "--plot", str(tmp_path)]
    assert main(["bench", "step", *flags, *outputs, "--contenders", "floor", "ddp dense", "oktopk int8"]) == 0
    out = capsys.readouterr().out
    assert "by the kernel" in out and "oktopk int8" in out
    assert (tmp_path / "step-1gbit.svg").is_file()
    assert main(["plan", "--validate", str(tmp_path / "run.jsonl")]) == 0
    assert not any(name.startswith(f"oktopk-{os.getpid()}-") for name in namespaces())


@pytest.mark.processes
@needs_root
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_an_interrupted_command_leaves_neither_ranks_nor_networks(number: signal.Signals) -> None:
    flags = ["--hosts", "2", "--numel", "20000", "--seconds", "60"]
    command = subprocess.Popen(
        [sys.executable, "-m", "oktopk.cli", "bench", "step", *flags], stdout=subprocess.DEVNULL, text=True
    )
    mine = f"oktopk-{command.pid}-"
    deadline = time.monotonic() + 60
    while not (host := next((name for name in namespaces() if name.startswith(mine) and name.endswith("h1")), None)):
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.05)
    while not (ranks := _pids(host)):
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.05)
    command.send_signal(number)
    assert command.wait(60) not in (0, 1)
    assert not any(name.startswith(mine) for name in namespaces())
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):  # the kernel clears them away in a moment
        assert time.monotonic() < deadline + 10
        time.sleep(0.05)


@pytest.mark.parametrize(
    "flags", [["--network", "9999gbit"], ["--hosts", "300"], ["--contenders", "floor", "nonsense"], ["--repeats", "0"]]
)
def test_bad_flags_of_the_step_command_end_with_a_message(flags: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "step", *flags]) == 2
    assert "error" in capsys.readouterr().err


def _pids(namespace: str) -> list[str]:
    environment = os.environ | {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, env=environment)
    return found.stdout.split()


def _step(contender: str, seconds: float) -> StepResult:
    return StepResult(contender, seconds, seconds, seconds, 3, 100, 110, {}, 27_570_000, 0.01, 25 << 20, 0.05, 0.1)


def _volume(world_size: int, nbytes: float, algorithm: str = "oktopk") -> AllreduceResult:
    phases = {"select": 0.1}
    return AllreduceResult(algorithm, "float32", 1000, 0.01, world_size, 1.0, 0.9, 1.1, phases, nbytes, 9, 3, 4, 10)
