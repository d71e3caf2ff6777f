"""Ranks meet before they connect: whoever does not come is named, in time, by those who did."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from threading import Event
from time import monotonic
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

import oktopk
from oktopk.errors import CommunicationError, PeerError
from oktopk.transport import rendezvous
from oktopk.transport.bounded_store import BoundedStore
from oktopk.transport.links import DUTY
from oktopk.transport.rendezvous import Rendezvous
from worlds import frozen_store, run_processes, store_client

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.3)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(store: Any, ranks: Sequence[int], rank: int, word: str, timeout: timedelta = LONG) -> list[str]:
    with closing(BoundedStore(lambda: store_client(store.port), 60)) as own:
        return Rendezvous(own, ranks, rank).meet(word, timeout, DUTY)


def test_everyone_gets_everyones_word(store: TCPStore) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert (
            list(pool.map(lambda rank: meet(store, [0, 1, 2], rank, f"word {rank}"), range(3)))
            == [["word 0", "word 1", "word 2"]] * 3
        )


def test_those_who_did_not_come_are_named_with_what_they_should_have_done(store: TCPStore) -> None:
    with pytest.raises(PeerError, match=r"rank 0 waited 0\.3 s for ranks 1, 2: every rank .* create its reducer"):
        meet(store, [0, 1, 2], 0, "", SHORT)
    with pytest.raises(PeerError, match=r"rank 1 \(rank 7 of the world\) waited 0\.3 s for rank 0 \(rank 5 of"):
        meet(store, [5, 7], 1, "", SHORT)


def test_who_comes_too_late_is_told_at_once_and_may_try_again_with_the_others(store: TCPStore) -> None:
    with pytest.raises(PeerError, match="for rank 1"):
        meet(store, [0, 1], 0, "too early", SHORT)
    with pytest.raises(PeerError, match=r"rank 1 came too late: rank 0 gave up after 0\.3 s .*every rank"):
        meet(store, [0, 1], 1, "too late")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda rank: meet(store, [0, 1], rank, str(rank)), range(2))) == [["0", "1"]] * 2


def test_the_second_meeting_of_the_same_ranks_is_not_the_first(store: TCPStore) -> None:
    def twice(rank: int) -> list[list[str]]:
        return [meet(store, [0, 1], rank, f"{rank}, {time}") for time in ("first", "second")]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(twice, range(2))) == [[["0, first", "1, first"], ["0, second", "1, second"]]] * 2


def test_a_long_wait_is_explained_in_the_log(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "HINT_SECONDS", 0.1)
    with caplog.at_level("WARNING", logger="oktopk"), pytest.raises(PeerError):
        meet(store, [0, 1], 0, "", SHORT)
    assert "rank 0 waits for rank 1, for 0.3 s at most: every rank" in caplog.text


def test_a_wait_that_is_over_already_does_not_last_for_ever(store: TCPStore) -> None:
    started = monotonic()
    with pytest.raises(PeerError, match="for rank 1"):
        meet(store, [0, 1], 0, "", timedelta(0))
    assert monotonic() - started < 4.0


@pytest.mark.processes
def test_a_store_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 0.5)
    with frozen_store(clients=1) as ((client,), freeze):
        meeting = Rendezvous(BoundedStore(lambda: client, 60), [0, 1], 0)
        freeze()
        with pytest.raises(CommunicationError, match="lost the store"):
            meeting.meet("", SHORT, DUTY)


def test_a_question_without_an_answer_is_an_error_in_time() -> None:
    store = BoundedStore(HashStore, 5.0)
    assert store.part("there").ask(lambda it: it.add("count", 4), 5.0) == 4
    with pytest.raises(TimeoutError, match="its own"):
        store.ask(_raise, 5.0)
    with pytest.raises(CommunicationError, match=r"did not answer in 0\.1 s"):
        store.ask(lambda _: Event().wait(), 0.1)


def test_a_store_that_cannot_be_opened_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(TimeoutError, match="its own"):
        BoundedStore(lambda: _raise(None), 5.0)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5.0)
        assert not thread.is_alive()


def _raise(_: object) -> Any:
    raise TimeoutError("its own")


def _forget() -> tuple[str, float]:
    """Rank 1 trains without a reducer, the others wait for it."""
    started = monotonic()
    message = ""
    if dist.get_rank() != 1:
        with pytest.raises(PeerError) as caught:
            oktopk.Reducer(timeout=timedelta(seconds=1))
        message = str(caught.value)
    dist.barrier()
    return message, monotonic() - started


@pytest.mark.processes
def test_a_rank_that_forgot_to_register_is_named_by_the_others() -> None:
    world = run_processes(3, _forget)
    for rank in (0, 2):
        assert f"rank {rank} waited 1 s for rank 1: every rank of the group must create" in world[rank][0]
    assert world[1][0] == ""
