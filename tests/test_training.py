"""The trainer: records that can be trusted, validation under its own epoch, clipping that acts."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oktopk.errors import ConfigError, DataError, NonFiniteError
from oktopk.metrics import PHASES, StepRecord
from oktopk.reducer import Reducer
from oktopk.training.algorithms import CONFIGS
from oktopk.training.analysis import Analyzer, magnitude_edges
from oktopk.training.config import TrainConfig
from oktopk.training.journal import LOOP_PHASES, Journal, summarize_epoch
from oktopk.training.learning_rate import learning_rate
from oktopk.training.optimizers import make_optimizer
from oktopk.training.values import as_fields
from oktopk.training.world import World
from oktopk.transport import ThreadWorld
from oktopk.workloads.base import Recipe
from toy import ToyWorkload
from trainings import plain_kernels as plain_kernels
from trainings import strict_rows, toy_config, train_alone, train_as_rank
from worlds import run_processes, start

# The compiled kernels are tested elsewhere; here they would only make every process slower to start.
pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.timeout(400)]

SITUATIONS = {
    "no epoch": {"epochs": 0},
    "one epoch": {"epochs": 1},
    "two epochs": {"epochs": 2},
    "all warm-up": {"epochs": 2, "warmup_steps": 100},
    "switch inside an epoch": {"epochs": 2, "warmup_steps": 3},
    "sparse from step 0": {"epochs": 2, "warmup_steps": 0},
    "never validated": {"epochs": 1, "validate_every": 0},
    "empty validation set": {"epochs": 1, "workload_options": {"empty_validation": True}},
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_no_record_ever_contains_nan(name: str, tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run", analyze_every=2, tensorboard=True, **SITUATIONS[name]))
    run = tmp_path / "run"
    for path in run.glob("*.json*"):
        for line in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            assert not {"NaN", "Infinity", "-Infinity"} & set(line.replace(",", " ").replace("}", " ").split()), path
    csv = run / "steps.csv"
    assert not csv.exists() or "nan" not in csv.read_text().lower()
    json.loads((run / "summary.json").read_text(), parse_constant=lambda constant: pytest.fail(constant))


def test_an_epoch_that_spans_the_switch_reports_both_phases(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run", epochs=2, warmup_steps=4))
    first, second = strict_rows(tmp_path / "run" / "epochs.jsonl")
    assert (first["dense_steps"], first["sparse_steps"]) == (4, 2)
    assert (second["dense_steps"], second["sparse_steps"]) == (0, 6)
    steps = strict_rows(tmp_path / "run" / "steps.jsonl")
    assert [row["reduce"]["phase"] for row in steps] == ["dense"] * 4 + ["sparse"] * 8
    dense = steps[0]["reduce"]
    assert (dense["sparsity"], dense["compression_ratio"]) == (0.0, 1.0)


def test_an_epoch_without_sparse_steps_has_no_sparsity(tmp_path: Path) -> None:
    summary = train_alone(toy_config(tmp_path, "run", epochs=1, warmup_steps=100))
    (epoch,) = strict_rows(tmp_path / "run" / "epochs.jsonl")
    assert "sparsity" not in epoch and "compression_ratio" not in epoch
    assert summary.notice is not None and "warm-up" in summary.notice


def test_a_run_that_leaves_the_warm_up_has_no_notice(tmp_path: Path) -> None:
    assert train_alone(toy_config(tmp_path, "run", epochs=1)).notice is None


def test_a_model_too_small_to_be_sparse_says_so(tmp_path: Path) -> None:
    summary = train_alone(toy_config(tmp_path, "run", epochs=1, min_numel=10_000))
    assert summary.notice is not None and "--min-numel (10000)" in summary.notice


def test_dense_training_is_not_told_about_its_warm_up(tmp_path: Path) -> None:
    assert train_alone(toy_config(tmp_path, "run", epochs=1, algorithm="dense", warmup_steps=99)).notice is None


def test_the_epoch_agrees_with_its_steps(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run", epochs=2))
    steps = strict_rows(tmp_path / "run" / "steps.jsonl")
    for epoch in strict_rows(tmp_path / "run" / "epochs.jsonl"):
        mine = [row for row in steps if row["epoch"] == epoch["epoch"]]
        sparse = [row["reduce"] for row in mine if row["reduce"]["phase"] == "sparse"]
        assert epoch["train_loss"] == pytest.approx(sum(row["loss"] for row in mine) / len(mine))
        assert epoch["sparsity"] == pytest.approx(sum(record["sparsity"] for record in sparse) / len(sparse))


def test_every_step_has_its_phases_and_message_sizes(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run", epochs=1))
    phases = {*LOOP_PHASES, *PHASES}
    for row in strict_rows(tmp_path / "run" / "steps.jsonl"):
        assert set(row["seconds"]) == phases
        assert row["memory_bytes"] > 1e6
        assert StepRecord.from_json(row["reduce"]).step == row["step"]


def test_validation_is_reported_under_the_epoch_it_belongs_to(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run", epochs=11, validate_every=5))
    epochs = strict_rows(tmp_path / "run" / "epochs.jsonl")
    assert [row["epoch"] for row in epochs if "validation" in row] == [0, 4, 9, 10]


def test_early_stop_ends_after_validations_without_improvement(tmp_path: Path) -> None:
    summary = train_alone(toy_config(tmp_path, "run", epochs=30, validate_every=1, early_stop=2, lr=0.0))
    assert summary.stopped_by == "early stop"
    assert summary.epochs < 30


@pytest.mark.parametrize("limit", [0, 3, 6])
def test_the_limit_of_steps_is_kept(limit: int, tmp_path: Path) -> None:
    summary = train_alone(toy_config(tmp_path, "run", epochs=3, max_steps=limit))
    assert (summary.steps, summary.stopped_by) == (limit, "the limit of steps")


def test_accumulated_micro_batches_count_as_one_step(tmp_path: Path) -> None:
    summary = train_alone(toy_config(tmp_path, "run", epochs=2, accumulate=4))
    assert summary.steps == 4  # 6 batches are 4 and 2


def test_a_tracker_that_is_not_installed_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'oktopk\[tracking\]'"):
        train_alone(toy_config(tmp_path, "run", wandb="project"))


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    train_alone(toy_config(tmp_path, "run", epochs=0))
    with pytest.raises(ConfigError, match="holds a run already"):
        train_alone(toy_config(tmp_path, "run", epochs=0))


@pytest.mark.processes
def test_the_reported_loss_is_the_mean_over_ranks(tmp_path: Path) -> None:
    run_processes(2, train_as_rank, toy_config(tmp_path, "two", epochs=1, algorithm="dense", lr=0.0))
    two = strict_rows(tmp_path / "two" / "steps.jsonl")
    assert {row["reduce"]["phase"] for row in two} == {"dense"}
    assert all(row["reduce"]["bytes_sent"] > 0 for row in two)


@pytest.mark.processes
def test_ranks_end_with_the_same_weights_and_a_sharded_validation(tmp_path: Path) -> None:
    summaries = run_processes(2, train_as_rank, toy_config(tmp_path, "run", epochs=2))
    assert summaries[0] == summaries[1]
    assert summaries[0].sparse_steps == 9


@pytest.mark.processes
def test_bad_data_on_one_rank_stops_all_with_its_message(tmp_path: Path) -> None:
    outcomes = start(2, train_as_rank, toy_config(tmp_path, "run", workload_options={"fail_at": 4}), timeout=100)
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert "PeerError: rank 1: sample 17 is a stone" in outcomes[0].output
    assert "DataError: sample 17 is a stone" in outcomes[1].output


def sends_during_backward(config: TrainConfig) -> list[bool]:
    """Of every bucket that is sent, whether backward was still computing."""
    seen: list[bool] = []
    computing = False
    backward, submit = torch.Tensor.backward, Reducer.submit

    def watched_backward(self: torch.Tensor) -> None:
        nonlocal computing
        computing = True
        backward(self)
        computing = False

    def watched_submit(self: Reducer, *args: Any, **options: Any) -> Any:
        seen.append(computing)
        return submit(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", watched_backward)
        patch.setattr(Reducer, "submit", watched_submit)
        train_alone(config)
    return seen


def test_gradients_are_sent_while_backward_goes_on(tmp_path: Path) -> None:
    small_buckets: dict[str, Any] = {"epochs": 1, "bucket_mb": 0.001}
    assert all(sends_during_backward(toy_config(tmp_path, "overlapped", **small_buckets)))
    assert all(sends_during_backward(toy_config(tmp_path, "accumulated", accumulate=4, **small_buckets)))
    assert not any(sends_during_backward(toy_config(tmp_path, "clipped", norm_clip=1.0, **small_buckets)))
    assert not any(sends_during_backward(toy_config(tmp_path, "analysed", analyze_every=1, **small_buckets)))


def test_one_bucket_or_many_and_sent_early_or_late_dense_training_is_the_same(tmp_path: Path) -> None:
    losses = {
        name: train_alone(toy_config(tmp_path, name, epochs=2, algorithm="dense", **options)).train_loss
        for name, options in {
            "early": {"bucket_mb": 0.001}, "late": {"analyze_every": 1}, "at once": {"norm_clip": 1e9},
        }.items()
    }  # fmt: skip
    assert len(set(losses.values())) == 1


def test_buckets_are_small_where_that_hides_something(tmp_path: Path) -> None:
    config = toy_config(tmp_path, "run")
    assert config.bucket_mb_for(Recipe()) == 25
    assert config.bucket_mb_for(Recipe(norm_clip=1.0)) == 256
    assert replace(config, bucket_mb=3.0).bucket_mb_for(Recipe()) == 3


def test_an_analysis_sees_what_is_sent_clipped_and_in_the_unit_of_what_is_owed() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    analyzer = Analyzer(World(ThreadWorld(1).transports()[0]), model)
    analyzer.before({"weight": torch.tensor([0.0, 0.5])}, clip=0.5, unit=0.1)
    model.weight.grad = torch.tensor([[0.0, 7.0]])  # of (1.5, 2 + 5) the larger one
    found = analyzer.after(0, k=1)
    assert (found.overlap_count, found.xi) == (1.0, 0.0)


def test_a_gradient_that_is_not_finite_raises_by_default(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError):
        train_alone(toy_config(tmp_path, "run", workload_options={"nan_at": 4}))


def test_a_gradient_that_is_not_finite_can_be_skipped(tmp_path: Path) -> None:
    config = toy_config(tmp_path, "run", on_nonfinite="skip", workload_options={"nan_at": 4})
    assert train_alone(config).steps == 12
    steps = strict_rows(tmp_path / "run" / "steps.jsonl")
    assert [row["step"] for row in steps if row["reduce"]["skipped"]] == [4]
    assert "loss" not in steps[4]
    assert strict_rows(tmp_path / "run" / "epochs.jsonl")[0]["skipped_steps"] == 1


def test_a_small_clip_changes_what_is_trained(tmp_path: Path) -> None:
    free = train_alone(toy_config(tmp_path, "free", epochs=1))
    clipped = train_alone(toy_config(tmp_path, "clipped", epochs=1, norm_clip=1e-6))
    after = train_alone(toy_config(tmp_path, "after", epochs=1, norm_clip_after=1e-6))
    assert free.train_loss != clipped.train_loss
    assert clipped.train_loss == pytest.approx(after.train_loss, rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "step", "expected"),
    [
        (Recipe(lr=1.0), 5, 1.0),
        (Recipe(lr=1.0, lr_decay=0.5), 25, 0.25),
        (Recipe(lr=1.0, lr_steps=(1, 2)), 15, 0.1),
        (Recipe(lr=1.0, lr_steps=(1, 2)), 29, 0.01),
        (Recipe(lr=1.0, lr_warmup_epochs=1.0), 0, 0.25 + 0.75 / 11),
        (Recipe(lr=1.0, lr_warmup_epochs=1.0), 10, 1.0),
        (Recipe(lr=1.0, lr_warmup_epochs=1.0, lr_warmup_from=0.0), 0, 1 / 11),
        (Recipe(lr=1.0, lr_linear_decay=True, epochs=4), 20, 0.5),
        (Recipe(lr=1.0, lr_cosine_to=0.1, epochs=4), 0, 1.0),
        (Recipe(lr=1.0, lr_cosine_to=0.1, epochs=4), 20, 0.55),
        (Recipe(lr=1.0, lr_cosine_to=0.1, epochs=5, lr_warmup_epochs=1.0), 20, 0.55 + 0.45 * 0.5**0.5),
        (Recipe(lr=1.0, lr_cosine_to=0.1, epochs=4), 40, 0.1),
    ],
)
def test_the_learning_rate_follows_its_recipe(recipe: Recipe, step: int, expected: float) -> None:
    assert learning_rate(recipe, step, steps_per_epoch=10, world_size=4) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "value"), [("lr_cosine_to", 1.5), ("lr_warmup_from", -0.1), ("beta2", 1.0)])
def test_a_share_outside_its_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be in \[0, 1.*got {value}"):
        TrainConfig(**{name: value})


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_beta2_of_the_recipe_reaches_the_optimizer(optimizer: str) -> None:
    recipe = TrainConfig(optimizer=optimizer, beta2=0.95).recipe(Recipe())
    assert make_optimizer(recipe, [torch.nn.Parameter(torch.ones(2))]).defaults["betas"] == (0.9, 0.95)


def test_a_shorter_run_has_a_shorter_warmup() -> None:
    base = Recipe(epochs=8, warmup_steps=900)
    warmups = [TrainConfig(epochs=epochs).recipe(base).warmup_steps for epochs in (0, 1, 8, 20)]
    assert warmups == [0, 112, 900, 900]
    assert TrainConfig(epochs=1, warmup_steps=300).recipe(base).warmup_steps == 300


def test_an_analysis_of_everything_finds_full_overlap_and_no_distance() -> None:
    world = World(ThreadWorld(1).transports()[0])
    model = torch.nn.Linear(9, 10)
    model(torch.randn(4, 9, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    analyzer = Analyzer(world, model)
    analyzer.before({"weight": torch.zeros(90)})
    found = analyzer.after(3, k=100)
    assert (found.overlap_count, found.overlap_energy, found.xi) == (1.0, 1.0, 0.0)
    assert found.density_by_parameter == {"weight": 1.0, "bias": 1.0}
    assert sum(found.histogram_before.counts) == sum(found.histogram_after.counts) == 100


def test_xi_is_the_distance_to_the_exact_choice_over_the_norm_of_the_gradient() -> None:
    world = World(ThreadWorld(1).transports()[0])
    model = torch.nn.Linear(4, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0, 1.0, 0.0]])
    analyzer = Analyzer(world, model)
    analyzer.before({"weight": torch.tensor([0.0, 0.0, 0.0, 2.0])})
    # The exact two of (3, 4, 1, 2) are 3 and 4; the algorithm chose 4 and 2.
    model.weight.grad = torch.tensor([[0.0, 4.0, 0.0, 2.0]])
    found = analyzer.after(0, k=2)
    assert found.xi == pytest.approx(math.sqrt(9 + 4) / math.sqrt(26))
    assert found.overlap_count == 0.5
    assert found.overlap_energy == pytest.approx(16 / 25)


def test_the_edges_of_a_histogram_enclose_every_magnitude() -> None:
    edges = magnitude_edges(torch.tensor([1e-20, -5.0]))
    assert edges[-1] > 5.0 and len(edges) == 61


def test_a_summary_of_no_steps_has_no_means() -> None:
    entry = summarize_epoch(0, [], 0.0, 0.0)
    assert set(entry.to_json()) == {
        "epoch", "steps", "dense_steps", "sparse_steps", "skipped_steps", "seconds", "wall_seconds",
    }  # fmt: skip


def test_draining_an_empty_journal_gives_nothing() -> None:
    assert Journal().drain(World(ThreadWorld(1).transports()[0])) == []


def test_the_configuration_survives_json() -> None:
    config = TrainConfig(lr_steps=(3, 5), density_schedule={0: 0.1, 10: 0.02}, data="x", runs=Path("r"))
    assert TrainConfig(**as_fields(TrainConfig, json.loads(json.dumps(config.to_json())), "JSON")) == config


@pytest.mark.parametrize(
    "wrong",
    [{"density": 2.0}, {"workers": 0}, {"epochs": -1}, {"keep": 0}, {"bucket_mb": 0},
     {"analyze_every": 1, "norm_clip_after": 1.0}],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        TrainConfig(**wrong)


def test_a_workload_that_does_not_exist_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="module:Class"):
        train_alone(replace(toy_config(tmp_path, "run"), workload="nowhere:Nothing"))
    with pytest.raises(ConfigError, match="does not take"):
        train_alone(toy_config(tmp_path, "run", workload_options={"nonsense": 1}))


def test_a_workload_that_runs_out_of_batches_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyWorkload, "steps_per_epoch", lambda self, world_size: 99)
    with pytest.raises(DataError, match="ran out"):
        train_alone(toy_config(tmp_path, "run"))


@pytest.mark.parametrize("algorithm", list(CONFIGS))
def test_an_option_of_an_algorithm_is_not_called_as_one_of_the_trainer(algorithm: str) -> None:
    """Both are flags of one command."""
    assert not {f.name for f in fields(CONFIGS[algorithm])} & {f.name for f in fields(TrainConfig)}
