"""`--reduce updates`: trained by steps of each worker's own, validated and saved by what they share."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import pytest
import torch

from oktopk.cli.main import main
from oktopk.errors import ConfigError
from oktopk.training.checkpoint import find_checkpoint
from oktopk.training.config import TrainConfig
from oktopk.training.observer import Observer, Step, Summary
from oktopk.training.trainer import resumed_config, train
from oktopk.training.world import World
from oktopk.transport.torch_dist import TorchTransport
from oktopk.workloads.base import Recipe
from trainings import TOY, changed, final_weights, resume_alone, strict_rows, toy_config, train_alone, train_as_rank
from trainings import plain_kernels as plain_kernels
from worlds import run_processes, start

pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.timeout(200)]
UPDATES: dict[str, Any] = {"reduce": "updates", "every": 3, "optimizer": "adamw", "density": 0.2}


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [False, True], ids=["waiting", "overlap"])
def test_a_run_of_two_ranks_resumed_inside_an_interval_ends_with_the_same_weights(
    overlap: bool, tmp_path: Path
) -> None:
    options = UPDATES | {"overlap": overlap}
    run_processes(2, train_as_rank, toy_config(tmp_path, "whole", epochs=3, **options), timeout=100)
    run_processes(2, train_as_rank, toy_config(tmp_path, "cut", epochs=3, max_steps=7, **options), timeout=100)
    run_processes(2, train_as_rank, changed(resumed_config(tmp_path / "cut", TOY), max_steps=None), timeout=100)
    whole, cut = final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    steps = strict_rows(tmp_path / "cut" / "steps.jsonl")
    sent = [row["step"] for row in steps if "reduce" in row]
    assert sent == [*range(2, len(steps), 3), *([len(steps) - 1] if len(steps) % 3 else [])], "and the final mean"


class _Sender(Observer):
    """Interrupts its own process."""

    def step(self, step: Step) -> None:
        if step.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_ends_a_run_alone_too(tmp_path: Path) -> None:
    summary = train_alone(toy_config(tmp_path, "cut", epochs=2, **UPDATES), _Sender())
    assert summary.stopped_by == "SIGTERM" and 4 <= summary.steps < 12


def _train_until_told(config: TrainConfig) -> Summary:
    """Only rank 0 observes, and is told to stop."""
    return train(config, World(TorchTransport()), _Sender())


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [False, True], ids=["waiting", "overlap"])
def test_a_signal_to_one_rank_ends_all_after_the_same_step(overlap: bool, tmp_path: Path) -> None:
    config = toy_config(tmp_path, "cut", epochs=50, **UPDATES | {"overlap": overlap, "every": 1})
    one, other = run_processes(2, _train_until_told, config, timeout=100)
    assert one == other and one.stopped_by == "SIGTERM" and 4 <= one.steps < 20
    rows = strict_rows(tmp_path / "cut" / "steps.jsonl")
    assert len(rows) == one.steps and all("reduce" in row for row in rows), "what still travelled is written down, too"


def test_alone_a_run_is_what_it_is_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_alone(toy_config(tmp_path, "gradients", epochs=2, optimizer="adamw", algorithm="dense"))
    train_alone(toy_config(tmp_path, "updates", epochs=2, **UPDATES))
    one, other = final_weights(tmp_path / "gradients"), final_weights(tmp_path / "updates")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert resume_alone(tmp_path / "updates", epochs=3).steps > 0
    assert main(["inspect", str(find_checkpoint(tmp_path / "updates")), "--csv"]) == 0
    assert "owed by 0" in capsys.readouterr().out


def test_updates_want_no_dense_start_and_a_larger_rate_unless_under_sgd() -> None:
    base = Recipe(optimizer="adamw", lr=0.01, density=0.02, warmup_steps=100)
    recipe = TrainConfig(reduce="updates").recipe(base, 4)
    assert (recipe.lr, recipe.density, recipe.warmup_steps) == (0.02, 0.3, 0)
    assert (recipe.algorithm, recipe.wire) == ("randomk", "codebook2")
    largest = TrainConfig(reduce="updates", algorithm="oktopk").recipe(base, 4)
    assert (largest.density, largest.wire) == (0.05, "int8")
    assert TrainConfig(reduce="updates", lr=0.5).recipe(base, 4).lr == 0.5
    assert TrainConfig(reduce="updates", optimizer="lamb").recipe(base, 4).lr == 0.02
    assert TrainConfig(reduce="updates", optimizer="sgd").recipe(base, 4).lr == 0.01
    assert TrainConfig().recipe(base, 4) == base


def test_a_preset_switches_to_updates_by_one_word() -> None:
    base = Recipe(optimizer="adamw", lr=0.01, density=0.02, warmup_steps=100, reduce="updates")
    assert TrainConfig().recipe(base, 4) == TrainConfig(reduce="updates").recipe(replace(base, reduce="gradients"), 4)
    back = TrainConfig(reduce="gradients").recipe(base, 4)
    assert (back.reduce, back.algorithm, back.lr, back.density) == ("gradients", "oktopk", 0.01, 0.02)
    with pytest.raises(ConfigError, match="--momentum-correction"):
        TrainConfig(momentum_correction=0.9, reduce="updates").recipe(base, 4)


@pytest.mark.parametrize(
    "said",
    [
        {"algorithm": "topka"},
        {"density": 0.02},
        {"algorithm_options": {"threshold": "reused"}},
        {"warmup_steps": 100},
        {"norm_clip_after": 1.0},
    ],
)
def test_who_names_an_algorithm_a_density_or_dense_steps_means_gradients(said: dict[str, Any]) -> None:
    base = Recipe(optimizer="adamw", lr=0.01, density=0.02, warmup_steps=100, reduce="updates")
    recipe = TrainConfig(**said).recipe(base, 4)
    assert (recipe.reduce, recipe.lr, recipe.density, recipe.warmup_steps) == ("gradients", 0.01, 0.02, 100)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_updates_want_a_longer_rise_of_a_higher_rate(optimizer: Literal["adamw", "lamb"]) -> None:
    base = Recipe(optimizer=optimizer, lr=0.01, lr_warmup_epochs=1.5, reduce="updates")
    several, alone = TrainConfig().recipe(base, 4), TrainConfig().recipe(base, 1)
    assert (several.lr, several.lr_warmup_epochs) == (0.02, 3.0)
    assert (alone.lr, alone.lr_warmup_epochs) == (0.01, 1.5)


def test_with_overlap_own_weights_keep_what_is_owed_however_rarely_they_synchronise() -> None:
    base = Recipe(optimizer="adamw", lr=0.01, reduce="updates")
    waiting, travelling = TrainConfig(every=4).recipe(base, 2), TrainConfig(every=4, overlap=True).recipe(base, 2)
    assert (waiting.algorithm, waiting.keep_owed) == ("topka", 0.25)
    assert (travelling.algorithm, travelling.keep_owed) == ("randomk", 1.0)


@pytest.mark.processes
@pytest.mark.parametrize("every", [3, 100], ids=["before a synchronisation", "before the end of an epoch"])
def test_bad_data_between_synchronisations_stops_all_with_its_message(every: int, tmp_path: Path) -> None:
    config = toy_config(tmp_path, "run", workload_options={"fail_at": 3}, **UPDATES | {"every": every})
    began = monotonic()
    outcomes = start(2, train_as_rank, config, timeout=100)
    assert monotonic() - began < 60, "nobody waits for the timeout"
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert "sample 17 is a stone" in outcomes[0].output and "PeerError" in outcomes[0].output
    assert "DataError: sample 17 is a stone" in outcomes[1].output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 4}, "every is for --reduce updates"),
        ({"reduce": "updates", "every": 0}, "1 or more"),
        ({"overlap": True}, "overlap is for --reduce updates"),
        ({"reduce": "updates", "momentum_correction": 0.9}, "--momentum-correction"),
        ({"reduce": "updates", "analyze_every": 5}, "--analyze-every"),
    ],
)
def test_what_makes_no_sense_together_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainConfig(**options).recipe(Recipe())
