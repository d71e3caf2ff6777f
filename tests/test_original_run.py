"""The original experiment: its configuration on 8 ranks of 2 emulated hosts, and what its table is made of."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path

import pytest

from oktopk.bench.cluster import missing_for_emulation
from oktopk.cli.main import main
from trainings import TOY, strict_rows
from trainings import plain_kernels as plain_kernels

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "docs" / "original-run"
needs_hosts = pytest.mark.skipif(missing_for_emulation() is not None, reason=str(missing_for_emulation()))
# What the table of docs/original-run.md is read from.
STEP_COLUMNS = {"step", "epoch", "loss", "lr", "wall_seconds", "memory_bytes", "seconds", "reduce"}
PHASES = {"turn", "data", "forward", "backward", "wait", "optimizer"}
REDUCE_COLUMNS = {"phase", "sparsity", "compression_ratio", "bytes_sent", "dense_bytes", "numel", "k"}


@pytest.mark.slow
@needs_hosts
@pytest.mark.timeout(900)
def test_six_steps_of_the_original_configuration_fill_every_column(tmp_path: Path) -> None:
    """8 ranks of the small network: those of the real one need 13 GB."""
    flags = (
        "--preset small --data synth-an4:64 --batch-size 1 --emulate-hosts 2 --warmup-steps 3 --max-steps 6 --epochs 1"
    )
    config = ["--config", str(ROOT / "configs" / "lstm_extended.toml")]
    assert main(["train", *config, *flags.split(), "--runs", str(tmp_path), "--name", "six"]) == 0
    rows = strict_rows(tmp_path / "six" / "steps.jsonl")
    assert [row["reduce"]["phase"] for row in rows] == ["dense"] * 3 + ["sparse"] * 3
    for row in rows:
        assert set(row) >= STEP_COLUMNS and set(row["seconds"]) >= PHASES and set(row["reduce"]) >= REDUCE_COLUMNS
        assert math.isfinite(row["loss"]) and row["reduce"]["bytes_sent"] > 0 and row["memory_bytes"] > 0
    dense, sparse = rows[2]["reduce"], rows[5]["reduce"]
    assert (dense["sparsity"], dense["compression_ratio"]) == (0.0, 1.0)
    assert sparse["sparsity"] == pytest.approx(0.98, abs=0.005) and sparse["compression_ratio"] > 40
    assert sparse["bytes_sent"] < dense["bytes_sent"] / 10
    config_json = json.loads((tmp_path / "six" / "config.json").read_text())
    assert (config_json["world_size"], config_json["density"], config_json["lr"]) == (8, 0.02, 0.01)


def test_the_kept_logs_are_small_and_without_nan() -> None:
    assert sum(file.stat().st_size for file in KEPT.iterdir()) < 200_000
    for file in KEPT.glob("*steps.jsonl.gz"):
        rows = [json.loads(line, parse_constant=pytest.fail) for line in _lines(file.name)]
        assert [row["step"] for row in rows] == list(range(len(rows)))
        assert all(math.isfinite(row["loss"]) and row["reduce"]["numel"] == 27_569_568 for row in rows)
    words = "\n".join(_lines("log.txt.gz")).lower()
    assert "nan" not in words and "warning" not in words and "traceback" not in words
    assert "rank 5 failed at step 52" in words and "resumed at step 49" in words and "done: 140 steps" in words


def test_the_kept_run_has_the_numbers_of_the_page() -> None:
    records = [json.loads(line)["reduce"] for line in _lines("steps.jsonl.gz")]
    assert [record["phase"] for record in records] == ["dense"] * 128 + ["sparse"] * 12
    assert all(record["sparsity"] == pytest.approx(0.98, abs=0.001) for record in records[128:])
    assert records[-1]["bytes_sent"] * 30 < records[0]["bytes_sent"]
    epochs = [json.loads(line) for line in _lines("epochs.jsonl.gz")]
    assert [epoch["epoch"] for epoch in epochs if "validation" in epoch] == [0, 4, 9]
    assert [round(epoch["train_loss"], 2) for epoch in epochs[-2:]] == [3.98, 3.46]


@pytest.mark.slow
@needs_hosts
@pytest.mark.processes
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("plain_kernels")
def test_workers_are_dealt_out_over_emulated_hosts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    assert _train_toy(tmp_path, "--workers", "4", "--emulate-hosts", "2") == 0
    rows = strict_rows(tmp_path / "toy" / "steps.jsonl")
    assert len(rows) == 3 and all(row["reduce"]["inside_bytes"] > 0 for row in rows)
    assert "warning" not in capfd.readouterr().err.lower()


def test_workers_that_cannot_be_dealt_out_evenly_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train_toy(tmp_path, "--workers", "3", "--emulate-hosts", "2") == 2
    assert "3 workers cannot be dealt out evenly over 2 hosts" in capsys.readouterr().err


def _train_toy(runs: Path, *flags: str) -> int:
    return main(["train", TOY, "--runs", str(runs), "--name", "toy", "--max-steps", "3", *flags])


def _lines(name: str) -> list[str]:
    return gzip.decompress((KEPT / name).read_bytes()).decode().splitlines()
