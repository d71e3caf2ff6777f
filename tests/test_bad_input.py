"""Bad input ends in a clear error on every rank, before data moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oktopk
from oktopk import Reducer
from oktopk.errors import CheckpointError, ConfigError, MismatchError, OkTopkError, UnsupportedError
from oktopk.transport import run_world


def _alone(**options: Any) -> Reducer:
    return Reducer(**options)


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, 2, True, "0.1", {0: 0.1, 5: 3.0}])
def test_a_density_outside_0_1_is_refused(density: Any) -> None:
    with pytest.raises(ConfigError, match=r"density must be in \(0, 1\], got .*fraction of the gradient"):
        _alone(density=density)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'oktopk'"):
        _alone(algorithm="oktop")
    with pytest.raises(ConfigError, match="Did you mean 'reestimate_every'"):
        _alone(reestimate_evry=3)
    with pytest.raises(ConfigError, match="Did you mean 'bfloat16'"):
        _alone(wire="bfloat")
    with pytest.raises(ConfigError, match="Known: auto, dense"):
        _alone(algorithm="zzz")


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_steps": -1}, {"min_numel": -5}, {"on_nonfinite": "ignore"}, {"density": {3: 0.1}},
        {"threshold": "stale"}, {"reestimate_every": 0}, {"in_flight": 0}, {"cap": 1.0}, {"balance_factor": 0.5},
        {"algorithm": "topka", "threshold": "fresh"},
        {"in_turn": 1.0}, {"in_turn": -0.1},
        {"algorithm": "randomk", "order": "alphabet"}, {"algorithm": "randomk", "block": 0},
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        _alone(**options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_other_dtypes_are_refused_with_what_to_do(dtype: torch.dtype) -> None:
    with _alone() as reducer, pytest.raises(UnsupportedError, match="all_reduce for integers"):
        reducer.reduce("w", torch.ones(2000, dtype=dtype))


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with _alone() as reducer, pytest.raises(Exception, match="names 5 entries"):
        reducer.submit([("a", 5)], torch.ones(6)).wait()


def _differing(settings: list[dict[str, Any]], calls: list[tuple[str, torch.Tensor]]) -> list[str]:
    def work(transport: Any) -> str:
        with Reducer(group=transport, **settings[transport.rank]) as reducer:
            try:
                reducer.reduce(*calls[transport.rank])
            except MismatchError as error:
                return str(error)
        return "no error"

    return run_world(2, work, timeout=20)


ONES = torch.ones(2000)


@pytest.mark.parametrize(
    ("settings", "calls", "said"),
    [
        ([{}, {}], [("a", ONES), ("b", ONES)], "names"),
        ([{}, {}], [("a", ONES), ("a", torch.ones(2001))], "shapes"),
        ([{}, {}], [("a", ONES), ("a", ONES.double())], "dtype"),
        ([{}, {"density": 0.5}], [("a", ONES), ("a", ONES)], "density"),
        ([{}, {"algorithm": "topka"}], [("a", ONES), ("a", ONES)], "configuration"),
        ([{}, {"wire": "int8"}], [("a", ONES), ("a", ONES)], "configuration"),
        ([{}, {"cap": 3.0}], [("a", ONES), ("a", ONES)], "configuration"),
    ],
)
def test_ranks_that_differ_are_told_in_what(settings: Any, calls: Any, said: str) -> None:
    for message in _differing(settings, calls):
        assert "rank 1" in message and said in message and "here:" in message


def test_one_rank_with_a_refused_tensor_ends_the_step_on_all() -> None:
    def work(transport: Any) -> str:
        with Reducer(group=transport) as reducer:
            grad = ONES if transport.rank else ONES.long()
            try:
                reducer.reduce("a", grad)
            except OkTopkError as error:
                return type(error).__name__
        return "no error"

    assert run_world(2, work, timeout=20) == ["UnsupportedError", "MismatchError"]


def test_a_state_of_something_else_is_refused() -> None:
    with _alone() as reducer, _alone(algorithm="topka") as other:
        with pytest.raises(CheckpointError, match=r"algorithm 'topka'.*'oktopk'"):
            reducer.load_state_dict(other.state_dict())
        with pytest.raises(CheckpointError, match="rank"):
            reducer.load_state_dict({**reducer.state_dict(), "rank": 3})


def test_a_closed_reducer_says_so() -> None:
    reducer = _alone()
    reducer.close()
    reducer.close()
    with pytest.raises(OkTopkError, match="closed"):
        reducer.reduce("w", ONES)


def test_last_step_before_the_first_is_an_error() -> None:
    with _alone() as reducer, pytest.raises(OkTopkError, match="nothing has been reduced"):
        _ = reducer.last_step


def test_every_error_is_an_oktopk_error() -> None:
    import oktopk.errors as errors

    for name, thing in vars(errors).items():
        if isinstance(thing, type) and thing.__module__ == errors.__name__:
            assert issubclass(thing, oktopk.OkTopkError), name
