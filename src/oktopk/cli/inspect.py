"""`oktopk inspect`: what a run or a checkpoint holds."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from torch import Tensor

from oktopk.checkpoint import MANIFEST, read_manifest, read_rank
from oktopk.cli.console import bytes_text, console, facts, table
from oktopk.cli.progress import epoch_text
from oktopk.training.checkpoint import complete, position_of
from oktopk.training.journal import EpochEntry
from oktopk.training.run_directory import EPOCHS, RunDirectory, flat
from oktopk.training.state import SYNCHRONISATION

_SHOWN = (
    "workload", "preset", "parameters", "algorithm", "density", "warmup_steps", "wire", "world_size", "epochs",
    "steps_per_epoch", "batch_size", "optimizer", "lr", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Inspect:
    """Say what a run or a checkpoint holds.

    A run: its settings, epochs and checkpoints. A checkpoint: its position, tensors and what each rank still owes.

    Example:
        oktopk inspect runs/demo
        oktopk inspect runs/demo --csv
    """

    path: tyro.conf.Positional[Path]  # run directory or checkpoint
    csv: bool = False  # print the table of epochs (of tensors, for a checkpoint) as CSV

    def __call__(self) -> int:
        is_checkpoint = (self.path / MANIFEST).is_file()
        rows = checkpoint_rows(self.path) if is_checkpoint else epoch_rows(self.path)
        if self.csv:
            write_csv(rows)
            return 0
        console().print(str(self.path), markup=False, soft_wrap=True)
        show_checkpoint(self.path, rows) if is_checkpoint else show_run(self.path)
        return 0


def show_run(path: Path) -> None:
    run = RunDirectory.open(path)
    console().print(facts(run_head(path)))
    for row in run.rows(EPOCHS):
        console().print(epoch_text(EpochEntry(**row), str(run.config["metric"])), markup=False, soft_wrap=True)
    if run.summary.get("notice"):
        console().print(f"notice: {run.summary['notice']}", markup=False, soft_wrap=True)
    console().print(table("checkpoints", run_checkpoints(path)))


def show_checkpoint(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    console().print(facts(checkpoint_head(path)))
    console().print(table("tensors", rows))


def run_head(path: Path) -> dict[str, Any]:
    config = RunDirectory.open(path).config
    return {name: config[name] for name in _SHOWN if config.get(name) is not None}


def epoch_rows(path: Path) -> list[dict[str, Any]]:
    return [flat(row) for row in RunDirectory.open(path).rows(EPOCHS)]


def run_checkpoints(path: Path) -> list[dict[str, Any]]:
    rows = []
    for checkpoint in complete(path / "checkpoints"):
        position = position_of(checkpoint)
        rows.append({"checkpoint": checkpoint.name, "step": position.step, "epoch": position.epoch})
        rows[-1] |= {"size": bytes_text(_size(checkpoint)), "path": str(checkpoint)}
    return rows


def checkpoint_head(path: Path) -> dict[str, Any]:
    return {**flat(read_manifest(path).about), "size": bytes_text(_size(path))}


def checkpoint_rows(path: Path) -> list[dict[str, Any]]:
    """Every tensor of the model, with the norm of what each rank owes to it."""
    states = [read_rank(path, rank) for rank in range(read_manifest(path).world_size)]
    owed = [_owed(state[SYNCHRONISATION]) for state in states]
    return [_tensor_row(name, tensor, owed) for name, tensor in states[0]["model"].items()]


def write_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(sys.stdout, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _owed(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """By name: residuals of gradients, or what a rank has changed in its own weights and not sent."""
    if "residuals" in state:
        return dict(state["residuals"])
    return {name: part for vector in state["weights"] for name, part in vector["owed"].items()}


def _tensor_row(name: str, tensor: Tensor, owed: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    row = {"tensor": name, "shape": "x".join(map(str, tensor.shape)), "dtype": str(tensor.dtype).removeprefix("torch.")}
    norms = {f"owed by {rank}": float(state[name].norm()) for rank, state in enumerate(owed) if name in state}
    return row | {"entries": tensor.numel(), "norm": float(tensor.double().norm())} | norms
