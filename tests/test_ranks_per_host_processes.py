"""Several ranks per host in real processes: front ends, and what happens when a rank dies."""

from __future__ import annotations

import pickle
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import host_cases
from fault_cases import TIMEOUT
from oktopk.report import write_report
from oktopk.training.trainer import resumed_config
from test_faults import GRACE
from test_front_ends import check_conservation, check_equal
from trainings import TOY, changed, strict_rows, toy_config, train_as_rank
from worlds import Outcome, run_processes, start

RANKS = 4
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def world() -> list[Any]:
    """All cases in one world, by rank: starting processes costs more than training in them."""
    return run_processes(RANKS, host_cases.front_ends, timeout=250)


@pytest.mark.parametrize("case", host_cases.CASES)
def test_ddp_over_hosts_keeps_replicas_equal_and_loses_nothing(case: str, world: list[Any]) -> None:
    results = [cases[case] for cases, *_ in world]
    check_equal(results)
    if case != "momentum":
        check_conservation(results)
    assert results[0].phase == "sparse"
    for rank, result in enumerate(results):
        halves = result.residuals["first.weight"].view(2, -1)
        assert not halves[1 - rank % 2].any(), "a rank owes its part, and nothing of its neighbour's"


def test_a_skipped_step_of_a_scaler_leaves_every_hosts_residuals_alone(world: list[Any]) -> None:
    results = [scaled for _, scaled, *_ in world]
    for result in results:
        assert result["scales"] == results[0]["scales"] and result["scales"][6] == result["scales"][5] / 2
        assert all(torch.equal(result["before"][name], result["after"][name]) for name in result["before"])
        assert all(torch.equal(result["weights"][n], results[0]["weights"][n]) for n in result["weights"])


def test_the_optimizer_over_hosts_keeps_replicas_equal(world: list[Any]) -> None:
    for _, _, weights, _ in world[1:]:
        assert all(torch.equal(weights[name], world[0][2][name]) for name in weights)


def test_local_steps_over_hosts_average_ddps_gradients_inside_and_weights_between(world: list[Any]) -> None:
    ranks = [seen for *_, seen in world]
    for one, other in (ranks[:2], ranks[2:]):
        assert torch.equal(one["own"], other["own"]) and torch.equal(one["averaged"], other["averaged"])
        torch.testing.assert_close(one["averaged"], (one["alone"] + other["alone"]) / 2)
    assert not torch.equal(ranks[0]["own"], ranks[2]["own"])
    assert all(torch.equal(seen[what], ranks[0][what]) for seen in ranks for what in ("shared", "end"))


def test_the_trainer_reduces_updates_of_hosts_and_goes_on_without(tmp_path: Path) -> None:
    options: dict[str, Any] = {"density": 0.2, "min_numel": 0, "reduce": "updates", "optimizer": "adamw", "every": 2}
    config = toy_config(tmp_path, "run", hosts=2, max_steps=4, validate_every=0, norm_clip=1.0, **options)
    run_processes(RANKS, train_as_rank, config, timeout=100)
    rows = strict_rows(tmp_path / "run" / "steps.jsonl")
    assert [row["reduce"]["inside_bytes"] > 0 for row in rows if "reduce" in row] == [True, True]
    assert rows[-1]["lr"] == pytest.approx(0.02 * 2**0.5), "two hosts step by themselves, not four workers"
    alone = changed(resumed_config(tmp_path / "run", TOY), hosts=1, max_steps=6)
    run_processes(2, train_as_rank, alone, timeout=100)
    rows = strict_rows(tmp_path / "run" / "steps.jsonl")
    assert [row["reduce"]["inside_bytes"] for row in rows[4:] if "reduce" in row] == [0]


def test_the_trainer_sums_inside_hosts_and_goes_on_without(tmp_path: Path) -> None:
    options: dict[str, Any] = {"density": 0.2, "min_numel": 0, "warmup_steps": 1, "validate_every": 0}
    run_processes(RANKS, train_as_rank, toy_config(tmp_path, "run", hosts=2, max_steps=3, **options), timeout=100)
    reports = [row["reduce"] for row in strict_rows(tmp_path / "run" / "steps.jsonl")]
    assert [report["phase"] for report in reports] == ["dense", "sparse", "sparse"]
    assert all(report["inside_bytes"] > 0 for report in reports)
    write_report([tmp_path / "run"], tmp_path / "report.html")
    assert "inside the host: " in (tmp_path / "report.html").read_text()
    flat = changed(resumed_config(tmp_path / "run", TOY), hosts=1, max_steps=5)
    run_processes(2, train_as_rank, flat, timeout=100)
    assert [row["reduce"]["inside_bytes"] for row in strict_rows(tmp_path / "run" / "steps.jsonl")][3:] == [0, 0]


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        (1, "after the scatter"),
        (2, "before the gather"),
        pytest.param(0, "before the scatter", marks=pytest.mark.slow),
        pytest.param(3, "after the gather", marks=pytest.mark.slow),
        pytest.param(0, "after the gather", marks=pytest.mark.slow),
        pytest.param(3, "before the gather", marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_between_phases_is_named_on_every_host(victim: int, phase: str, tmp_path: Path) -> None:
    outcomes = start(RANKS, host_cases.killed_between_phases, victim, phase, tmp_path, timeout=120)
    check_named(outcomes, victim, tmp_path)


def check_named(outcomes: list[Outcome], victim: int, pids: Path) -> None:
    """Every rank but the victim says in time who it was, and no memory is left."""
    assert outcomes[victim].code == -signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.payload, f"rank {outcome.rank} ended with {outcome.code}: {outcome.output[-6000:]}"
            kind, message, seconds = pickle.loads(outcome.payload)
            assert kind == "PeerError", (message, outcome.output[-2000:])
            # The host of the others may have come to the next step already.
            assert re.match(rf"rank {victim} failed at step [34], phase .*: it vanished", message), message
            assert seconds < TIMEOUT + GRACE
    processes = [path.name for path in pids.iterdir()]
    assert len(processes) == RANKS and not _shared_memory_of(processes), "memory was left behind"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "phase"), [(0, "before the scatter"), (3, "after the scatter"), (1, "before the telling")]
)
def test_a_rank_killed_in_local_steps_is_named_on_every_host(victim: int, phase: str, tmp_path: Path) -> None:
    outcomes = start(RANKS, host_cases.killed_in_local_steps, victim, phase, tmp_path, timeout=120)
    check_named(outcomes, victim, tmp_path)


def _shared_memory_of(processes: list[str]) -> list[str]:
    """What they made and is still there: in somebody's memory, or by a name."""
    found = [str(path) for path in Path("/dev/shm").iterdir() if "oktopk" in path.name]
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # a process that is gone, or not ours
            found += [word for word in maps.read_text().split() if word.startswith("/memfd:oktopk-")]
    return [name for name in found if name.rpartition("-")[2] in processes]
