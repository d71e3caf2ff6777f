"""What the one line chooses by itself, by rule or by trying: the same on every rank, never against what was asked."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import oktopk
from inputs import gradient
from oktopk.errors import CheckpointError, ConfigError
from oktopk.front_ends import defaults
from oktopk.front_ends.defaults import LARGE, Crowd, crowded, default_algorithm, default_fuse, default_wire
from oktopk.reduction import autotune
from oktopk.reduction.autotune import wire_trials
from oktopk.transport import run_world
from worlds import run_processes


def _parameters(numel: int) -> list[tuple[str, nn.Parameter]]:
    return [("weight", nn.Parameter(torch.empty(numel)))]


def _on(kernels: list[str], cores: list[list[int]], monkeypatch: pytest.MonkeyPatch, work: Any) -> list[Any]:
    """Run `work(transport)` on ranks of which each has its kernel and its cores."""
    places = list(zip(kernels, cores, strict=True))
    monkeypatch.setattr(
        defaults, "share", lambda _, transport: [places[row[0]] for row in transport.agree([transport.rank])]
    )
    return run_world(len(kernels), work)


def test_the_most_crowded_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, cores = ["a", "a", "a", "b"], [[0, 1], [0, 1], [0, 1], [0, 1, 2, 3]]
    assert _on(kernels, cores, monkeypatch, crowded) == [Crowd(3, 2)] * 4


def test_ranks_bound_to_cores_of_their_own_do_not_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _on(["a", "a"], [[0, 1], [2, 3]], monkeypatch, crowded) == [Crowd(2, 4)] * 2


@pytest.mark.parametrize(
    ("numel", "ranks", "fuse"), [(LARGE, 3, "step"), (LARGE, 2, "bucket"), (LARGE - 1, 3, "bucket")]
)
def test_one_vector_where_ranks_share_cores(numel: int, ranks: int, fuse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _on(["a"] * ranks, [[0, 1]] * ranks, monkeypatch, lambda t: default_fuse(_parameters(numel), t))
    assert [name for name, _ in chosen] == [fuse] * ranks


def test_a_wire_is_looked_for_only_where_it_can_matter() -> None:
    assert default_wire("oktopk", _parameters(LARGE)) == "auto"
    assert default_wire("oktopk", _parameters(LARGE - 1)) == "float32"
    assert default_wire("dense", _parameters(LARGE)) == "float32"


@pytest.mark.parametrize("rival", ["", "topka"])
def test_the_wire_is_found_within_twenty_steps_loses_nothing_and_is_kept_in_the_state(
    rival: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel, steps = 20_000, wire_trials() + 1
    assert steps <= 20
    if rival:  # and wins: the last of all that were tried
        monkeypatch.setattr(autotune, "_fastest", lambda slowest, _: list(slowest)[-1])

    def work(transport: Any) -> tuple[Any, ...]:
        with oktopk.Reducer("oktopk", 0.02, group=transport, wire="auto") as reducer:
            reducer._pipeline.tuner.rival = rival  # type: ignore[union-attr]
            given, got = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
            for step in range(steps):
                grad = gradient("layers", numel, transport.rank, step)
                given, got = given + grad, got + reducer.reduce("w", grad)
            owed, decided = reducer.residuals()["w"].double(), reducer.decisions
            with oktopk.Reducer("oktopk", 0.02, group=transport, wire="auto") as second:
                second.load_state_dict(reducer.state_dict())
                assert second.decisions == decided
                grad = gradient("layers", numel, transport.rank, steps)
                assert torch.equal(second.reduce("w", grad), reducer.reduce("w", grad))
        return given, got, owed, decided["w"].method

    ranks = run_world(3, work)
    given, owed = sum(rank[0] for rank in ranks), sum(rank[2] for rank in ranks)
    assert (given - 3 * ranks[0][1] - owed).abs().max() <= 1e-5 * given.abs().max()  # 17 steps of float32 sums
    assert len({rank[3] for rank in ranks}) == 1 and ranks[0][3].is_sparse
    assert ranks[0][3].algorithm == rival
    assert all(torch.equal(rank[1], ranks[0][1]) for rank in ranks)


def test_a_state_without_decisions_can_be_continued_with_a_wire_that_is_looked_for() -> None:
    def work(transport: Any) -> None:
        with oktopk.Reducer("oktopk", 0.1, group=transport) as first:
            first.reduce("w", gradient("normal", 2000, transport.rank, 0))
            state = first.state_dict()
        with oktopk.Reducer("oktopk", 0.1, group=transport, wire="auto") as second:
            second.load_state_dict(state)
            assert second.reduce("w", gradient("normal", 2000, transport.rank, 1)).isfinite().all()

    run_world(2, work)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize(
    ("numel", "ranks", "chosen"),
    [(100_000, 8, "topka"), (1_000_000, 4, "topka"), (3_000_000, 8, "oktopk"), (10_000_000, 2, "oktopk"),
     (100_000, 1, "oktopk"), (3_000_000, 2, "topka")],
)  # fmt: skip
def test_a_round_less_is_chosen_where_few_entries_travel(numel: int, ranks: int, chosen: str) -> None:
    assert default_algorithm(numel, ranks, 0.01)[0] == chosen
    assert default_algorithm(numel, ranks, {0: 1.0, 100: 0.01})[0] == chosen  # what most steps have


def test_an_option_of_oktopk_asks_for_oktopk() -> None:
    assert default_algorithm(1000, 2, 0.01, ["wire", "min_numel"])[0] == "topka"
    assert default_algorithm(1000, 2, 0.01, ["balance_factor"])[0] == "oktopk"
    with pytest.raises(ConfigError, match="density must be"):
        default_algorithm(1000, 2, 2.0)


def test_a_state_goes_on_with_the_algorithm_that_saved_it_where_none_was_asked_for() -> None:
    def work(transport: Any) -> None:
        first, second, third = (oktopk.Reducer(name, 0.1, group=transport) for name in ("oktopk", "topka", "topka"))
        first.reduce("w", gradient("normal", 2000, transport.rank, 0))
        second._pipeline.is_algorithm_fixed = False  # as `register` says
        second.load_state_dict(first.state_dict())
        assert second.algorithm == "oktopk"
        grad = gradient("normal", 2000, transport.rank, 1)
        assert torch.equal(second.reduce("w", grad), first.reduce("w", grad))
        assert second.residuals()["w"].equal(first.residuals()["w"])
        with pytest.raises(CheckpointError, match="algorithm"):
            third.load_state_dict(first.state_dict())

    run_world(2, work)


def _one_line(options: dict[str, Any]) -> tuple[list[str], str, int]:
    """What rank 0 logs, how values travel, and how many vectors a step has."""
    torch.manual_seed(0)
    lines = _Lines()
    logging.getLogger("oktopk").setLevel(logging.INFO)
    logging.getLogger("oktopk").addHandler(lines)
    model = nn.Sequential(nn.Linear(1000, 700), nn.Linear(700, 700))
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    seen: list[Any] = []
    with oktopk.register(ddp, density=0.01, metrics=seen.append, **options) as reducer:
        for _ in range(wire_trials() + 2):
            ddp(torch.randn(2, 1000)).square().mean().backward()
        last = max(record.step for record in seen)
        return lines.texts, reducer.config.wire, sum(record.step == last for record in seen)


@pytest.mark.processes
def test_the_one_line_says_in_one_line_what_it_chose_and_why() -> None:
    (lines, wire, vectors), (silent, *_) = run_processes(2, _crowded_one_line, {})
    assert wire == "auto" and vectors == 1
    assert len(lines) == 1 and "one vector per step (2 ranks on 1 cores" in lines[0] and "bfloat16" in lines[0]
    assert "topka" in lines[0]
    assert silent == []


def _crowded_one_line(options: dict[str, Any]) -> tuple[list[str], str, int]:
    defaults._cores = lambda: [0]  # type: ignore[assignment]
    return _one_line(options)


@pytest.mark.processes
def test_what_was_asked_for_is_never_changed() -> None:
    (lines, wire, vectors), _ = run_processes(
        2, _crowded_one_line, {"algorithm": "oktopk", "wire": "int8", "fuse": "bucket"}
    )
    assert (lines, wire) == ([], "int8") and vectors > 1
