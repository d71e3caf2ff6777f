"""algorithm="auto": trials end in the same step on all ranks, in the same decision, and it is the fastest way."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk.errors import ConfigError
from oktopk.reduction.autotune import BY_BUCKET, BY_STEP, DENSE, FUSINGS, AutoConfig, ChosenWire, Method, Tuner
from oktopk.transport import ThreadWorld
from oktopk.transport.threads import ThreadTransport, run_world
from oktopk.types import SparseVector

LAYOUT = (("weight", 10_000),)
FLOAT32, BFLOAT16 = Method(True, "float32"), Method(True, "bfloat16")
CONFIG = AutoConfig(wires=("float32", "bfloat16"), trial_steps=2, recheck_every=5)


def drive(tuner: Tuner, costs: dict[Method, float], steps: int) -> list[Method]:
    ways = []
    for _ in range(steps):
        way = tuner.choose(LAYOUT)
        tuner.observe(LAYOUT, way, costs[way])
        ways.append(way)
    return ways


def alone(config: AutoConfig = CONFIG) -> Tuner:
    return Tuner(config, ThreadWorld(1).transports()[0])


def test_every_way_is_tried_and_the_fastest_is_kept() -> None:
    ways = drive(alone(), {FLOAT32: 3.0, BFLOAT16: 2.0, DENSE: 5.0}, 12)
    assert ways[:9] == [FLOAT32] * 3 + [BFLOAT16] * 3 + [DENSE] * 3
    assert ways[9:] == [BFLOAT16] * 3


def test_dense_is_kept_where_it_is_faster(caplog: pytest.LogCaptureFixture) -> None:
    tuner = alone()
    with caplog.at_level(logging.INFO, "oktopk"):
        assert drive(tuner, {FLOAT32: 3.0, BFLOAT16: 2.0, DENSE: 1.0}, 10)[-1] == DENSE
    assert tuner.decisions([LAYOUT])["weight"].method == DENSE
    assert "auto: dense for weight" in caplog.text and "1000.0 ms" in caplog.text, "the log says what, and why"


def test_the_decision_is_checked_again_and_follows_the_network() -> None:
    tuner = alone()
    drive(tuner, {FLOAT32: 3.0, BFLOAT16: 2.0, DENSE: 5.0}, 9)
    later = drive(tuner, {FLOAT32: 3.0, BFLOAT16: 2.0, DENSE: 1.0}, 5 + 9 + 1)
    assert later[:5] == [BFLOAT16] * 5 and later[-1] == DENSE


def test_a_way_that_is_hardly_faster_does_not_replace_the_one_in_use() -> None:
    tuner = alone()
    drive(tuner, {FLOAT32: 3.0, BFLOAT16: 2.0, DENSE: 5.0}, 9)
    assert drive(tuner, {FLOAT32: 1.99, BFLOAT16: 2.0, DENSE: 5.0}, 15)[-1] == BFLOAT16


def test_the_first_use_of_a_way_does_not_count() -> None:
    tuner, seen = alone(), set()
    for _ in range(10):
        way = tuner.choose(LAYOUT)
        cost = {FLOAT32: 3.0, BFLOAT16: 2.0, DENSE: 5.0}[way]
        tuner.observe(LAYOUT, way, cost if way in seen else 100.0)
        seen.add(way)
    assert tuner.choose(LAYOUT) == BFLOAT16


def test_dense_steps_of_a_warm_up_count_as_its_trial() -> None:
    tuner = alone()
    for _ in range(4):
        tuner.observe(LAYOUT, DENSE, 0.5)
    ways = drive(tuner, {FLOAT32: 3.0, BFLOAT16: 2.0, DENSE: 0.5}, 7)
    assert ways == [FLOAT32] * 3 + [BFLOAT16] * 3 + [DENSE]


def fuse(tuner: Tuner, costs: dict[str, float], steps: int) -> list[str]:
    seen = []
    for _ in range(steps):
        seen.append(tuner.fusing)
        if tuner.observe_fusing(costs[tuner.fusing]):
            tuner.conclude_fusing()
    return seen


@pytest.mark.parametrize(("costs", "chosen"), [((3.0, 2.0), BY_STEP), ((2.0, 3.0), BY_BUCKET)])
def test_the_fusing_with_shorter_steps_is_kept_and_saved(
    costs: tuple[float, float], chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    tuner = alone()
    with caplog.at_level(logging.INFO, "oktopk"):
        seen = fuse(tuner, dict(zip(FUSINGS, costs, strict=True)), 8)
    assert seen == [BY_BUCKET] * 3 + [BY_STEP] * 3 + [chosen] * 2
    assert f"auto: {chosen}" in caplog.text and "2000.0 ms" in caplog.text
    other = alone()
    other.load_state_dict(tuner.state_dict())
    assert other.fusing == chosen


def test_the_fusing_is_checked_again_and_kept_unless_it_is_clearly_slower() -> None:
    tuner = alone()
    fuse(tuner, {BY_BUCKET: 3.0, BY_STEP: 2.0}, 6)
    again = fuse(tuner, {BY_BUCKET: 1.99, BY_STEP: 2.0}, 5 + 6 + 1)
    assert again[:5] == [BY_STEP] * 5 and again[-1] == BY_STEP
    assert fuse(tuner, {BY_BUCKET: 1.0, BY_STEP: 2.0}, 4 + 6 + 1)[-1] == BY_BUCKET


def test_ranks_that_measure_steps_differently_agree_on_a_fusing() -> None:
    costs = [{BY_BUCKET: 3.0, BY_STEP: 1.0}, {BY_BUCKET: 3.0, BY_STEP: 4.0}]

    def rank(transport: ThreadTransport) -> str:
        return fuse(Tuner(CONFIG, transport), costs[transport.rank], 7)[-1]

    assert run_world(2, rank) == [BY_BUCKET, BY_BUCKET]


def test_a_step_is_quiet_when_nothing_is_tried_on_its_buckets() -> None:
    tuner, costs = alone(), {FLOAT32: 3.0, BFLOAT16: 2.0, DENSE: 5.0}
    for _ in range(9):
        drive(tuner, costs, 1)
        assert not tuner.was_quiet()
    assert tuner.was_quiet(), "nothing since"
    drive(tuner, costs, 1)
    assert tuner.was_quiet()
    tuner.observe((("other", 10_000),), FLOAT32, 1.0)
    drive(tuner, costs, 1)
    assert not tuner.was_quiet(), "one of several buckets"


def test_ranks_that_measure_differently_agree_on_the_slowest() -> None:
    costs = [{FLOAT32: 3.0, BFLOAT16: 1.0, DENSE: 9.0}, {FLOAT32: 3.0, BFLOAT16: 4.0, DENSE: 9.0}]

    def rank(transport: object) -> Method:
        tuner = Tuner(CONFIG, transport)  # type: ignore[arg-type]
        return drive(tuner, costs[tuner._transport.rank], 10)[-1]

    assert run_world(2, rank) == [FLOAT32, FLOAT32]


def test_a_saved_decision_is_kept() -> None:
    tuner = alone()
    drive(tuner, {FLOAT32: 3.0, BFLOAT16: 2.0, DENSE: 5.0}, 9)
    other = alone()
    other.load_state_dict(tuner.state_dict())
    assert other.choose(LAYOUT) == BFLOAT16
    assert other.decisions([LAYOUT]) == tuner.decisions([LAYOUT]) != {}


def test_a_wire_that_changes_reads_what_any_other_wrote() -> None:
    wire = ChosenWire(("bfloat16",))
    vector = SparseVector(torch.tensor([1, 5], dtype=torch.int32), torch.tensor([1.5, -2.0]), 10)
    exact = wire.pack(vector).message
    wire.use("bfloat16")
    assert wire.values == "bfloat16"
    assert wire.pack(vector).message.numel() < exact.numel()
    assert torch.equal(wire.unpack(exact).to_dense(), vector.to_dense())


@pytest.mark.parametrize("bad", [{"wires": ()}, {"wires": ("float8",)}, {"trial_steps": 0}, {"recheck_every": 0}])
def test_settings_that_make_no_sense_are_refused(bad: dict) -> None:
    with pytest.raises(ConfigError):
        AutoConfig(**bad)


def test_the_reducer_finds_a_way_and_loses_nothing_while_it_tries() -> None:
    """sum(gradients) == world_size * sum(means) + residuals, over trials of dense and sparse ways alike."""

    def rank(transport: ThreadTransport) -> tuple[Tensor, Tensor, Tensor, list[Tensor], bool]:
        reducer = oktopk.Reducer("auto", 0.05, transport, wires=("float32", "int8"), trial_steps=1)
        noise = torch.Generator().manual_seed(transport.rank)
        given, got, means = torch.zeros(5000), torch.zeros(5000), []
        for _ in range(9):
            gradient = torch.randn(5000, generator=noise)
            mean = reducer.reduce("weight", gradient)
            given, got = given + gradient, got + mean
            means.append(mean)
        decided = "weight" in reducer.decisions
        owed = reducer.residuals()["weight"]
        reducer.close()
        return given, got, owed, means, decided

    ranks = run_world(2, rank)
    assert all(decided for *_, decided in ranks)
    for mine, other in zip(ranks[0][3], ranks[1][3], strict=True):
        assert torch.equal(mine, other), "all ranks get the same bits, whichever way is tried"
    given, owed = ranks[0][0] + ranks[1][0], ranks[0][2] + ranks[1][2]
    # Nine steps of float32 rounding on sums of order 10.
    assert torch.allclose(given, 2 * ranks[0][1] + owed, atol=1e-4)


def test_a_resumed_reducer_keeps_to_its_decision() -> None:
    def rank(transport: ThreadTransport) -> bool:
        first = oktopk.Reducer("auto", 0.05, transport, wires=("float32",), trial_steps=1)
        for _ in range(6):
            first.reduce("weight", torch.randn(5000))
        second = oktopk.Reducer("auto", 0.05, transport, wires=("float32",), trial_steps=1)
        second.load_state_dict(first.state_dict())
        return bool(first.decisions) and second.decisions == first.decisions

    assert run_world(2, rank) == [True, True]


def test_options_of_auto_belong_to_auto() -> None:
    with pytest.raises(ConfigError, match="trial_steps"):
        oktopk.Reducer("oktopk", trial_steps=2, group=ThreadWorld(1).transports()[0])
    with pytest.raises(ConfigError, match="auto"):
        oktopk.Reducer("auo", group=ThreadWorld(1).transports()[0])
