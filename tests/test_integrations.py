"""Trainer, Lightning and Accelerate: what was saved with their checkpoints is where they continue."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import oktopk
import oktopk.integrations
from oktopk.errors import CheckpointError, UnsupportedError
from oktopk.integrations.state import FOLDER, beside, load_if_saved
from oktopk.transport import ThreadTransport, run_world
from worlds import run_processes

pytestmark = pytest.mark.timeout(600)


def test_a_framework_that_is_not_served_is_named() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'KerasCallback'"):
        oktopk.integrations.KerasCallback  # noqa: B018


def test_a_state_is_loaded_by_all_ranks_or_by_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: ThreadTransport) -> tuple[bool, bool, str, bool]:
        options: dict[str, Any] = {"density": 0.1, "min_numel": 0, "group": transport}
        with oktopk.Reducer(**options) as reducer:
            reducer.reduce("a", torch.randn(100))
            before = reducer.residuals()["a"]
            oktopk.save(reducer, tmp_path / FOLDER)
            reducer.reduce("a", torch.randn(100))
            loaded = load_if_saved(reducer, tmp_path / FOLDER)
            missing = load_if_saved(reducer, tmp_path / "elsewhere")
            said = ""
            try:
                load_if_saved(reducer, tmp_path / (FOLDER if transport.rank == 0 else "elsewhere"))
            except CheckpointError as error:
                said = str(error)
            return loaded, missing, said, torch.equal(reducer.residuals()["a"], before)

    with caplog.at_level(logging.WARNING, "oktopk"):
        world = run_world(2, work)
    assert all(loaded and not missing and same for loaded, missing, _, same in world)
    assert caplog.text.count("resumed without what was still owed") == 1
    assert world[0][2].startswith("rank 1") and "no checkpoint in" in world[1][2]


def test_residuals_are_not_keptbeside_a_url() -> None:
    with pytest.raises(UnsupportedError, match=r"s3://bucket/a\.ckpt"):
        beside("s3://bucket/a.ckpt")


def test_a_link_to_a_checkpoint_has_the_residuals_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "step=4.ckpt")
    assert beside(tmp_path / "last.ckpt") == (tmp_path / "step=4.ckpt.oktopk").resolve()


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["accelerate", "transformers", "lightning"])
def test_a_resumed_training_ends_where_the_straight_one_does(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    import integration_cases as cases

    world = run_processes(2, getattr(cases, framework), str(tmp_path), timeout=400)
    for rank in world:
        straight = rank["straight"]
        assert (straight["step"], straight["phase"]) == (cases.STEPS, "sparse")
        for how in (how for how in rank if how.startswith("resumed") and how != "resumed without"):
            assert_same(rank[how], straight)
    assert any(
        not torch.equal(one, world[1]["straight"]["residuals"][name])
        for name, one in world[0]["straight"]["residuals"].items()
    ), "each rank owes something else"
    if framework == "accelerate":
        assert not any(rank[how]["saved after closing"] for rank in world for how in rank)
    else:
        assert world[0]["resumed without"]["step"] == cases.HALF, "the warm-up begins again, and says so"
    if framework == "transformers":
        assert all(rank["resumed without"]["second"] == (cases.STEPS, "sparse") for rank in world)
    if framework == "lightning":
        assert world[0]["kept"] == ["step=8.ckpt", "step=8.ckpt.oktopk"]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["accelerate", "transformers", "lightning"])
def test_local_steps_resume_exactly_and_what_is_evaluated_and_saved_is_what_all_ranks_share(
    framework: str, tmp_path: Path
) -> None:
    pytest.importorskip(framework)
    import integration_updates as cases

    world = run_processes(2, cases.run_both, str(tmp_path), framework, timeout=400)
    for rank in world:
        straight, resumed = rank["straight"], rank["resumed"]
        assert (straight["step"], resumed["step"]) == (cases.STEPS, cases.STEPS)
        assert torch.equal(straight["own"], resumed["own"]) and torch.equal(straight["moments"], resumed["moments"])
        assert torch.equal(straight["shared"][-1], resumed["shared"][-1])
        assert torch.equal(straight["saved"], straight["shared"][cases.HALF - 1])
        if framework != "accelerate":  # there the user evaluates
            assert torch.equal(straight["evaluated"][0], straight["shared"][cases.HALF - 1])
            assert torch.equal(straight["end"], world[0]["straight"]["end"]), "all ranks end with the same weights"
    assert all(torch.equal(a, b) for a, b in zip(*(rank["straight"]["shared"] for rank in world), strict=True))
    assert not torch.equal(world[0]["straight"]["own"], world[1]["straight"]["own"]), "each rank has its own"


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (one["step"], one["phase"]) == (other["step"], other["phase"])
    assert all(torch.equal(a, b) for a, b in zip(one["weights"], other["weights"], strict=True))
    assert one["residuals"].keys() == other["residuals"].keys()
    assert all(torch.equal(residual, other["residuals"][name]) for name, residual in one["residuals"].items())
