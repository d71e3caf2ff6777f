"""Who is to blame: the witness in one process, with a real store and real sockets."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from oktopk.errors import CommunicationError, MismatchError, OkTopkError, PeerError
from oktopk.reduction.communication import Agreed, CommunicationThread
from oktopk.transport import ThreadTransport, ThreadWorld, witness
from oktopk.transport.addresses import Answer, call_all, listen, watch_all
from oktopk.transport.base import Fault
from oktopk.transport.bounded_store import BoundedStore
from oktopk.transport.witness import HOLDS_SILENT_STORE, LATE, SILENT, VANISHED, Witness
from worlds import frozen_store, store_client

PROMISE = 5.0  # seconds from the failure of a collective to the error, as docs/resuming-and-faults.md says


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("CALL", 0.3), ("STORE", 2.0), ("REPORT", 0.6), ("LINGER", 2.0)):
        monkeypatch.setattr(witness, f"{name}_SECONDS", seconds)


def open_witnesses(world_size: int, stores: list[TCPStore] | None = None) -> list[Witness]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = stores or [store_client(store.port) for _ in range(world_size)]

    def open_one(rank: int) -> Witness:
        store = BoundedStore(lambda: stores[rank], 60)
        return Witness(store, range(world_size), rank, timedelta(seconds=60), store_holder=0)

    with ThreadPoolExecutor(world_size) as pool:
        made = list(pool.map(open_one, range(world_size)))
    made[0].server = store  # type: ignore[attr-defined] # it ends with its last reference
    return made


@pytest.fixture
def witnesses() -> Iterator[list[Witness]]:
    made = open_witnesses(3)
    yield made
    for each in made:
        each.close()


def test_the_first_note_is_what_everyone_reads(witnesses: list[Witness]) -> None:
    fault = Fault(1, "KeyError: 'x'", 7, "pack")
    witnesses[1].note(fault)
    witnesses[2].note(Fault(2, "a consequence", 7, "exchange"))
    assert all(witness.find() == fault for witness in witnesses)


def test_a_rank_whose_port_is_closed_has_vanished(witnesses: list[Witness]) -> None:
    witnesses[2].close()
    assert witnesses[0].find() == Fault(2, VANISHED)


def test_a_rank_that_dies_while_we_look_is_found_too(witnesses: list[Witness]) -> None:
    threading.Timer(0.1, witnesses[1].close).start()
    assert witnesses[0].find() == Fault(1, VANISHED)


def test_a_note_explains_a_rank_that_left_because_of_another(witnesses: list[Witness]) -> None:
    """Rank 1 saw rank 2 vanish, noted it and exited; rank 0 looks afterwards and must not blame rank 1."""
    witnesses[1].note(Fault(2, VANISHED, 5, "exchange"))
    witnesses[1].close()
    witnesses[2].close()
    assert witnesses[0].find() == Fault(2, VANISHED, 5, "exchange")


def test_when_all_live_the_one_that_reports_nothing_is_late(witnesses: list[Witness]) -> None:
    with ThreadPoolExecutor(2) as pool:
        faults = list(pool.map(lambda witness: witness.find() or witness.find_late(), [witnesses[0], witnesses[2]]))
    assert faults == [Fault(1, LATE)] * 2


def test_when_all_live_and_all_report_nobody_is_to_blame(witnesses: list[Witness]) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda witness: witness.find() or witness.find_late(), witnesses)) == [None] * 3


def test_the_rank_that_holds_the_store_waits_until_the_others_have_left(witnesses: list[Witness]) -> None:
    fault = Fault(1, VANISHED, 5, "exchange")
    with ThreadPoolExecutor(1) as pool:
        lingering = pool.submit(witnesses[0].linger, fault)
        assert not wait([lingering], timeout=0.3).done
        witnesses[2].linger(fault)
        assert wait([lingering], timeout=2.0).done


def test_a_rank_that_is_slow_to_ask_still_reads_who_died_first(
    witnesses: list[Witness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder of the store gives what it did not need of the time to others, before it goes with the store."""
    monkeypatch.setattr(witness, "LINGER_SECONDS", 0.2)
    monkeypatch.setattr(witness, "REPORT_SECONDS", 3.0)
    witnesses[1].close()
    fault = witnesses[0].find()
    assert fault == Fault(1, VANISHED)
    witnesses[0].note(fault)
    with ThreadPoolExecutor(1) as pool:
        lingering = pool.submit(witnesses[0].linger, fault)
        assert not wait([lingering], timeout=0.6).done, "longer than LINGER_SECONDS"
        assert witnesses[2].find() == fault
        witnesses[2].linger(fault)
        assert wait([lingering], timeout=2.0).done


def test_who_left_with_the_store_has_said_who_died(witnesses: list[Witness]) -> None:
    """To a rank that looks long after, the dead and who left because of it are both gone, and so is the store."""
    witnesses[1].close()
    fault = witnesses[0].find()
    assert fault == Fault(1, VANISHED)
    witnesses[0].note(fault)
    witnesses[0].close()
    witnesses[2]._is_store_lost = True
    assert witnesses[2].find() == fault


@pytest.mark.parametrize("word", [b"", b"hello", b"[1, 2]", b'{"rank": 77, "error": "x"}', b'{"rank": [], "error": 0}'])
def test_words_of_strangers_are_no_notes(witnesses: list[Witness], word: bytes) -> None:
    with socket.create_connection(witnesses[2]._listener.getsockname()) as stranger:
        stranger.sendall(word)
    witnesses[1].close()
    witnesses[2]._is_store_lost = True
    assert witnesses[2].find() == Fault(1, VANISHED)


def test_a_lost_store_is_survived(witnesses: list[Witness], monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("connection reset")

    monkeypatch.setattr(witnesses[0].store, "inner", Lost())
    assert witnesses[0].find() is None and witnesses[0].find_late() is None
    witnesses[0].note(Fault(0, "x"))
    witnesses[2].close()
    assert witnesses[0].find() == Fault(2, VANISHED)


def test_the_last_note_is_written_while_the_interpreter_exits(
    witnesses: list[Witness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 starts no thread then, and an exception that ends the process is noted then."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    witnesses[1].note(Fault(1, "ValueError: a bug"))
    assert witnesses[0].find() == Fault(1, "ValueError: a bug")


@pytest.mark.processes
def test_a_store_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped: torch's own calls would wait for ever. The rank that holds it is to blame."""
    monkeypatch.setattr(witness, "STORE_SECONDS", 0.5)
    with frozen_store(clients=3) as (stores, freeze):
        ranks = open_witnesses(3, stores)
        freeze()
        started = monotonic()
        assert ranks[1].find() is None
        assert ranks[1].find_late() == Fault(0, HOLDS_SILENT_STORE)
        ranks[1].note(Fault(0, HOLDS_SILENT_STORE))
        ranks[1].linger(Fault(0, HOLDS_SILENT_STORE))
        assert monotonic() - started < PROMISE
    for rank in ranks:
        rank.close()


def silent_port(ports: ExitStack) -> tuple[str, int]:
    """A port whose queue is full: calls to it are neither accepted nor refused."""
    listener = ports.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(4):
        call = ports.enter_context(socket.socket())
        call.setblocking(False)
        call.connect_ex(listener.getsockname())
    return str(listener.getsockname()[0]), int(listener.getsockname()[1])


def closed_port() -> tuple[str, int]:
    with listen("127.0.0.1", 1) as listener:
        address: tuple[str, int] = listener.getsockname()
    return address


def test_a_call_is_accepted_refused_or_not_answered() -> None:
    with ExitStack() as ports:
        alive = ports.enter_context(listen("127.0.0.1", 8)).getsockname()
        six = ports.enter_context(listen("::1", 8)).getsockname()[:2] if _has_ipv6() else alive
        addresses = {1: alive, 2: silent_port(ports), 3: closed_port(), 4: six}
        expected = {1: Answer.ALIVE, 2: Answer.UNKNOWN, 3: Answer.DEAD, 4: Answer.ALIVE}
        assert call_all(addresses, 0.3) == expected
        assert watch_all(addresses, 5.0)[3] is Answer.DEAD


def _has_ipv6() -> bool:
    try:
        listen("::1", 1).close()
    except OSError:
        return False
    return True


def test_without_a_file_descriptor_left_the_rest_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    class Scarce(socket.socket):
        def __init__(self, *args: Any) -> None:
            if made:
                raise OSError(errno.EMFILE, "too many open files")
            super().__init__(*args)
            made.append(self)

    with listen("127.0.0.1", 8) as alive:
        monkeypatch.setattr("socket.socket", Scarce)
        answers = call_all(dict.fromkeys(range(3), alive.getsockname()), 0.3)
    assert answers == {0: Answer.ALIVE, 1: Answer.UNKNOWN, 2: Answer.UNKNOWN}


def test_a_timeout_is_no_death(witnesses: list[Witness]) -> None:
    with ExitStack() as ports:
        witnesses[0]._reachable[1] = silent_port(ports)
        assert witnesses[0].find() is None, "unknown"
        witnesses[2].find_late()
        assert witnesses[0].find_late() == Fault(1, SILENT)


def test_a_rank_that_could_never_be_reached_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts that call themselves 127.0.1.1 in a world without Gloo: a call to the other ends at home, refused."""
    monkeypatch.setattr(witness, "call_all", lambda addresses, _: dict.fromkeys(addresses, Answer.DEAD))
    ranks = open_witnesses(2)
    ranks[1].close()
    assert ranks[0].find() is None
    assert ranks[0].find_late() == Fault(1, SILENT)
    ranks[0].close()


def test_sixty_four_ranks_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "LINGER_SECONDS", 0.3)
    ranks = open_witnesses(64)
    with ExitStack() as ports:
        for rank in ranks:
            ports.callback(rank.close)
        for peer in range(10, 40):
            ranks[0]._reachable[peer] = silent_port(ports)
        started = monotonic()
        assert ranks[0].find() is None
        assert ranks[0].find_late() == Fault(10, SILENT)
        ranks[0].linger(Fault(10, SILENT))
        assert monotonic() - started < PROMISE, "one after the other, thirty silent ranks take 30 x 0.3 s"
        ranks[50].close()
        assert ranks[0].find() == Fault(50, VANISHED)


def test_the_waits_after_a_failure_keep_the_promise(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("monkeypatch").undo()
    waits = witness.CALL_SECONDS + witness.REPORT_SECONDS + witness.LINGER_SECONDS
    assert waits <= PROMISE - 0.5, "half a second to compute"
    assert witness.REPORT_SECONDS > witness.CALL_SECONDS, "those who report have asked first"
    assert witness.STORE_SECONDS + witness.CALL_SECONDS + witness.REPORT_SECONDS <= PROMISE - 0.5


def test_a_fault_travels_as_json_and_reads_as_a_sentence() -> None:
    fault = Fault(1, "ValueError: no", 3, "training")
    assert Fault(**json.loads(json.dumps(vars(fault)))) == fault
    assert str(fault) == "rank 1 failed at step 3, phase training: ValueError: no"


def threads_of(world_size: int) -> list[tuple[ThreadTransport, CommunicationThread]]:
    transports = ThreadWorld(world_size, timeout=5.0).transports()
    return [(t, CommunicationThread(t, lambda: (4, "sum"))) for t in transports]


def test_the_original_is_raised_at_home_and_a_peer_error_elsewhere() -> None:
    (here, first), (there, second) = threads_of(2)

    def fail() -> None:
        raise KeyError("lost")

    waiting = second.submit(lambda: there.agree([1]), [torch.empty(0)])
    with pytest.raises(KeyError, match="lost"):
        first.run(fail)
    with pytest.raises(PeerError, match=r"rank 0 failed at step 4, phase sum: KeyError: 'lost' \(seen by rank 1 of 2"):
        waiting.wait()
    with pytest.raises(KeyError):
        first.run(lambda: here.agree([1]))
    first.close()
    second.close()


def test_an_agreed_error_leaves_the_thread_at_work() -> None:
    ((_, thread),) = threads_of(1)

    def differ() -> None:
        raise Agreed(MismatchError("they differ"))

    with pytest.raises(MismatchError, match="they differ"):
        thread.run(differ)
    assert thread.run(lambda: 5) == 5
    thread.close()
    with pytest.raises(OkTopkError, match="closed"):
        thread.run(lambda: 5)


def test_a_broken_collective_without_a_culprit_says_so() -> None:
    ((_, thread),) = threads_of(1)

    def break_down() -> None:
        raise CommunicationError("timed out")

    with pytest.raises(CommunicationError, match=r"is alive .seen by rank 0 of 1, step 4, phase sum.: timed"):
        thread.run(break_down)
    thread.close()


def test_an_exception_that_ends_the_process_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    (here, first), (there, second) = threads_of(2)
    monkeypatch.setattr("sys.last_value", ValueError("a bug"), raising=False)
    first.tell_peers_at_exit()
    assert there.find_fault() == Fault(0, "ValueError: a bug", 4, "training")
    assert here.find_fault() == there.find_fault()
    first.close()
    second.close()
