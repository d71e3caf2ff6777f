"""vision, bert, gpt and ptb under the trainer: exact resumption on small files, and real learning on embedded data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from oktopk.training.config import TrainConfig
from trainings import final_weights, resume_alone, strict_rows, train_alone

SENTENCES = "\n\n".join(
    "\n".join(f"d{document} says s{number} and w{(document * number) % 9} ." for number in range(2 + document % 4))
    for document in range(60)
)


@pytest.fixture
def small_data(tmp_path, monkeypatch) -> dict[str, TrainConfig]:
    """A quick configuration for each workload, on files made here."""
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OKTOPK_KERNELS", "reference")
    for part, count in (("train", 12), ("val", 4)):
        for name, red in (("ant", 30), ("bee", 200)):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for number in range(count):
                _image(tmp_path / "images" / part / name / f"{number}.png", red, number)
    (tmp_path / "text").mkdir()
    for name in ("train.txt", "valid.txt"):
        (tmp_path / "text" / name).write_text(SENTENCES, encoding="utf-8")
    common = {"runs": tmp_path / "runs", "tensorboard": False, "epochs": 2, "warmup_steps": 2, "density": 0.05}
    text = str(tmp_path / "text")
    return {
        "vision": TrainConfig(workload="vision", data=str(tmp_path / "images"), batch_size=4, **common),
        "bert": TrainConfig(workload="bert", preset="tiny", data=text, batch_size=8, **common),
        "gpt": TrainConfig(workload="gpt", preset="tiny", data=text, batch_size=4, **common),
        "ptb": TrainConfig(workload="ptb", data=text, batch_size=2, workload_options={"vocabulary": 60}, **common),
    }


def _image(path: Path, red: int, seed: int) -> None:
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 40, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise + np.array([red, 0, 0], np.uint8)).save(path)


@pytest.mark.parametrize("workload", ["vision", "bert", "gpt", "ptb"])
def test_a_run_stopped_inside_an_epoch_goes_on_as_if_nothing_had_happened(small_data, workload):
    config = small_data[workload]
    train_alone(TrainConfig(**{**vars(config), "name": "whole"}))
    train_alone(TrainConfig(**{**vars(config), "name": "cut", "max_steps": 4}))
    resume_alone(config.runs / "cut", max_steps=None)
    whole, cut = final_weights(config.runs / "whole"), final_weights(config.runs / "cut")
    assert all(torch.equal(weights, cut[name]) for name, weights in whole.items())
    losses = [[row["loss"] for row in strict_rows(config.runs / name / "steps.jsonl")] for name in ("whole", "cut")]
    assert losses[0] == losses[1]


# What must be reached on the embedded data, and what is to be beaten: chance is 0.1, a linear model stays below 0.5;
# the perplexity of words by their frequency alone is 299 (ptb), that of pieces 494 (bert), of characters 19 (gpt).
CRITERIA = {
    "vision": ("accuracy", 0.9, 4.0),
    "ptb": ("perplexity", 110.0, 1.4),
    "bert": ("perplexity", 350.0, 1.25),
    "gpt": ("perplexity", 8.0, 1.25),
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("algorithm", ["dense", "oktopk"])
@pytest.mark.parametrize("workload", CRITERIA)
def test_the_small_preset_learns_as_typed(tmp_path, workload, algorithm):
    command = ["train", workload, "--workers", "2", "--algorithm", algorithm, "--name", "run", "--no-tensorboard"]
    subprocess.run(
        [sys.executable, "-m", "oktopk.cli", *command], cwd=tmp_path, check=True, timeout=3000, env={**os.environ}
    )
    run = tmp_path / "runs" / "run"
    epochs, steps = strict_rows(run / "epochs.jsonl"), strict_rows(run / "steps.jsonl")
    metric, wanted, factor = CRITERIA[workload]
    reached = json.loads((run / "summary.json").read_text())["validation"][metric]
    assert reached > wanted if metric == "accuracy" else reached < wanted
    assert epochs[-1]["train_loss"] < np.mean([row["loss"] for row in steps[:20]]) / factor
    assert algorithm == "dense" or epochs[-1]["sparse_steps"] == epochs[-1]["steps"]
    data = sum(row["seconds"]["data"] for row in steps)
    assert data < 0.1 * steps[-1]["wall_seconds"], "loading keeps up"
