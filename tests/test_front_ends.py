"""DDP in every form, over real processes: replicas stay equal, and nothing is lost."""

from __future__ import annotations

import logging
import math

import pytest
import torch

import front_end_cases as cases
import oktopk
from front_end_cases import CASES, COMPILED, Result
from oktopk.reduction.autotune import BY_BUCKET, BY_STEP, AutoConfig, trials
from worlds import run_processes

RANKS = 3
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-6, torch.bfloat16: 2e-6}  # of residuals, kept in float32


pytestmark = [pytest.mark.processes, pytest.mark.timeout(500)]  # starting processes takes long on a busy machine


@pytest.fixture(scope="module")
def world() -> list[dict[str, Result]]:
    """All cases in one world, by rank: starting processes costs more than training in them."""
    return run_processes(RANKS, cases.run_cases, list(CASES), timeout=400)


@pytest.mark.parametrize("case", CASES)
def test_replicas_stay_bitwise_equal(case: str, world: list[dict[str, Result]]) -> None:
    check_equal([rank[case] for rank in world])


@pytest.mark.parametrize("case", [name for name in CASES if name != "momentum"])
def test_no_gradient_is_lost(case: str, world: list[dict[str, Result]]) -> None:
    check_conservation([rank[case] for rank in world])


@pytest.mark.parametrize("case", CASES)
def test_training_was_sparse_and_owes_something(case: str, world: list[dict[str, Result]]) -> None:
    result = world[0][case]
    assert result.phase == "sparse"
    assert any(residual.abs().sum() > 0 for residual in result.residuals.values())
    if "vector" in case or case == "clipped before":
        assert result.groups == (3 if "mixed" in case else 1), "one vector, or one per dtype"


def test_clipping_before_limits_what_each_rank_gives(world: list[dict[str, Result]]) -> None:
    for rank in world:
        norm = sum(float(given.square().sum()) for given in rank["clipped before"].given.values()) ** 0.5
        assert 0 < norm <= cases.STEPS * 0.05 / RANKS**0.5 * (1 + 1e-6)


def test_there_were_several_buckets(world: list[dict[str, Result]]) -> None:
    assert world[0]["several buckets"].groups > 2


def test_an_unused_parameter_keeps_its_residual(world: list[dict[str, Result]]) -> None:
    """What DDP would throw away is not paid: given == applied + owed holds for 'extra' by itself."""
    for case in ("unused on all ranks", "unused, one vector"):
        results = [rank[case] for rank in world]
        assert any(results[0].residuals[name].abs().sum() > 0 for name in ("extra.weight", "extra.bias"))
    never = world[0]["never used"]
    assert "extra.weight" not in never.applied and not never.residuals["extra.weight"].any()


def check_equal(results: list[Result]) -> None:
    for name, weight in results[0].weights.items():
        assert all(torch.equal(weight, other.weights[name]) for other in results[1:]), name


def check_conservation(results: list[Result]) -> None:
    for name in results[0].given:
        given = sum(result.given.get(name, torch.zeros(1)) for result in results)
        applied = results[0].applied.get(name, torch.zeros(1)) * len(results)
        owed = sum(result.residuals[name] for result in results)
        size = sum(result.given[name].abs().max() for result in results if name in result.given)
        tolerance = TOLERANCE[results[0].weights[name].dtype] * math.sqrt(cases.STEPS) * float(size)
        assert (given - applied - owed).abs().max() <= tolerance, name


def test_auto_tries_buckets_and_one_vector_and_loses_nothing() -> None:
    results = run_processes(RANKS, cases.auto, timeout=100)
    check_equal(results)
    check_conservation(results)
    fusings = results[0].notes["fusings"]
    assert fusings[0] == BY_BUCKET and BY_STEP in fusings
    assert len(set(fusings[trials(AutoConfig(trial_steps=1, wires=("float32", "int8"))) :])) == 1, "decided by now"
    assert all(result.notes["fusings"] == fusings for result in results), "all ranks switch in the same step"
    assert results[0].groups == 1 if fusings[-1] == BY_STEP else results[0].groups > 2
    assert len(results[0].notes["decisions"]) == results[0].groups, "only those in use"


def test_compiled_modules_train_alike_both_ways() -> None:
    world = run_processes(2, cases.run_cases, list(COMPILED), timeout=250)
    for case in COMPILED:
        check_equal([rank[case] for rank in world])
        check_conservation([rank[case] for rank in world])


def test_dense_equals_plain_ddp() -> None:
    for plain, ours, plain_buckets, ours_buckets in run_processes(2, cases.dense_and_plain, timeout=200):
        for name in plain:
            assert torch.equal(plain[name], ours[name])
            assert torch.equal(plain_buckets[name], ours_buckets[name])


def test_two_models_with_two_reducers() -> None:
    world = run_processes(2, cases.two_models, timeout=200)
    for model in ("first", "second"):
        check_equal([rank[model] for rank in world])
        check_conservation([rank[model] for rank in world])


def test_residuals_follow_the_gradient_scale_and_survive_skipped_steps() -> None:
    world = run_processes(2, cases.scaled, timeout=200)
    for rank in world:
        assert rank["scales"][:4] == [8.0, 8.0, 8.0, 16.0]
        assert rank["scales"][6] == 8.0, "the overflow halves the scale"
        for name, before in rank["before"].items():
            assert torch.equal(before, rank["after"][name]), "a skipped step leaves every bucket's residual"
    for name, weight in world[0]["weights"].items():
        assert weight.isfinite().all() and torch.equal(weight, world[1]["weights"][name])


def test_what_cannot_work_is_refused_and_a_world_of_one_is_left_as_it_is() -> None:
    said, alone = run_processes(1, cases.refused_and_alone, timeout=200)[0]
    assert alone == (True, "dense")
    assert said["plain state"].startswith("UnsupportedError: this HookState was made from a plain module")
    assert said["twice"].startswith("UnsupportedError: this DDP module already has a communication hook")
    assert "fuse must be 'bucket', 'step' or None, got 'all'" in said["fuse"]
    assert said["clipped buckets"].startswith("ConfigError: norm_clip must know all gradients of a step")
    assert "unknown option 'densitty'. Did you mean 'density'?" in said["option"] or "densitty" in said["option"]
    for name in ("python_reducer", "bucket"):
        assert said[name].startswith("UnsupportedError: torch._dynamo.config.optimize_ddp")
    assert said["mixed_precision"].startswith("UnsupportedError: DDP's own mixed_precision")


def test_a_nan_on_one_rank_raises_its_own_type_on_all_and_training_goes_on() -> None:
    for seen in run_processes(2, cases.nonfinite, timeout=200):
        assert seen["step 3"].startswith("NonFiniteError: the gradient of rank 1 holds NaN or Inf")
        assert [key for key in seen if key.startswith("step")] == ["step 3"]
        assert seen["finite"]


def test_a_plain_module_is_told_that_nothing_is_compressed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "oktopk"):
        reducer = oktopk.register(torch.nn.Linear(2, 2))
    assert "nothing is compressed" in caplog.text
    reducer.close()


def test_training_by_kernels_for_gpus_keeps_replicas_equal_and_loses_nothing() -> None:
    pytest.importorskip("triton", reason="the extra `gpu` is not installed")
    results = run_processes(2, cases.by_kernels_for_gpus, timeout=200)
    check_equal(results)
    check_conservation(results)
    assert results[0].phase == "sparse"
