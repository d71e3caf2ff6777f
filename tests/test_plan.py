"""The planner: its arithmetic, its advice, and its honesty about dense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oktopk.bench.cost_model import predict
from oktopk.bench.machine import Machine, measure_machine
from oktopk.bench.network import Network
from oktopk.bench.planner import (
    Scenario,
    break_even,
    expected_bytes,
    predict_all,
    predict_step,
    recommend,
    speedup,
)
from oktopk.bench.result_file import Header, read_results, write_results
from oktopk.bench.step import StepResult
from oktopk.bench.training_time import Length, predict_trainings, recommend_training
from oktopk.bench.update_advice import advise_updates, recommend_updates
from oktopk.bench.validate import compare
from oktopk.cli import main
from oktopk.config import WIRES
from oktopk.errors import ConfigError, DataError

ALGORITHMS = ("dense", "topka", "topkdsa", "gtopk", "gaussiank", "randomk", "oktopk")
MACHINE = Machine(
    per_entry=dict.fromkeys(ALGORITHMS, 1e-9),
    fused_per_entry=8e-10,
    per_pair=dict.fromkeys(WIRES, 2e-8),
    bytes_per_pair={"float32": 5.0, "float16": 3.0, "bfloat16": 3.0, "int8": 2.0, "int4": 1.5, "codebook2": 1.3},
    density=0.01,
    round_seconds=2e-5,
    message_seconds=1e-5,
    stack_bytes_per_second=1e11,
    cores=8,
)
SLOW = Scenario(network=Network(1e8, 1e-4))


def test_every_algorithm_and_wire_is_predicted_fastest_first() -> None:
    predictions = predict_all(SLOW, MACHINE)
    assert {p.algorithm for p in predictions} == set(ALGORITHMS)
    assert {p.wire for p in predictions if p.algorithm == "oktopk"} == set(WIRES)
    times = [p.step_seconds for p in predictions]
    assert times == sorted(times) and min(times) > SLOW.compute_seconds


def test_a_slow_link_calls_for_sparse_and_a_fast_one_for_dense() -> None:
    assert recommend(SLOW, MACHINE).startswith("use oktopk int8 at density 0.01: ")
    assert predict_all(SLOW, MACHINE)[0].name == "randomk codebook2"  # faster, but not as good
    assert "above" in recommend(SLOW, MACHINE) and recommend(SLOW, MACHINE).endswith("use dense.")
    fast = replace(SLOW, network=Network(4e12, 1e-6))
    assert recommend(fast, MACHINE).startswith("use dense: ")


def test_at_the_break_even_both_take_equally_long() -> None:
    border = break_even(SLOW, MACHINE, "oktopk", "bfloat16")
    assert border is not None
    there = replace(SLOW, network=Network(border, 1e-4))
    assert speedup(there, MACHINE, predict_step(there, MACHINE, "oktopk", "bfloat16")) == pytest.approx(1.0, abs=0.01)


def test_dense_over_a_slow_link_takes_the_time_its_bytes_need() -> None:
    predicted = predict_step(SLOW, MACHINE, "dense", "float32")
    seconds = 2 * 4 * SLOW.numel * 3 / 4 * 8 / 1e8
    assert predicted.link_seconds == pytest.approx(seconds, rel=0.05), "headers and framing are below 5%"
    assert predicted.step_seconds == pytest.approx(SLOW.compute_seconds + seconds, rel=0.06)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 16, 64])
def test_expected_bytes_stay_below_the_bound_of_the_cost_model(algorithm: str, ranks: int) -> None:
    scenario = replace(SLOW, ranks=ranks, bucket_bytes=1 << 40)
    bound = predict(algorithm, scenario.numel, scenario.k, ranks).bytes_received
    assert expected_bytes(scenario, MACHINE, algorithm, "float32") <= bound * 1.001


def test_oktopk_stays_flat_where_topka_grows() -> None:
    small, large = replace(SLOW, ranks=2), replace(SLOW, ranks=10_000)
    growth = {
        name: expected_bytes(large, MACHINE, name, "float32") / expected_bytes(small, MACHINE, name, "float32")
        for name in ("topka", "oktopk")
    }
    assert growth["topka"] > 5_000
    assert growth["oktopk"] < 30, "payload doubles; a header per peer and message of a bucket is the rest"


def test_latency_costs_one_wait_per_round() -> None:
    far = replace(SLOW, network=Network(1e8, 0.05), backward_seconds=0.0, bucket_bytes=1 << 40)
    near = replace(far, network=Network(1e8, 0.0))
    gap = predict_step(far, MACHINE, "topka", "float32").step_seconds
    gap -= predict_step(near, MACHINE, "topka", "float32").step_seconds
    rounds = predict("topka", far.numel, far.k, far.ranks).rounds
    assert gap == pytest.approx(0.05 * rounds)


def test_ranks_of_one_host_share_its_link() -> None:
    alone = predict_step(replace(SLOW, ranks=8), MACHINE, "oktopk", "float32")
    shared = predict_step(replace(SLOW, ranks=8, ranks_per_host=4, flat=True), MACHINE, "oktopk", "float32")
    assert shared.link_seconds == pytest.approx(alone.link_seconds * 4 * 4 / 7, rel=0.01)


@pytest.mark.parametrize("algorithm", ["topka", "gtopk", "randomk", "oktopk"])
def test_a_host_of_several_ranks_sends_what_one_rank_would(algorithm: str) -> None:
    one = predict_step(replace(SLOW, ranks=2), MACHINE, algorithm, "float32")
    four = predict_step(replace(SLOW, ranks=8, ranks_per_host=4), MACHINE, algorithm, "float32")
    # Eight ranks agree instead of two; and each part of oktopk has a histogram of its own, which is no smaller.
    more = 0.12 if algorithm == "oktopk" else 0.03
    assert four.link_seconds == pytest.approx(one.link_seconds, rel=more)
    assert 4 * four.bytes_per_rank == pytest.approx(one.bytes_per_rank, rel=more)
    flat = predict_step(replace(SLOW, ranks=8, ranks_per_host=4, flat=True), MACHINE, algorithm, "float32")
    assert four.step_seconds < flat.step_seconds


def test_one_machine_and_dense_are_predicted_as_if_every_rank_were_for_itself() -> None:
    for algorithm, scenario in (
        ("oktopk", replace(SLOW, ranks=4, ranks_per_host=4)),
        ("dense", replace(SLOW, ranks=8, ranks_per_host=4)),
    ):
        flat = predict_step(replace(scenario, flat=True), MACHINE, algorithm, "float32")
        assert predict_step(scenario, MACHINE, algorithm, "float32") == flat


def test_one_rank_has_nothing_to_synchronise() -> None:
    alone = replace(SLOW, ranks=1)
    assert predict_step(alone, MACHINE, "oktopk", "float32").step_seconds == alone.compute_seconds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"density": 2.0}, "density"),
        ({"ranks": 0}, "ranks"),
        ({"ranks": 6, "ranks_per_host": 4}, "multiple"),
        ({"backward_seconds": 9.0}, "backward"),
    ],
)
def test_a_scenario_that_makes_no_sense_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SLOW, **changes)


def test_the_machine_is_measured_in_seconds_that_make_sense() -> None:
    machine = measure_machine(numel=1 << 18)
    assert all(1e-12 < seconds < 1e-5 for seconds in (*machine.per_entry.values(), *machine.per_pair.values()))
    assert machine.bytes_per_pair["float32"] > machine.bytes_per_pair["bfloat16"] > machine.bytes_per_pair["int8"] > 1
    assert machine.stack_bytes_per_second > 1e6 and machine.round_seconds > 0
    assert Machine(**machine.to_json()) == machine


def test_the_better_of_two_measurements_counts_cost_by_cost() -> None:
    one = Machine({"oktopk": 1.0}, 0.8, {"int8": 4.0}, {"int8": 2.0}, 0.01, 0.5, 0.1, 100.0, 2)
    other = Machine({"oktopk": 2.0}, 0.7, {"int8": 3.0}, {"int8": 2.0}, 0.01, 0.4, 0.2, 90.0, 2)
    best = Machine({"oktopk": 1.0}, 0.7, {"int8": 3.0}, {"int8": 2.0}, 0.01, 0.4, 0.1, 100.0, 2)
    assert one.best_with(other) == other.best_with(one) == best


def test_validation_compares_each_contender_that_the_planner_knows(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_results(path, _header(), [_result("floor", 0.2), _result("ddp dense", 1.5), _result("oktopk bfloat16", 0.3)])
    header, rows = read_results(path)
    compared = compare(header, [StepResult(**row) for row in rows])
    assert [c.contender for c in compared] == ["ddp dense", "oktopk bfloat16"]
    assert compared[0].predicted == pytest.approx(1.5, rel=0.2)
    assert compared[0].error == pytest.approx(compared[0].predicted / 1.5 - 1)


def test_a_file_that_is_no_run_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    for path in (tmp_path / "missing.json", tmp_path / "other.json"):
        with pytest.raises(DataError, match="oktopk bench step"):
            read_results(path)


def test_the_plan_command_prints_a_table_and_one_sentence(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    flags = ["--numel", "1000000", "--network", "100mbit", "--scale", "--plot", str(tmp_path)]
    assert main(["plan", *flags]) == 0
    out = capsys.readouterr().out
    assert "oktopk" in out and "10000 ranks" in out
    assert any(line.startswith("use ") and line.endswith(".") for line in out.splitlines())
    assert {path.name for path in tmp_path.iterdir()} >= {"plan-bandwidth.svg", "plan-ranks.svg"}


def test_the_plan_command_validates_a_run(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_results(path, _header(), [_result("floor", 0.2), _result("oktopk int8", 0.3)])
    assert main(["plan", "--validate", str(path)]) == 0
    assert "worst error" in capsys.readouterr().out


def test_a_run_with_costs_of_another_version_is_refused(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    costs = {name: cost for name, cost in MACHINE.to_json().items() if name != "fused_per_entry"}
    write_results(path, replace(_header(), costs=costs), [_result("floor", 0.2), _result("oktopk int8", 0.3)])
    assert main(["plan", "--validate", str(path)]) == 2
    assert "fused_per_entry" in capsys.readouterr().err


def test_one_vector_is_spared_the_look_for_nan() -> None:
    fused = replace(SLOW, bucket_bytes=1 << 40)
    work = [predict_step(s, MACHINE, "oktopk", "int8").work_seconds for s in (SLOW, fused)]
    assert work[0] == pytest.approx(work[1] + SLOW.numel * 2e-10)
    dense = [predict_step(s, MACHINE, "dense", "float32").work_seconds for s in (SLOW, fused)]
    assert dense[0] == dense[1], "dense looks for NaN either way"


def test_nothing_hides_behind_a_backward_that_shares_its_core() -> None:
    shared = predict_step(replace(SLOW, ranks_per_core=1.001), MACHINE, "oktopk", "float32")
    alone = predict_step(SLOW, MACHINE, "oktopk", "float32")
    hidden = SLOW.backward_seconds * (1 - 1 / SLOW.buckets)
    assert shared.step_seconds - alone.step_seconds == pytest.approx(hidden, rel=0.01)


def test_the_plan_command_refuses_an_impossible_rate(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "--network", "fast"]) == 2
    assert "100mbit" in capsys.readouterr().err


def _header() -> Header:
    costs = MACHINE.to_json()
    return Header("step", "oktopk bench step", 4, 4, 1, "1gbit", 1e9, 0.0, True, (), {"cores": 8}, costs)


def _result(contender: str, seconds: float) -> StepResult:
    return StepResult(contender, seconds, seconds, seconds, 3, 1, 1, {}, 27_570_000, 0.01, 25 << 20, 0.05, 0.2)


def test_updates_are_synchronised_so_rarely_that_it_takes_a_tenth_of_the_time() -> None:
    for scenario in (SLOW, replace(SLOW, network=Network(1e7)), replace(SLOW, network=Network(1e12))):
        advice = advise_updates(scenario, MACHINE, "adamw")
        share = advice.synchronising_seconds / scenario.compute_seconds
        assert advice.every == 64 or share / advice.every <= 0.1
        assert advice.every == 1 or share / (advice.every - 1) > 0.1
    assert advise_updates(replace(SLOW, network=Network(1e5)), MACHINE, "adamw").every == 64
    alone = replace(SLOW, ranks=1)
    assert (advise_updates(alone, MACHINE, "lamb").every, advise_updates(alone, MACHINE, "lamb").speedup) == (1, 1.0)


def test_rates_grow_with_the_root_of_the_ranks_except_that_of_sgd() -> None:
    for optimizer in ("adamw", "lamb"):
        assert advise_updates(SLOW, MACHINE, optimizer).rate_factor == 2.0
        assert "learning rate 2 times that of dense" in recommend_updates(SLOW, MACHINE, optimizer)
    assert "learning rate that of dense" in recommend_updates(SLOW, MACHINE, "sgd")


def test_a_whole_training_is_its_dense_start_and_its_sparse_steps() -> None:
    found = {one.name: one for one in predict_trainings(SLOW, MACHINE, Length(1000, warmup_steps=300))}
    dense = predict_step(SLOW, MACHINE, "dense", "float32")
    sparse = predict_step(SLOW, MACHINE, "oktopk", "int8")
    assert found["dense"].seconds == pytest.approx(1000 * dense.step_seconds)
    ours = found["oktopk int8 after 300 dense steps"]
    assert ours.seconds == pytest.approx(300 * dense.step_seconds + 700 * sparse.step_seconds)
    assert ours.bytes_per_rank == pytest.approx(300 * dense.bytes_per_rank + 700 * sparse.bytes_per_rank)
    assert found["dense"].bytes_per_rank / ours.bytes_per_rank < 1 / 0.3  # the law: no codec saves the dense third


def test_local_steps_end_with_one_dense_mean() -> None:
    updates = {one.name: one for one in predict_trainings(SLOW, MACHINE, Length(1000))}["local steps"]
    advice = advise_updates(SLOW, MACHINE, "sgd")
    dense = predict_step(SLOW, MACHINE, "dense", "float32")
    assert updates.dense_steps == 0
    assert updates.seconds == pytest.approx(1000 * advice.step_seconds + dense.link_seconds, rel=0.01)
    whole = replace(SLOW, density=advice.sent.density, bucket_bytes=4 * SLOW.numel)
    each = expected_bytes(whole, MACHINE, advice.sent.algorithm, advice.sent.wire)
    assert updates.bytes_per_rank == pytest.approx(1000 // advice.every * each + dense.bytes_per_rank, rel=0.01)


def test_local_steps_are_recommended_where_they_win_and_dense_where_it_does() -> None:
    every = advise_updates(SLOW, MACHINE, "sgd").every
    assert recommend_training(SLOW, MACHINE, Length(1000, 300)).startswith(
        f"1,000 steps under sgd: use local steps, oktopk.local_steps(model, optimizer, every={every}): "
    )
    fast = replace(SLOW, network=Network(4e12, 1e-6), ranks=2)
    assert recommend_training(fast, MACHINE, Length(1000, 300)).startswith("1,000 steps under sgd: use dense: ")
    # The mean that ends local steps is most of a training of one step.
    assert predict_trainings(SLOW, MACHINE, Length(1))[0].name != "local steps"


def test_a_training_of_no_length_is_refused(capsys: pytest.CaptureFixture) -> None:
    for length in ((0, 0), (5, 6), (5, -1)):
        with pytest.raises(ConfigError, match="steps must be"):
            Length(*length)
    assert main(["plan", "--warmup-steps", "5"]) == 2
    assert "give its --steps too" in capsys.readouterr().err


def test_the_plan_command_answers_for_a_whole_training(capsys: pytest.CaptureFixture) -> None:
    words = ["--numel", "1000000", "--network", "10mbit", "--steps", "500", "--warmup-steps", "50"]
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    for optimizer in ("sgd", "adamw", "lamb"):
        assert f"500 steps under {optimizer}: use local steps, oktopk.local_steps(" in out
    assert main(["plan", *words, "--optimizer", "adamw"]) == 0
    out = capsys.readouterr().out
    assert "under adamw: use local steps" in out and "under sgd" not in out
    assert "after 50 dense steps" in out
