"""The example of docs/extending.md, as it is printed there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from oktopk.training.config import TrainConfig
from oktopk.training.trainer import train
from oktopk.training.world import World
from oktopk.transport.torch_dist import TorchTransport
from trainings import strict_rows, train_alone
from worlds import run_processes

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
BLOCK = re.compile(r'^```python title="spirals/(?P<name>\w+\.py)"\n(?P<text>.*?)^```', re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The three files of the page, importable."""
    (tmp_path / "spirals").mkdir()
    for name, text in files().items():
        (tmp_path / "spirals" / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "spirals"]:
        del sys.modules[name]


def files() -> dict[str, str]:
    return {block["name"]: block["text"] for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))}


def config(folder: Path, **changes) -> TrainConfig:
    return TrainConfig(
        workload="spirals.workload:Spirals", workload_options={"width": 48}, runs=folder / "runs", name="spirals",
        tensorboard=False, **changes,
    )  # fmt: skip


def test_the_example_is_three_files_of_about_sixty_lines():
    lines = [line for text in files().values() for line in text.splitlines() if line.strip()]
    assert set(files()) == {"data.py", "model.py", "workload.py"} and len(lines) <= 66


def test_the_example_learns_alone(example):
    summary = train_alone(config(example, epochs=8))
    epochs = strict_rows(example / "runs" / "spirals" / "epochs.jsonl")
    assert summary.validation["accuracy"] > 0.9
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"] / 2


def _train_as_rank(folder: str) -> float:
    sys.path.insert(0, folder)
    torch.set_num_threads(1)
    summary = train(config(Path(folder), epochs=1, warmup_steps=8), World(TorchTransport()))
    return summary.validation["accuracy"]


@pytest.mark.processes
def test_the_example_trains_on_two_ranks_under_oktopk(example):
    first, second = run_processes(2, _train_as_rank, str(example), timeout=90)
    assert first == second
    epoch = strict_rows(example / "runs" / "spirals" / "epochs.jsonl")[0]
    assert (epoch["dense_steps"], epoch["sparse_steps"]) == (8, 23)
