"""Time to target: the arithmetic from steps to time, what counts as reached, and a tiny sweep from end to end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from oktopk.bench.cluster import missing_for_emulation, namespaces
from oktopk.bench.network import Network
from oktopk.bench.target.contenders import CONTENDERS, in_one_piece_
from oktopk.bench.target.page import quality_text, reached_text, write_page
from oktopk.bench.target.pieces import PARTS, Sweep, Timing, Training, pieces, require_emulation
from oktopk.bench.target.plots import mean_run
from oktopk.bench.target.progress import Progress, estimate, make_all
from oktopk.bench.target.replay import (
    Costs,
    Goal,
    Measured,
    Moment,
    Trained,
    deviation,
    first_reached,
    goal_of,
    pareto_front,
    replay,
    spent,
    standing,
)
from oktopk.bench.target.results import (
    Results,
    collect,
    known_results,
    outdated,
    read_target,
    result_name,
    write_target,
)
from oktopk.bench.target.schedule import WHOLE, Schedule
from oktopk.bench.target.timing import Samples, _Timed
from oktopk.bench.target.training import Job, Seen, evaluation_steps
from oktopk.cli import main
from oktopk.cli.bench_target import BenchTarget
from oktopk.errors import ClusterError, ConfigError, DataError
from oktopk.training.run_directory import STEPS, read_json, read_jsonl, write_json
from oktopk.workloads.base import Recipe

missing = missing_for_emulation()
NETWORKS = (Network.parse("10mbit"), Network.parse("1gbit"))


def costs(contender: str = "diloco", network: str = "10mbit", **seconds: float) -> Costs:
    """What a step takes; it sends ten times as many bytes."""
    return Costs(contender, 2, network, seconds, {kind: 10 * s for kind, s in seconds.items()}, seconds, seconds, {})


def moments(*qualities: float) -> list[Moment]:
    """An evaluation every 10 steps, of one second and two bytes each."""
    return [Moment(10 * n, quality, 10.0 * n, 20.0 * n) for n, quality in enumerate(qualities)]


# -- which step is of which kind -------------------------------------------------------------------------------------


def test_a_dense_start_comes_before_all_other_kinds() -> None:
    assert [Schedule(start=2).kind(step) for step in range(4)] == ["dense", "dense", "exchange", "exchange"]
    assert Schedule(start=WHOLE).counts(5) == {"dense": 5}


def test_ranks_exchange_after_every_so_many_steps_and_outer_steps_are_rarer() -> None:
    kinds = [Schedule(every=2, outer=4).kind(step) for step in range(6)]
    assert kinds == ["local", "exchange", "local", "outer", "local", "exchange"]
    assert Schedule(every=3).counts(8) == {"local": 6, "exchange": 2}


@pytest.mark.parametrize("contender", CONTENDERS)
def test_a_brief_schedule_has_the_same_kinds_soon(contender: str) -> None:
    schedule = CONTENDERS[contender].schedule(Recipe(warmup_steps=200), 1000)
    brief = schedule.brief(dense_steps=3, cycle=4)
    assert set(brief.counts(3 + 4)) == set(schedule.counts(1000))
    assert (brief.start, brief.cycle <= 4) == (min(3, schedule.start) if schedule.start != WHOLE else WHOLE, True)


def test_powersgd_starts_after_a_tenth_of_all_steps_and_register_after_the_recipe_s_warm_up() -> None:
    assert CONTENDERS["powersgd 1"].schedule(Recipe(warmup_steps=7), 600).start == 60
    assert CONTENDERS["register"].schedule(Recipe(warmup_steps=7), 600).start == 7


def test_updates_every_4_steps_forget_most_of_what_is_owed_under_adamw_and_sgd() -> None:
    for optimizer, forgets in (("adamw", True), ("lamb", False), ("sgd", True)):
        recipe = Job("gpt", "updates 4", 2).recipe(Recipe(optimizer=optimizer))
        assert recipe.keep_owed is not None and (recipe.keep_owed < 1) is forgets
        schedule = CONTENDERS["updates 4"].schedule(recipe, 100)
        assert schedule.is_level(8) is forgets and not schedule.is_level(7)
    assert Job("gpt", "updates", 2).recipe(Recipe(optimizer="adamw")).keep_owed == 1


def test_a_training_is_looked_at_evenly_and_at_its_end() -> None:
    assert sorted(evaluation_steps(100, 4, Schedule())) == [25, 50, 75, 100]
    assert sorted(evaluation_steps(3, 20, Schedule())) == [1, 2, 3]
    assert sorted(evaluation_steps(102, 4, Schedule(every=4, levels=True))) == [24, 52, 76, 102], (
        "where ranks are level"
    )
    assert sorted(evaluation_steps(100, 20, Schedule(every=50, levels=True)))[:9] == [5, 10, 15, 20, 25, 30, 35, 40, 45]


# -- what steps take -------------------------------------------------------------------------------------------------


def test_a_training_takes_its_steps_kind_by_kind_and_what_ends_it() -> None:
    # 3 local steps of 1 s, then one with an exchange of 5 s; ten steps are 8 local ones and 2 exchanges.
    each = {"local": 1.0, "exchange": 5.0, "final": 7.0}
    assert spent(Schedule(every=4), 10, each) == 8 * 1.0 + 2 * 5.0 + 7.0
    assert spent(Schedule(every=4), 0, each) == 0.0  # nothing was done, so nothing has to be brought together
    assert spent(Schedule(every=4, levels=True), 8, each) == 6 * 1.0 + 2 * 5.0  # the last exchange has done it
    assert spent(Schedule(every=4, levels=True), 10, each) == 8 * 1.0 + 2 * 5.0 + 7.0


def test_a_kind_that_nobody_timed_is_an_error_and_not_free() -> None:
    with pytest.raises(ConfigError, match="no local step was timed"):
        spent(Schedule(every=4), 10, {"exchange": 5.0})


def test_a_replay_has_every_evaluation_at_its_time_and_bytes() -> None:
    trained = Trained("register", 2, 0, Schedule(start=4), ((0, 9.0), (4, 5.0), (10, 3.0)))
    replayed = replay(trained, costs(dense=2.0, exchange=0.5))
    assert replayed == (Moment(0, 9.0, 0.0, 0.0), Moment(4, 5.0, 8.0, 80.0), Moment(10, 3.0, 11.0, 110.0))
    assert deviation(Measured("register", 2, "10mbit", 0, tuple(moments(9.0, 3.0))), replayed) == pytest.approx(0.1)


def seen(kind: str, seconds: float) -> Seen:
    return Seen(0, kind, 0.0, 0.0, seconds, round(100 * seconds))


def test_what_a_step_of_a_kind_takes_is_the_mean() -> None:
    samples = Samples()
    samples.add_all([seen("dense", 1), seen("exchange", 2), seen("exchange", 4), seen("final", 3)])
    found = samples.costs()
    assert found["seconds"] == {"dense": 1.0, "exchange": 3.0, "final": 3.0}
    assert found["bytes"] == {"dense": 100.0, "exchange": 300.0, "final": 300.0}
    assert (found["fastest"]["exchange"], found["slowest"]["exchange"], found["samples"]["exchange"]) == (2, 4, 2)


class Timeable:
    """A training in which a cycle takes two seconds of a clock that only steps move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.schedule, self.world, self.done, self.now = Schedule(every=2), self, 0, 0.0
        self.announced: list[int] = []
        monkeypatch.setattr("oktopk.bench.target.timing.monotonic", lambda: self.now)

    def announce(self, value: int) -> int:
        self.announced.append(value)
        return value

    def step(self) -> Seen:
        self.now, self.done = self.now + 1.0, self.done + 1
        return seen("local" if self.done % 2 else "exchange", 1.0)


def test_ranks_agree_on_many_cycles_at_once_as_between_steps_of_a_training_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Timeable(monkeypatch)
    timed = _Timed(training)  # type: ignore[arg-type]
    assert len(timed._cycles(least=1, seconds=9.0)) == 10  # the first tells how many fit
    assert training.announced == [1, 4, 0]
    assert len(timed._cycles(least=1, seconds=9.0)) == 10 and training.announced[3:] == [5, 0]
    assert len(timed._cycles(least=3, seconds=0.5)) == 6, "however long they take"


# -- the target ------------------------------------------------------------------------------------------------------


def test_the_target_is_what_dense_reaches_at_the_end_within_a_hundredth() -> None:
    assert goal_of(None, [300.0, 310.0], lower_is_better=True) == Goal(pytest.approx(305 * 1.01), True)
    assert goal_of(None, [0.9], lower_is_better=False) == Goal(pytest.approx(0.891), False)
    assert goal_of(0.5, [0.9], lower_is_better=False).value == 0.5
    with pytest.raises(ConfigError, match="must take part"):
        goal_of(None, [], lower_is_better=True)


def test_the_first_evaluation_that_reaches_the_target_counts_in_the_metric_s_direction() -> None:
    assert first_reached(moments(9.0, 5.0, 3.0, 4.0), Goal(3.5, True)) == Moment(20, 3.0, 20.0, 40.0)
    assert first_reached(moments(0.1, 0.5, 0.9), Goal(0.5, False)) == Moment(10, 0.5, 10.0, 20.0)
    assert first_reached(moments(0.1, 0.5), Goal(0.6, False)) is None


def test_a_target_that_some_seeds_miss_is_not_reached_and_the_table_says_so() -> None:
    both = standing("updates", [moments(9, 3), moments(9, 2)], [Goal(3.0, True)] * 2)
    one = standing("updates", [moments(9, 3), moments(9, 4)], [Goal(3.0, True)] * 2)
    none = standing("sparta 0.01", [moments(0.1, 0.31)], [Goal(0.5, False)])
    assert (both.has_reached, both.seconds, reached_text(both)) == (True, 10.0, "reached")
    assert (one.has_reached, reached_text(one)) == (False, "not reached in 1 of 2: 3.5")
    assert reached_text(none) == "not reached: 0.31"
    assert reached_text(replace(none, diverged=1)) == "diverged in 1 of 1"


def test_one_seed_has_no_spread() -> None:
    assert quality_text(standing("updates", [moments(9, 3)], [Goal(3.0, True)])) == "3"
    assert quality_text(standing("updates", [moments(9, 3), moments(9, 4)], [Goal(3.0, True)] * 2)) == "3.5 ± 0.71"


def test_the_front_has_those_that_nobody_beats_in_bytes_and_quality() -> None:
    points = [(10.0, 5.0), (1.0, 9.0), (20.0, 5.0), (5.0, 7.0), (7.0, 8.0)]
    assert pareto_front(points, lower_is_better=True) == [(1.0, 9.0), (5.0, 7.0), (10.0, 5.0)]
    assert pareto_front(points, lower_is_better=False) == [(1.0, 9.0)]


def test_the_mean_over_seeds_has_the_evaluations_that_all_have() -> None:
    assert mean_run([moments(9, 3, 2), moments(9, 5)]) == [Moment(10, 4, 10.0, 20.0)]


# -- pieces ----------------------------------------------------------------------------------------------------------


@dataclass
class Fake:
    """A piece that takes a given time, or fails."""

    name: str
    clock: list[float]
    fails: bool = False
    made: bool = False
    part: str = "trainings"
    heard: list[float] = field(default_factory=list)

    def is_finished(self) -> bool:
        return self.made

    def make(self, say: Callable[[float], None]) -> None:
        if self.fails:
            raise KeyboardInterrupt
        say(0.5)
        self.clock[0] += 10.0
        self.made = True


def test_what_was_finished_before_an_interruption_is_not_made_again() -> None:
    clock = [0.0]
    work: list[Any] = [Fake("a", clock), Fake("b", clock, fails=True), Fake("c", clock)]
    heard: list[Progress] = []
    with pytest.raises(KeyboardInterrupt):
        make_all(work, heard.append, lambda: clock[0])
    assert [piece.made for piece in work] == [True, False, False]
    work[0].make, work[1].fails = pytest.fail, False
    make_all(work, heard.append, lambda: clock[0])
    assert (heard[-1].done, heard[-1].of, heard[-1].remaining) == (3, 3, 0.0)


def test_the_estimate_is_what_pieces_of_a_part_have_taken() -> None:
    taken = {"trainings": [10.0, 20.0], "timings": [2.0]}
    assert estimate(5.0, 0.5, "trainings", ["trainings", "timings", "measured"], taken) == 5.0 + 15.0 + 2.0 + 15.0
    assert estimate(0.0, 0.0, "trainings", ["trainings"], taken) == 15.0 + 15.0
    assert estimate(5.0, 0.0, "trainings", [], {}) is None


def sweep(**changes: Any) -> Sweep:
    values: dict[str, Any] = {
        "workload": "gpt", "networks": NETWORKS, "contenders": ("ddp dense", "updates"), "seeds": 2,
    }  # fmt: skip
    return Sweep(**values | changes)


def test_a_sweep_trains_seed_by_seed_and_then_times_network_by_network() -> None:
    names = [piece.name for piece in pieces(sweep(seeds=2))]
    assert names == [
        "gpt-2hosts-ddp-dense-seed0",
        "gpt-2hosts-updates-seed0",
        "gpt-2hosts-ddp-dense-seed1",
        "gpt-2hosts-updates-seed1",
        "steps-gpt-2hosts-10mbit",
        "gpt-2hosts-updates-10mbit-seed0-check",
        "steps-gpt-2hosts-1gbit",
        "gpt-2hosts-updates-1gbit-seed0-check",
    ]
    assert [piece.name for piece in pieces(sweep(), ["trainings"])] == names[:4]


def test_when_everything_is_measured_nothing_is_timed() -> None:
    found = pieces(sweep(measured=True, seeds=1))
    assert {piece.part for piece in found} == {"measured"}
    assert len(found) == 2 * len(NETWORKS)


def test_all_names_of_a_sweep_differ() -> None:
    names = [piece.name for piece in pieces(sweep(contenders=tuple(CONTENDERS), hosts=(2, 4)))]
    assert len(set(names)) == len(names)


def test_a_training_that_was_made_otherwise_is_not_taken_for_this_one(tmp_path: Path) -> None:
    piece = Training(tmp_path, Job("gpt", "updates", 2, evaluations=3))
    write_run(piece, [(0, 9.0), (10, 5.0)])
    assert piece.is_finished()
    with pytest.raises(ConfigError, match="evaluations 3 and not 4"):
        Training(tmp_path, Job("gpt", "updates", 2, evaluations=4)).is_finished()


def test_sweeps_of_several_recipes_stand_side_by_side() -> None:
    recipes = [{}, {"lr": 40.0}, {"epochs": 12, "data": "corpora/an4"}, {"lr": 40.0, "lr_warmup_epochs": 0.5}]
    sweeps = [sweep(**recipe) for recipe in recipes]
    assert [result_name("tiny", one.asked) for one in sweeps] == [
        "target-gpt-tiny",
        "target-gpt-tiny-lr-40",
        "target-gpt-tiny-an4-epochs-12",
        "target-gpt-tiny-lr-40-lr-warmup-epochs-0.5",
    ]
    names = [piece.name for one in sweeps for piece in pieces(one)]
    assert len(set(names)) == len(names)


def test_a_training_that_was_interrupted_is_made_again(tmp_path: Path) -> None:
    piece = Training(tmp_path, Job("gpt", "updates", 2))
    write_run(piece, [(0, 9.0)])
    (piece.path / "summary.json").unlink()
    assert not piece.is_finished()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contenders": ("ddp dens",)}, "Did you mean 'ddp dense'"),
        ({"contenders": ("updates", "updates")}, "once"),
        ({"checked": ("diloco",)}, "must be among"),
        ({"seeds": 0}, "1 or more"),
        ({"hosts": (1,)}, "2 or more"),
        ({"networks": (Network(None),)}, "by their rates"),
        ({"networks": ()}, "by their rates"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sweep(**changes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--contenders", "updates"], "must take part"),
        (["--target", "soon"], "or dense"),
        (["--network", "fast"], "looks like 100mbit"),
        (["--contenders", "dilocoo", "ddp dense"], "Did you mean 'diloco'"),
        (["--contenders", "dens"], "unknown contender 'dens'"),
        (["--target", "nan"], "or dense"),
        (["--measured", "--parts", "trainings"], "leave that out"),
        (["--hosts", "2", "2"], "got 2 twice"),
        (["--network", "100mbit", "100mbit"], "got 100mbit twice"),
        (["--epochs", "0"], "epochs must be 1 or more"),
        (["--preset", "tinny"], "Did you mean 'tiny'"),
        (["--preset", "tiny", "--data", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    arguments: list[str], words: str, tmp_path: Path, capsys: Any
) -> None:
    assert main(["bench", "target", "gpt", *arguments, "--runs", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")
    assert not list(tmp_path.iterdir())


def test_the_command_of_a_table_makes_all_of_it_wherever_it_was_kept(tmp_path: Path) -> None:
    made = BenchTarget("vision", seeds=1, contenders=("ddp dense", "updates"), parts=("trainings",), runs=tmp_path)
    assert made.command() == "oktopk bench target vision --contenders 'ddp dense' updates --seeds 1"
    assert BenchTarget().command() == "oktopk bench target gpt"


def test_an_unknown_workload_is_refused(capsys: Any) -> None:
    assert main(["bench", "target", "gtp"]) == 2
    assert "Did you mean 'gpt'" in capsys.readouterr().err


def test_without_an_emulated_network_only_trainings_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("oktopk.bench.target.pieces.missing_for_emulation", lambda: "that needs root")
    with pytest.raises(ClusterError, match="--parts trainings"):
        require_emulation(pieces(sweep(runs=tmp_path)))
    require_emulation(pieces(sweep(runs=tmp_path), ["trainings"]))


def test_parameters_become_views_of_one_vector() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    whole = in_one_piece_(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    whole.zero_()
    assert not any(parameter.any() for parameter in model.parameters())


# -- the page --------------------------------------------------------------------------------------------------------


def write_run(piece: Training, points: list[tuple[int, float]], levels: bool = False, diverged: bool = False) -> None:
    """What a finished training leaves behind."""
    piece.path.mkdir(parents=True)
    config = {
        "asked": piece.job.asked, "metric": "perplexity", "lower_is_better": True, "preset": "tiny",
        "parameters": 1000, "schedule": vars(Schedule(every=2, levels=levels)),
    }  # fmt: skip
    write_json(piece.path / "config.json", config)
    rows = [{"step": s, "seconds": 2.0 * s, "bytes_sent": s, "validation": {"perplexity": q}} for s, q in points]
    (piece.path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(piece.path / "summary.json", {"diverged": diverged, "steps": points[-1][0]})


def results_of(tmp_path: Path) -> Results:
    wanted = sweep(seeds=2, runs=tmp_path / "runs")
    for piece in pieces(wanted):
        if isinstance(piece, Training):
            end = 5.0 if piece.job.contender == "ddp dense" else 4.0 + piece.job.seed
            write_run(piece, [(0, 9.0), (10, end)])
        else:
            seconds = {"local": 0.25, "exchange": 0.5, "final": 1.0}
            found = dict.fromkeys(("seconds", "bytes", "fastest", "slowest", "samples"), seconds)
            for job in piece.jobs:
                write_json(piece.path(job), {"asked": piece._asked(job), "costs": found})
    return collect(wanted, None, "oktopk bench target gpt")


def test_a_measured_training_pays_for_its_end_wherever_it_would_have_ended(tmp_path: Path) -> None:
    points = [(0, 9.0), (3, 7.0), (4, 6.0)]
    kept, level = (Training(tmp_path, Job("gpt", "updates", 2, seed=seed), NETWORKS[0]) for seed in (0, 1))
    write_run(kept, points)
    write_run(level, points, levels=True, diverged=True)
    final = {"kind": "final", "seconds": 3.0, "bytes_sent": 30}
    for piece in (kept, level):
        (piece.path / "steps.jsonl").write_text(json.dumps(final) + "\n")
    assert [(one.step, one.seconds, one.bytes) for one in kept.crossing().moments][1:] == [(3, 9.0, 33), (4, 11.0, 34)]
    found = level.crossing()
    assert [(one.step, one.seconds, one.bytes) for one in found.moments][1:] == [(4, 8.0, 4)], "3 is between exchanges"
    assert found.diverged and not kept.crossing().diverged


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    results = results_of(tmp_path)
    write_target(tmp_path / "target.json", results)
    assert read_target(tmp_path / "target.json") == results
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataError, match="write it again"):
        read_target(tmp_path / "other.json")


def test_standings_are_in_the_order_in_which_the_target_is_reached(tmp_path: Path) -> None:
    first, second = results_of(tmp_path).standings(2, "10mbit")
    assert {first.contender, second.contender} == {"ddp dense", "updates"}
    assert first.seconds == second.seconds == 5 * 0.25 + 5 * 0.5 + 1.0


def test_a_training_is_held_to_what_dense_reaches_with_its_seed(tmp_path: Path) -> None:
    known = results_of(tmp_path)  # updates end at 4 and 5
    dense = [replace(one, points=((0, 9.0), (10, 4.0 + one.seed))) for one in known.trained[::2]]
    results = replace(known, trained=(*known.trained[1::2], *dense))
    assert [one.contender for one in dense] == ["ddp dense"] * 2
    assert [results.goal(2, seed).value for seed in (0, 1, 7, None)] == pytest.approx([4.04, 5.05, 4.545, 4.545])
    assert all(one.has_reached for one in results.standings(2, "10mbit"))


def test_the_page_has_a_table_for_every_network_with_its_command_and_what_is_missing(tmp_path: Path) -> None:
    results = results_of(tmp_path)
    write_target(tmp_path / "docs" / "bench" / "target-gpt-tiny.json", replace(results, costs=results.costs[:-1]))
    text = write_page(tmp_path / "docs").read_text()
    assert text.count("`oktopk bench target gpt`") == 4  # two networks, bytes, measured beside replayed
    assert "| **updates** | reached | 4.75 s | 10 |" in text
    assert "- Trained, but not timed yet with 2 hosts at 1gbit: updates." in text
    assert "- Seeds so far" not in text and "Trained, and not timed" not in text
    assert "sparseloco" in text.partition("Not trained")[2]
    figures = {path.name for path in (tmp_path / "docs" / "img").iterdir()}
    assert figures == {f"target-gpt-tiny-2-{what}.svg" for what in ("10mbit", "1gbit", "bytes")}
    assert "-76.2%" in text  # 4.75 s replayed, 20 s as the run directory says
    assert "**more than 10%**" in text
    write_target(tmp_path / "docs" / "bench" / "target-gpt-tiny.json", replace(results, costs=(), measured=()))
    text = write_page(tmp_path / "docs").read_text()
    assert "| updates | 4.5 ± 0.71 | 2 |" in text.partition("Trained, and not timed on any network:")[2]


def test_the_page_says_how_many_seeds_are_still_to_come(tmp_path: Path) -> None:
    results = results_of(tmp_path)
    write_target(tmp_path / "docs" / "bench" / "target-gpt-tiny.json", replace(results, seeds=3))
    assert "- Seeds so far with 2 hosts, of 3: all contenders 2." in write_page(tmp_path / "docs").read_text()


# -- going on from the page's results --------------------------------------------------------------------------------


def test_what_the_page_has_is_not_made_again_and_not_lost(tmp_path: Path) -> None:
    known = results_of(tmp_path)
    file = tmp_path / "target.json"
    write_target(file, known)
    wider = sweep(contenders=("ddp dense", "diloco"), checked=(), hosts=(2, 4), seeds=3, runs=tmp_path / "other")
    assert known_results(file, wider) == known
    missing = [piece.name for piece in pieces(wider, ["trainings"]) if known.rest_of(piece)]
    assert "gpt-2hosts-ddp-dense-seed1" not in missing
    assert {"gpt-2hosts-ddp-dense-seed2", "gpt-4hosts-ddp-dense-seed0", "gpt-2hosts-diloco-seed0"} <= set(missing)
    timings = [rest for piece in pieces(wider, ["timings"]) if (rest := known.rest_of(piece))]
    assert [[job.contender for job in rest.jobs] for rest in timings if isinstance(rest, Timing)] == [
        ["diloco"], ["ddp dense", "diloco"], ["diloco"], ["ddp dense", "diloco"],
    ]  # fmt: skip
    new = Training(wider.runs, wider.job("diloco", 2, 0))
    write_run(new, [(0, 9.0), (10, 7.0)])
    joined = collect(wider, None, "oktopk bench target gpt", known)
    assert joined.contenders(2) == ["ddp dense", "updates", "diloco"]
    assert (joined.seeds, joined.costs, joined.measured) == (3, known.costs, known.measured)
    assert joined.trained == (*known.trained, new.trained())


def test_results_of_another_sweep_are_not_written_over(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    write_target(docs / "bench" / "target-gpt-tiny.json", results_of(tmp_path))
    one = BenchTarget("gpt", preset="tiny", evaluations=7, parts=("trainings",), runs=tmp_path / "new", docs=docs)
    with pytest.raises(ConfigError, match=r"evaluations \d+ and not 7.*another --docs, or delete it"):
        one()
    assert not (tmp_path / "new").exists()


def test_the_command_of_a_page_also_makes_its_checks(tmp_path: Path) -> None:
    known = results_of(tmp_path)
    assert "--checked" not in BenchTarget().command(known)
    crossed = replace(known, measured=(*known.measured, replace(known.measured[0], contender="ddp dense")))
    assert "--checked 'ddp dense' updates" in BenchTarget().command(crossed)


def test_networks_that_no_training_crossed_are_named(tmp_path: Path) -> None:
    write_target(tmp_path / "docs" / "bench" / "target-gpt-tiny.json", replace(results_of(tmp_path), measured=()))
    assert (
        "- No training with 2 hosts crossed 10mbit, 1gbit, to be compared" in write_page(tmp_path / "docs").read_text()
    )


def test_times_of_another_machine_are_taken_again_but_trainings_are_kept(tmp_path: Path) -> None:
    known = results_of(tmp_path)
    elsewhere = replace(known, machines={name: {"processor": "abacus"} for name in known.machines})
    write_target(tmp_path / "a.json", elsewhere)
    assert known_results(tmp_path / "a.json", sweep()) == elsewhere, "nobody is missing in its tables"
    joined = sweep(contenders=("ddp dense", "updates", "diloco"), networks=NETWORKS[:1])
    assert known_results(tmp_path / "a.json", joined, ["trainings"]) == elsewhere, "nobody is timed in this call"
    found = known_results(tmp_path / "a.json", joined)
    assert found is not None and found.trained == known.trained
    assert (
        {one.network for one in (*found.costs, *found.measured)}
        == {"1gbit"}
        == {table.split()[-1] for table in found.machines}
    ), "who joins is timed together with all others of the table"
    assert known_results(tmp_path / "a.json", replace(joined, hosts=(4,))) == elsewhere, "a table of its own"
    write_target(tmp_path / "b.json", known)
    found = known_results(tmp_path / "b.json", sweep(seconds=9.0))
    assert found is not None and not found.costs


@pytest.mark.parametrize("changes", [{"epochs": 7}, {"lr": 0.5}, {"preset": "small"}, {"measured": True}])
def test_results_of_another_training_do_not_count(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_target(tmp_path / "target.json", results_of(tmp_path))
    assert known_results(tmp_path / "target.json", sweep(**changes)) is None
    assert known_results(tmp_path / "none.json", sweep()) is None


def test_who_is_trained_in_another_way_today_is_trained_again(tmp_path: Path) -> None:
    known, file = results_of(tmp_path), tmp_path / "target.json"
    assert (
        "keep_owed 1.0" in known.methods["updates, 2 hosts"] and "keep_owed" not in known.methods["ddp dense, 2 hosts"]
    )
    assert known.methods["updates, 2 hosts"] != Job("gpt", "updates", 4, preset="tiny").method, "its rate follows hosts"
    before = known.methods["updates, 2 hosts"].replace("density 0.3", "density 0.2")
    write_target(file, replace(known, methods={**known.methods, "updates, 2 hosts": before}))
    assert outdated(read_target(file), sweep()) == ["updates, 2 hosts"]
    found = known_results(file, sweep())
    assert found is not None
    assert {one.contender for one in (*found.trained, *found.costs, *found.measured)} == {"ddp dense"}
    dense = sweep(contenders=("ddp dense",), checked=())
    assert known_results(file, dense) == read_target(file), "who is not trained now stays"
    assert known_results(file, sweep(), ["timings", "measured"]) == read_target(file)
    write_target(file, replace(known, methods={}))
    found = known_results(file, sweep())
    assert found is not None and not found.trained, "nobody knows how it was trained"


def test_a_run_that_another_recipe_made_is_made_again(tmp_path: Path) -> None:
    piece = Training(tmp_path, Job("gpt", "updates", 2, preset="tiny", evaluations=4))
    write_run(piece, [(0, 9.0), (4, 5.0)])
    assert piece.is_finished()
    config = read_json(piece.path / "config.json")
    write_json(piece.path / "config.json", {**config, "asked": {**config["asked"], "method": "as it was"}})
    assert not piece.is_finished()


def test_the_command_makes_what_was_known_too(tmp_path: Path) -> None:
    known = results_of(tmp_path)
    asked = BenchTarget("gpt", contenders=("ddp dense", "diloco"), seeds=1, hosts=(4,), network=("100mbit",))
    assert asked.command(known) == (
        "oktopk bench target gpt --network 10mbit 100mbit 1gbit --contenders 'ddp dense' diloco updates --seeds 2 "
        "--hosts 2 4"
    )


# -- from end to end -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(missing is not None, reason=f"no emulated network here: {missing}")
def test_a_tiny_sweep_adds_up_to_what_its_run_directories_say(tmp_path: Path, capsys: Any) -> None:
    contenders = ("ddp dense", "ddp bf16", "powersgd 1", "register", "diloco", "sparseloco", "sparta diloco", "updates")
    arguments = [
        "bench", "target", "gpt", "--preset", "tiny", "--epochs", "1", "--seeds", "1", "--network", "1gbit",
        "--contenders", *contenders, "--evaluations", "2", "--seconds", "0.2",
        "--runs", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs"),
    ]  # fmt: skip
    assert main(arguments) == 0
    assert "ETA" in capsys.readouterr().out
    assert not [name for name in namespaces() if name.startswith("oktopk")]
    wanted = Sweep(
        "gpt", (Network.parse("1gbit"),), contenders, 1, (2,), "tiny", None, 1, evaluations=2, seconds=0.2,
        runs=tmp_path / "runs",
    )  # fmt: skip
    found = pieces(wanted)
    assert all(piece.is_finished() for piece in found)
    assert {piece.part for piece in found} == set(PARTS)
    results = read_target(tmp_path / "docs" / "bench" / "target-gpt-tiny-epochs-1.json")
    for piece in found:
        if isinstance(piece, Training):
            check_training(piece)
        else:
            for job in piece.jobs:
                check_replay(piece, job, results)
    assert "| updates | 2 | 1gbit |" in (tmp_path / "docs" / "time-to-target.md").read_text()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert main(arguments) == 0  # all of it is there: nothing is made again
    assert {path: path.stat().st_mtime_ns for path in before} == before
    arguments[arguments.index("--runs") + 1] = str(tmp_path / "elsewhere")
    assert main(arguments) == 0  # nor where the page has it
    assert not (tmp_path / "elsewhere").exists()
    assert read_target(tmp_path / "docs" / "bench" / "target-gpt-tiny-epochs-1.json") == results


def check_training(piece: Training) -> None:
    """Its rows are of the kinds that the schedule says, and its sums are those of its rows."""
    rows, summary = read_jsonl(piece.path / STEPS), read_json(piece.path / "summary.json")
    steps = [row for row in rows if row["kind"] != "final"]
    assert Counter(row["kind"] for row in steps) == piece.trained().schedule.counts(100)
    assert summary["seconds"] == pytest.approx(sum(row["seconds"] for row in rows))
    assert summary["bytes_sent"] == sum(row["bytes_sent"] for row in rows)
    assert summary["validation"]["perplexity"] == piece.trained().final < piece.trained().points[0][1]


def check_replay(piece: Timing, job: Job, results: Results) -> None:
    """The table's time is the sum over the rows of the training's directory of what their kinds took."""
    taken = read_json(piece.path(job))["costs"]
    twin = Training(piece.runs, replace(job, evaluations=2))
    is_level = twin.trained().schedule.is_level(100)
    kinds = [row["kind"] for row in read_jsonl(twin.path / STEPS) if not (is_level and row["kind"] == "final")]
    (run,) = results.runs(job.contender, 2, "1gbit").values()
    assert run[-1].seconds == pytest.approx(sum(taken["seconds"][kind] for kind in kinds))
    assert run[-1].bytes == pytest.approx(sum(taken["bytes"][kind] for kind in kinds))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(missing is not None, reason=f"no emulated network here: {missing}")
def test_a_measured_sweep_times_what_really_crossed_the_network(tmp_path: Path) -> None:
    arguments = [
        "bench", "target", "gpt", "--preset", "tiny", "--epochs", "1", "--seeds", "1", "--network", "1gbit",
        "--contenders", "ddp dense", "updates", "--evaluations", "2", "--measured", "--target", "100",
        "--runs", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs"),
    ]  # fmt: skip
    assert main(arguments) == 0
    results = read_target(tmp_path / "docs" / "bench" / "target-gpt-tiny-epochs-1.json")
    assert results.is_measured and not results.trained and not results.costs and not results.checks()
    for one in results.standings(2, "1gbit"):
        name = one.contender.replace(" ", "-")
        summary = read_json(tmp_path / "runs" / f"gpt-tiny-epochs-1-2hosts-{name}-1gbit-seed0" / "summary.json")
        assert one.ends[0].seconds == pytest.approx(summary["seconds"])
        assert one.ends[0].bytes == summary["bytes_sent"] > 0
        assert one.has_reached and one.reached[0].step == 50  # chance is 128
