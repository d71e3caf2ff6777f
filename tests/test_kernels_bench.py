"""The benchmarks of kernels and wire: every promised number is there, and they exit by it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from oktopk.bench import kernels as bench_kernels
from oktopk.bench.measurement import Measurement
from oktopk.bench.wire import entropy, uniform
from oktopk.cli import main
from oktopk.cli.bench_kernels import BenchKernels
from oktopk.cli.bench_wire import BenchWire


def test_bench_kernels_writes_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_kernels, "measure_warm_up", lambda: bench_kernels.WarmUp(2.0, 0.1))
    file = tmp_path / "made" / "kernels.json"
    code = BenchKernels(numel=50_000, repeats=1, sizes=(20_000,), json=file)()
    record = json.loads(file.read_text())
    assert {
        "selection_over_add", "speedup_over_topk_0.02", "speedup_over_topk_0.01", "speedup_over_topk_0.001",
        "extra_memory", "selected_error",
    } <= set(record["figures"])  # fmt: skip
    assert code == 0 and "must" not in record["figures"]["selection_over_add"]  # targets are about the full size
    assert record["figures"]["selected_error"]["measured"] == 0.0
    assert [row["numel"] for row in record["sizes"]] == [20_000]
    whole = [(row["algorithm"], row["density"], len(row["seconds"])) for row in record["synchronisations"]]
    assert whole == [("oktopk", 0.01, 1), ("randomk", 0.01, 1), ("randomk", 0.3, 1)]
    assert record["warm_up_seconds"] == {"cold": 2.0, "warm": 0.1}
    printed = capsys.readouterr().out
    assert "local selection at 0.01 / add_" in printed and "whole synchronisation of updates" in printed


def test_bench_wire_writes_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wire.json"
    BenchWire(numel=200_000, repeats=1, json=file)()
    figures = json.loads(file.read_text())["figures"]
    # At 2000 pairs the header of 44 bytes weighs 0.2 bits each, and chance 1%.
    assert figures["bits_per_pair_bfloat16"]["measured"] <= 24.11 + 0.4
    assert figures["bits_per_pair_int8"]["measured"] <= 16.23 + 0.4
    assert figures["bits_per_index_0.01"]["measured"] <= 8.11 + 0.2
    assert "round_trip_over_add" in figures and "bits_per_index_0.001" in figures
    assert "index codecs" in capsys.readouterr().out


def test_both_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("kernels", "wire"):
        assert main(["bench", name, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_a_missed_target_is_shown_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missed = Measurement("selection_over_add", "local selection / add_", 5.0, 4.5, 2.5)
    result = bench_kernels.KernelsResult(9, [missed], "cpu", "why", [], [], [], bench_kernels.WarmUp(2.0, 0.1))
    monkeypatch.setattr(bench_kernels, "measure_kernels", lambda *_: result)
    assert BenchKernels()() == 1
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("must", "aim", "<= 4.5", "<= 2.5", "no"))


def test_a_measurement_knows_which_way_is_better() -> None:
    at_most = Measurement("a", "", 2.0, must=2.0, aim=1.0)
    assert at_most.ok and not at_most.reaches_aim
    at_least = Measurement("b", "", 2.0, must=1.0, higher=True)
    assert at_least.ok and not replace(at_least, measured=0.5).ok


def test_uniform_vectors_have_exactly_k_entries_and_the_entropy_of_the_literature() -> None:
    assert uniform(100_000, 0.01).nnz == 1000
    assert [round(entropy(d), 2) for d in (0.02, 0.01, 0.001)] == [7.07, 8.08, 11.41]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_warm_cache_spares_the_compiler() -> None:
    warm_up = bench_kernels.measure_warm_up()
    assert warm_up.warm < warm_up.cold / 2
