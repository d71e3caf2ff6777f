"""A rank that cannot go on, and numbers that all ranks hear, through the agreement of every reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oktopk import Reducer
from oktopk.errors import ConfigError, DataError, MismatchError, OkTopkError, PeerError, UnsupportedError
from oktopk.transport import ThreadTransport, run_world
from oktopk.transport.sharing import raise_any, share, share_error

pytestmark = pytest.mark.timeout(60)


def raised(work: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        work()
    return caught.value


def on_ranks(world_size: int, work: Callable[[Reducer], Any]) -> list[Any]:
    def rank(transport: ThreadTransport) -> Any:
        with Reducer(density=0.5, group=transport, min_numel=0) as reducer:
            return work(reducer)

    return run_world(world_size, rank)


@pytest.mark.parametrize("buckets_before", [0, 1, 3])
def test_a_rank_that_refuses_ends_all_of_them_wherever_they_are_in_the_step(buckets_before: int) -> None:
    def work(reducer: Reducer) -> tuple[BaseException, BaseException]:
        is_bad = reducer.rank == 1
        futures = [reducer.submit([(f"p{i}", 8)], torch.ones(8)) for i in range(buckets_before if is_bad else 5)]
        if is_bad:
            error = raised(lambda: reducer.refuse(DataError("sample 17 is a stone.")))
        else:
            error = raised(lambda: [future.wait() for future in futures])
        return error, raised(lambda: reducer.reduce("after", torch.ones(8)))

    outcomes = on_ranks(3, work)
    assert [type(error) for error, _ in outcomes] == [PeerError, DataError, PeerError]
    assert [str(error) for error, _ in outcomes] == [
        "rank 1: sample 17 is a stone.",
        "sample 17 is a stone.",
        "rank 1: sample 17 is a stone.",
    ]
    assert all(after is error for error, after in outcomes), "nothing is reduced afterwards, and nobody waits"


def test_ranks_that_refuse_together_raise_what_each_of_them_knows() -> None:
    def work(reducer: Reducer) -> BaseException:
        if reducer.rank < 2:
            return raised(lambda: reducer.refuse(ValueError(f"mine is {reducer.rank}")))
        return raised(lambda: reducer.reduce("p", torch.ones(8)))

    zero, one, two = on_ranks(3, work)
    assert (str(zero), str(one)) == ("mine is 0", "mine is 1")
    assert isinstance(two, PeerError) and str(two) == "rank 0: ValueError: mine is 0"


def test_a_rank_that_heard_of_another_raises_its_own_error_when_it_refuses_too() -> None:
    def work(reducer: Reducer) -> BaseException:
        if reducer.rank == 0:
            return raised(lambda: reducer.refuse(ValueError("first")))
        raised(lambda: reducer.reduce("p", torch.ones(8)))
        return raised(lambda: reducer.refuse(ValueError("second")))

    assert [str(error) for error in on_ranks(2, work)] == ["first", "second"]


def test_what_is_owed_can_still_be_read_after_a_refusal() -> None:
    def work(reducer: Reducer) -> list[float]:
        reducer.reduce("p", torch.arange(4.0))
        owed = reducer.residuals()["p"].tolist()
        raised(lambda: reducer.refuse(ValueError("no")) if reducer.rank else reducer.reduce("p", torch.ones(4)))
        assert reducer.residuals()["p"].tolist() == owed
        return owed

    assert all(sum(owed) > 0 for owed in on_ranks(2, work))


def test_a_gradient_that_one_rank_cannot_reduce_is_explained_on_all_and_training_goes_on() -> None:
    def work(reducer: Reducer) -> tuple[BaseException, float]:
        bad = torch.ones(8, dtype=torch.int32 if reducer.rank == 0 else torch.float32)
        error = raised(lambda: reducer.reduce("p", bad))
        return error, float(reducer.reduce("q", torch.ones(8)).sum())

    (zero, sum_0), (one, sum_1) = on_ranks(2, work)
    assert isinstance(zero, UnsupportedError) and isinstance(one, MismatchError)
    assert "rank 0: cannot reduce 'p' of dtype torch.int32" in str(one)
    assert sum_0 == sum_1 > 0


def test_the_greatest_number_told_is_known_to_all_after_the_step_and_stays_known() -> None:
    def work(reducer: Reducer) -> list[int]:
        seen = []
        for step in range(3):
            if step == 1:
                reducer.notify([15, 0, 10][reducer.rank])
            reducer.reduce("p", torch.ones(8))
            seen.append(reducer.notified)
            reducer.notify(0)
        return seen

    assert on_ranks(3, work) == [[0, 15, 15]] * 3


@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_number_that_cannot_travel_is_refused(number: int) -> None:
    with Reducer() as reducer, pytest.raises(ConfigError, match="0 to 2"):
        reducer.notify(number)


def test_values_and_errors_are_shared_by_rank() -> None:
    def work(transport: ThreadTransport) -> tuple[list[Any], list[str | None]]:
        error = [None, ValueError("odd"), OkTopkError("ours")][transport.rank]
        return share({"rank": transport.rank}, transport), share_error(error, transport)

    for values, texts in run_world(3, work):
        assert values == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert texts == [None, "ValueError: odd", "ours"]
    assert str(raised(lambda: raise_any(None, [None, "odd"], ConfigError))) == "rank 1: odd"
    raise_any(None, [None, None])
