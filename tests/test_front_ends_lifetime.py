"""Leaving a model: nothing is kept, plain DDP goes on, copies are plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lifetime_cases as cases
from worlds import run_processes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return run_processes(2, cases.all_of_it, timeout=200)


@pytest.fixture(scope="module")
def kept() -> dict[str, tuple[int, float]]:
    return run_processes(1, cases.kept, timeout=200)[0]


@pytest.mark.parametrize("way", [way for way in cases.WAYS if way != "plain"])
def test_models_that_were_closed_and_dropped_are_not_kept(way: str, kept: dict[str, tuple[int, float]]) -> None:
    alive, grown = kept[way]
    assert alive == 0
    # A model that is kept costs 4 MB: weights, gradient, bucket, residual.
    assert grown < kept["plain"][1] + 1e6


def test_models_that_were_dropped_without_closing_are_not_kept(world: list[dict[str, Any]]) -> None:
    assert all(all(rank["dropped"].values()) for rank in world)


def test_after_closing_plain_ddp_goes_on_and_registering_again_works(world: list[dict[str, Any]]) -> None:
    for rank in world:
        seen = rank["again"]
        assert seen["phases"] == [("sparse", 2)] * 3, "each registration begins anew"
        for turn in range(3):
            assert_equal(*seen[f"turn {turn}"])
        assert seen["hooks left"] == 0
    assert_equal(world[0]["again"]["turn 2"][0], world[1]["again"]["turn 2"][0])


@pytest.mark.parametrize("how", ["copy", "file"])
def test_a_copy_of_a_registered_module_is_plain_ddp(how: str, world: list[dict[str, Any]]) -> None:
    for rank in world:
        assert_equal(*rank["copies"][how])


def test_a_closed_optimizer_leaves_the_model_to_its_rank(world: list[dict[str, Any]]) -> None:
    one, other = (rank["optimizer"] for rank in world)
    assert_equal(one["weights"], other["weights"])
    assert "step its `inner`" in one["step"]
    assert not all(torch.equal(a, b) for a, b in zip(one["apart"], other["apart"], strict=True))


@pytest.mark.slow
def test_replicas_of_fsdp_go_on_with_the_dense_mean() -> None:
    (before, after), (other_before, other_after) = run_processes(2, cases.closed_fsdp, timeout=200)
    assert_equal(before, other_before)
    assert_equal(after, other_after)
    moved = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    assert moved > 0.9 * sum(shard.numel() for shard in after), "a sparse mean moves a tenth of them"


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
