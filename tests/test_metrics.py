"""Records, and the clock that times them."""

from __future__ import annotations

import json

import pytest
import torch

from oktopk import Reducer
from oktopk.metrics import Clock, StepRecord, merge, timed


def _record() -> StepRecord:
    with Reducer(density=0.1) as reducer:
        reducer.reduce("a", torch.randn(3000))
        return reducer.last_step


def test_a_record_survives_json() -> None:
    record = _record()
    assert StepRecord.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False))) == record
    assert merge([record]) == record


def test_an_empty_gradient_has_no_nan() -> None:
    with Reducer(density=0.1) as reducer:
        reducer.reduce("a", torch.randn(0))
        json.dumps(reducer.last_step.to_json(), allow_nan=False)
        assert (reducer.last_step.sparsity, reducer.last_step.compression_ratio) == (0.0, 1.0)


def test_a_phase_inside_another_pauses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 3.0, 6.0])
    monkeypatch.setattr("oktopk.metrics.perf_counter", lambda: next(ticks))
    clock = Clock()
    assert clock.current == "idle"
    with clock.phase("select"), clock.phase("pack"):
        assert clock.current == "pack"
    assert clock.seconds["select"] == 1.0 + 3.0 and clock.seconds["pack"] == 2.0
    assert clock.last == "pack"


def test_timed_objects_behave_as_before() -> None:
    clock = Clock()
    words = timed(["a"], clock, {"append": "pack"})
    words.append("b")
    assert words.count("b") == 1 and clock.seconds["pack"] > 0
