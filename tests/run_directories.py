"""Run directories as the trainer writes them, without training: for tests of what reads them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oktopk.metrics import StepRecord

PARAMETERS = (
    "front.weight", "front.bias", "lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm.bias_ih_l0", "norm.weight",
    "norm.bias", "head.weight",
)  # fmt: skip


def write_run(
    directory: Path,
    *,
    algorithm: str = "oktopk",
    density: float = 0.02,
    steps: int = 160,
    warmup: int = 40,
    steps_per_epoch: int = 16,
    validate_every: int = 1,
    analyze_every: int = 20,
    world_size: int = 4,
    numel: int = 1_200_000,
    seed: int = 0,
) -> Path:
    """A plausible run; `steps=0`, `validate_every=0`, `analyze_every=0` and `warmup >= steps` leave parts out."""
    chance = random.Random(seed)
    directory.mkdir(parents=True)
    config = {
        "workload": "speech", "preset": "small", "algorithm": algorithm, "density": density, "warmup_steps": warmup,
        "workers": world_size, "wire": "float32", "seed": seed, "train": {"lr": 0.01, "epochs": 10, "batch_size": 8},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    dense_until = steps if algorithm == "dense" else warmup
    lines = [
        step_line(n, dense_until, density, algorithm, steps_per_epoch, world_size, numel, chance) for n in range(steps)
    ]
    write_lines(directory / "steps.jsonl", lines)
    write_lines(directory / "epochs.jsonl", epoch_lines(lines, steps_per_epoch, validate_every, chance))
    if analyze_every:
        at = range(dense_until, steps, analyze_every)
        write_lines(directory / "analysis.jsonl", [analysis_line(n, density, chance) for n in at])
    (directory / "summary.json").write_text(json.dumps({"steps": steps}))
    return directory


def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in records))


def step_line(
    step: int,
    warmup: int,
    density: float,
    algorithm: str,
    per_epoch: int,
    world: int,
    numel: int,
    chance: random.Random,
) -> dict[str, Any]:
    sparse = step >= warmup
    record = (
        sparse_record(step, density, algorithm, world, numel, chance) if sparse else dense_record(step, world, numel)
    )
    seconds = {"data": 0.004, "forward": 0.05, "backward": 0.09 * chance.uniform(0.95, 1.1), "optimizer": 0.006}
    seconds |= dict(record.seconds) | {"wait": 0.6 * sum(record.seconds.values())}
    return {
        "step": step,
        "epoch": step // per_epoch,
        "loss": 0.3 + 2.9 * math.exp(-step / 45) * chance.uniform(0.9, 1.1) + 0.05 * chance.random(),
        "lr": 0.01,
        "wall_seconds": 0.9 + step * 0.31 if not sparse else 0.9 + warmup * 0.31 + (step - warmup) * 0.2,
        "memory_bytes": 410_000_000 + 90_000 * min(step, 60),
        "seconds": seconds,
        "reduce": record.to_json(),
    }


def dense_record(step: int, world: int, numel: int) -> StepRecord:
    sent, messages = dense_bytes(numel, world), 2 * (world - 1)
    sizes = {"all_reduce": {sent // messages: messages}} if messages else {}
    return StepRecord(
        step=step, phase="dense", bucket=PARAMETERS[0], numel=numel, k=numel, selected_local=numel,
        selected_global=numel, bytes_sent=sent, bytes_received=sent, dense_bytes=sent, messages=messages,
        threshold_local=0.0, threshold_global=0.0, imbalance=1.0, residual_norm=0.0,
        seconds=seconds_of(select=0.0, exchange=0.13), message_sizes=sizes,
    )  # fmt: skip


def sparse_record(
    step: int, density: float, algorithm: str, world: int, numel: int, chance: random.Random
) -> StepRecord:
    k = round(density * numel)
    grown = world * 0.8 if algorithm == "topka" else 1.0
    words = {"topka": 2 * (world - 1), "gtopk": 8}.get(algorithm, 4.1 * (world - 1) / world)
    sent = int(words * k * 4 * chance.uniform(0.98, 1.03))
    block = int(2 * k * 4 / world * chance.uniform(0.8, 1.2))
    sizes = {"all_to_all": {block: world - 1}, "all_gather": {block + 24: world - 1, 64: world - 1}}
    return StepRecord(
        step=step, phase="sparse", bucket=PARAMETERS[0], numel=numel, k=k,
        selected_local=int(k * chance.uniform(0.99, 1.02)),
        selected_global=int(k * grown * chance.uniform(0.985, 1.03)),
        bytes_sent=sent, bytes_received=int(sent * chance.uniform(0.97, 1.03)), dense_bytes=dense_bytes(numel, world),
        messages=3 * (world - 1), threshold_local=2e-3 * math.exp(-step / 90) * chance.uniform(0.95, 1.05),
        threshold_global=6e-3 * math.exp(-step / 90) * chance.uniform(0.95, 1.05), imbalance=chance.uniform(1.0, 1.08),
        residual_norm=4.0 * (1 - math.exp(-step / 60)) * chance.uniform(0.97, 1.03),
        seconds=seconds_of(select=0.004, exchange=0.011),
        message_sizes=sizes if world > 1 else {},
    )  # fmt: skip


def seconds_of(select: float, exchange: float) -> dict[str, float]:
    return {
        "select": select,
        "pack": select / 4,
        "exchange": exchange,
        "sum": select / 3,
        "gather": exchange / 2,
        "unpack": select / 4,
    }


def dense_bytes(numel: int, world: int) -> int:
    return round(2 * numel * 4 * (world - 1) / world)


def epoch_lines(
    steps: Sequence[Mapping[str, Any]], per_epoch: int, validate_every: int, chance: random.Random
) -> list[dict[str, Any]]:
    lines = []
    for epoch, start in enumerate(range(0, len(steps), per_epoch)):
        part = steps[start : start + per_epoch]
        records = [StepRecord.from_json(step["reduce"]) for step in part]
        sparse = [record for record in records if record.phase == "sparse"]
        line: dict[str, Any] = {
            "epoch": epoch, "train_loss": sum(step["loss"] for step in part) / len(part), "steps": len(part),
            "dense_steps": len(part) - len(sparse), "sparse_steps": len(sparse),
            "bytes_per_step": sum(record.bytes_sent for record in records) / len(part),
            "dense_bytes_per_step": records[0].dense_bytes, "seconds": 4.2, "wall_seconds": part[-1]["wall_seconds"],
        }  # fmt: skip
        if sparse:
            line["sparsity"] = sum(record.sparsity for record in sparse) / len(sparse)
            line["compression_ratio"] = sum(record.compression_ratio for record in sparse) / len(sparse)
        if validate_every and epoch % validate_every == 0:
            error = 0.12 + 0.9 * math.exp(-epoch / 3) * chance.uniform(0.95, 1.05)
            line["validation"] = {"loss": line["train_loss"] * 1.2, "WER": error, "CER": error / 3}
        lines.append(line)
    return lines


def analysis_line(step: int, density: float, chance: random.Random) -> dict[str, Any]:
    edges = [10 ** (-8 + 0.2 * n) for n in range(36)]
    counts = [int(1.2e6 * math.exp(-(((n - 20) / 5) ** 2))) for n in range(35)]
    kept = [count if n >= 27 else 0 for n, count in enumerate(counts)]
    return {
        "step": step,
        "histogram_before": {"edges": edges, "counts": counts},
        "histogram_after": {"edges": edges, "counts": kept},
        "density_by_parameter": {name: density * chance.uniform(0.05, 4.0) for name in PARAMETERS},
        "overlap_count": min(1.0, 0.7 + 0.001 * step),
        "overlap_energy": min(1.0, 0.85 + 0.0008 * step),
        "xi": 0.9 + 0.3 * chance.random(),
    }
