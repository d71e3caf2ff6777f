"""Short trainings of the toy workload for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oktopk.checkpoint import read_rank
from oktopk.training.checkpoint import find_checkpoint
from oktopk.training.config import TrainConfig
from oktopk.training.observer import Observer, Summary
from oktopk.training.trainer import resumed_config, train
from oktopk.training.world import World, joined_world
from oktopk.transport.torch_dist import TorchTransport

TOY = "toy:ToyWorkload"


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in plain torch, in this process and those it starts."""
    monkeypatch.setenv("OKTOPK_KERNELS", "reference")


def toy_config(runs: Path, name: str, **changes: Any) -> TrainConfig:
    """The toy under Ok-Topk, without TensorBoard to be quick."""
    settings = {"workload": TOY, "runs": Path(runs), "name": name, "tensorboard": False, "min_numel": 0} | changes
    return TrainConfig(**settings)


def train_alone(config: TrainConfig, observer: Observer | None = None) -> Summary:
    """Train in this process, a world of one."""
    torch.set_num_threads(1)
    with joined_world() as world:
        return train(config, world, observer)


def train_as_rank(config: TrainConfig) -> Summary:
    """Train in a process of `run_processes`."""
    return train(config, World(TorchTransport()))


def resume_alone(run: Path, **changes: Any) -> Summary:
    return train_alone(changed(resumed_config(run, trust=True), **changes))


def changed(config: TrainConfig, **changes: Any) -> TrainConfig:
    return TrainConfig(**{**vars(config), **changes})


def final_weights(run: Path) -> dict[str, Tensor]:
    """Model of the last checkpoint."""
    weights: dict[str, Tensor] = read_rank(find_checkpoint(run))["model"]
    return weights


def strict_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file; NaN and Infinity are errors."""
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines()]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in a record")
