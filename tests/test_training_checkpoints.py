"""Checkpoints: whole or not at all, and a resumed run is the run that was not interrupted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from oktopk import checkpoint as checkpoint_module
from oktopk.checkpoint import read_rank
from oktopk.errors import CheckpointError, ConfigError
from oktopk.training.checkpoint import complete, find_checkpoint
from oktopk.training.config import TrainConfig
from oktopk.training.observer import Observer, Step
from oktopk.training.run_directory import RunDirectory, write_json
from oktopk.training.trainer import resumed_config
from toy import ToyWorkload
from trainings import (
    TOY,
    changed,
    final_weights,
    resume_alone,
    strict_rows,
    toy_config,
    train_alone,
    train_as_rank,
)
from trainings import plain_kernels as plain_kernels
from worlds import run_processes

# The compiled kernels are tested elsewhere; here they would only make every process slower to start.
pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.timeout(400)]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("algorithm", ["oktopk", "dense", "gtopk"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_resumed_inside_an_epoch_ends_with_the_same_weights(
    algorithm: str, optimizer: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "epochs": 4,
        "algorithm": algorithm,
        "optimizer": optimizer,
        "accumulate": 2,
        "norm_clip": 5.0,
    }
    train_alone(toy_config(tmp_path, "whole", **options))
    train_alone(toy_config(tmp_path, "cut", max_steps=7, **options))
    resume_alone(tmp_path / "cut", max_steps=None)
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut"))


@pytest.mark.processes
def test_a_run_resumed_by_two_ranks_ends_with_the_same_weights(tmp_path: Path) -> None:
    run_processes(2, train_as_rank, toy_config(tmp_path, "whole", epochs=4), timeout=100)
    run_processes(2, train_as_rank, toy_config(tmp_path, "cut", epochs=4, max_steps=15), timeout=100)
    run_processes(2, train_as_rank, changed(resumed_config(tmp_path / "cut", TOY), max_steps=None), timeout=100)
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut"))


def test_a_resumed_run_records_every_step_and_epoch_once(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "whole", epochs=3))
    train_alone(toy_config(tmp_path, "cut", epochs=3, max_steps=8))
    # As after a kill: a step that no checkpoint covers, and a line that was cut off.
    steps = tmp_path / "cut" / "steps.jsonl"
    lines = steps.read_text().splitlines()
    steps.write_text("\n".join([*lines, lines[-1].replace('"step": 7', '"step": 8'), '{"step": 9, "lo']))
    resume_alone(tmp_path / "cut", max_steps=None)
    for name in ("steps", "epochs"):
        whole, cut = (strict_rows(tmp_path / run / f"{name}.jsonl") for run in ("whole", "cut"))
        key = "loss" if name == "steps" else "train_loss"
        assert [row[key] for row in whole] == [row[key] for row in cut]
    assert len((tmp_path / "cut" / "steps.csv").read_text().splitlines()) == 1 + 18
    walls = [row["wall_seconds"] for row in strict_rows(steps)]
    assert walls == sorted(walls)


def test_a_finished_run_can_be_trained_longer(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "whole", epochs=3))
    train_alone(toy_config(tmp_path, "short", epochs=2))
    assert resume_alone(tmp_path / "short", epochs=3).epochs == 3
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "short"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    class Sender(Observer):
        def step(self, step: Step) -> None:
            if step.step == 4:
                os.kill(os.getpid(), number)

    train_alone(toy_config(tmp_path, "whole", epochs=2))
    summary = train_alone(toy_config(tmp_path, "cut", epochs=2), Sender())
    assert summary.stopped_by == number.name
    assert 4 <= summary.steps < 12
    resume_alone(tmp_path / "cut")
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut"))
    assert threading.current_thread() is threading.main_thread()


def test_old_checkpoints_go_and_the_best_stays(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run", epochs=8, keep=2, validate_every=1))
    folder = tmp_path / "run" / "checkpoints"
    kept = [path.name for path in complete(folder)]
    assert kept[-2:] == ["step-00000042", "step-00000048"]
    assert find_checkpoint(tmp_path / "run", "best").name in kept
    assert len(kept) <= 3


def test_a_full_disk_is_a_clear_error_and_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = safetensors.torch.save_file, []

    def fill_up(tensors: Any, path: Path, *rest: Any) -> None:
        calls.append(path)
        if len(calls) > 1:
            path.write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        real(tensors, path, *rest)

    monkeypatch.setattr(safetensors.torch, "save_file", fill_up)
    with pytest.raises(CheckpointError, match=r"No space left on device.*step-00000006 is intact"):
        train_alone(toy_config(tmp_path, "run", epochs=3))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*step*")] == ["step-00000006"]
    monkeypatch.undo()
    train_alone(toy_config(tmp_path, "whole", epochs=3))
    resume_alone(tmp_path / "run")
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "run"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run"))
    with pytest.raises(CheckpointError, match=r"another model.*preset tiny"):
        resume_alone(tmp_path / "run", preset="wide")
    assert resumed_config(tmp_path / "run", TOY).preset == "tiny"  # the run is as it was


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run"))
    with pytest.raises(CheckpointError, match="algorithm"):
        resume_alone(tmp_path / "run", algorithm="topka", algorithm_options={})


@pytest.mark.processes
def test_a_run_can_be_resumed_by_another_number_of_workers(tmp_path: Path) -> None:
    run_processes(2, train_as_rank, toy_config(tmp_path, "run", epochs=2, max_steps=9), timeout=100)
    summary = resume_alone(tmp_path / "run", max_steps=None)
    assert (summary.epochs, summary.steps) == (2, 12)
    assert [row["step"] for row in strict_rows(tmp_path / "run" / "steps.jsonl")] == list(range(12))


@pytest.mark.parametrize("file", ["rank-0-of-1-*.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_a_clear_error(file: str, tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run"))
    (path,) = find_checkpoint(tmp_path / "run").glob(file)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(
        CheckpointError, match=rf"{path.name} is damaged.*Other checkpoints of this run: \S*step-00000006"
    ):
        resume_alone(tmp_path / "run")


def test_a_checkpoint_of_the_first_version_is_named_as_such(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run", epochs=1))
    checkpoint = find_checkpoint(tmp_path / "run")
    (checkpoint / "manifest.json").rename(checkpoint / "meta.json")
    with pytest.raises(CheckpointError, match=r"step-00000006 was written by oktopk 0\.1"):
        resume_alone(tmp_path / "run")


def test_what_is_no_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no last checkpoint"):
        resumed_config(tmp_path)


class PowerLoss(BaseException):
    """Nothing is cleaned up after it."""


@pytest.mark.parametrize("actions", [0, 1, 2])
def test_a_power_loss_while_a_checkpoint_is_replaced_leaves_one_to_resume(
    actions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = actions  # the file of the rank, the manifest, and then the old file goes

    def until_the_power_goes(action: Callable[..., None]) -> Callable[..., None]:
        def act(path: Path, *rest: Any, **options: Any) -> None:
            nonlocal left
            left -= path.parent.name.startswith("step-")  # others are not part of it
            if left < 0:
                raise PowerLoss
            action(path, *rest, **options)

        return act

    train_alone(toy_config(tmp_path, "whole", epochs=3))
    train_alone(toy_config(tmp_path, "run", epochs=2, keep=9))
    resumed = changed(resumed_config(tmp_path / "run" / "checkpoints" / "step-00000006", TOY), lr=0.03)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "place_whole", until_the_power_goes(checkpoint_module.place_whole))
        patch.setattr(Path, "unlink", until_the_power_goes(Path.unlink))
        patch.setattr(RunDirectory, "rewind", lambda self, step, epoch: None)
        with pytest.raises(PowerLoss):  # going back to an earlier checkpoint writes the last one again
            train_alone(resumed)
    assert read_rank(find_checkpoint(tmp_path / "run"))["about"]["workload"] == "toy"
    if actions < 2:  # the old one, so that going on is as if nothing had happened
        resume_alone(tmp_path / "run", epochs=3, lr=0.02)
        assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "run"))


def test_what_a_crash_left_half_written_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run", epochs=1))
    half = tmp_path / "run" / "checkpoints" / "step-00000009"
    half.mkdir()
    (half / "rank-0-of-1-abc.safetensors").write_bytes(b"half")
    assert find_checkpoint(tmp_path / "run").name == "step-00000006"
    resume_alone(tmp_path / "run", epochs=2)
    assert not half.exists()


def test_tied_weights_are_saved_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(16, 16)
            self.two = torch.nn.Linear(16, 16)
            self.two.weight = self.one.weight
            self.last = torch.nn.Linear(16, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.last(self.two(self.one(inputs).tanh()))

    monkeypatch.setattr(ToyWorkload, "model", lambda self: Tied())
    options: dict[str, Any] = {"epochs": 2, "optimizer": "adamw"}
    train_alone(toy_config(tmp_path, "whole", **options))
    train_alone(toy_config(tmp_path, "cut", max_steps=8, **options))
    resume_alone(tmp_path / "cut", max_steps=None)
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut"))


def test_an_older_checkpoint_can_be_resumed(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run", epochs=2, keep=9))
    whole = final_weights(tmp_path / "run")
    resume_alone(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert same(whole, final_weights(tmp_path / "run"))


def test_checkpoints_load_without_executing_anything(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run", epochs=1))
    kinds = {path.suffix for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors"}, "neither can hold code"


def test_code_that_a_run_names_is_not_run_unless_the_user_says_so(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run", epochs=0))
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace(TOY, "antigravity:Surprise"))
    (tmp_path / "run" / "checkpoints" / "step-00000000").mkdir(parents=True)
    write_json(tmp_path / "run" / "checkpoints" / "last.json", {"checkpoint": "step-00000000"})
    with pytest.raises(ConfigError, match=r"names code to run, the workload 'antigravity:Surprise'.*--trust"):
        resumed_config(tmp_path / "run")
    assert resumed_config(tmp_path / "run", TOY).workload == TOY
    assert resumed_config(tmp_path / "run", trust=True).workload == "antigravity:Surprise"


def test_the_configuration_of_a_run_can_be_read_back(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run", epochs=1, norm_clip=0.0))
    config = resumed_config(tmp_path / "run", TOY)
    assert isinstance(config, TrainConfig)
    assert (config.epochs, config.norm_clip, config.workers) == (1, 0.0, 1)
