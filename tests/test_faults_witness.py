"""Who is to blame: the witness in one process, with a real store and real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

from oktopk.errors import CommunicationError, MismatchError, OkTopkError, PeerError
from oktopk.reduction.communication import Agreed, CommunicationThread
from oktopk.transport import ThreadTransport, ThreadWorld
from oktopk.transport.base import Fault
from oktopk.transport.witness import LATE, VANISHED, Witness, _own_address

GROUP: Any = SimpleNamespace(group_name="1")


@pytest.fixture
def witnesses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Witness]]:
    store = PrefixStore("default", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr("oktopk.transport.witness.REACH_SECONDS", 0.3)
    monkeypatch.setattr("oktopk.transport.witness.STORE_SECONDS", 0.5)
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda rank: Witness(GROUP, rank, 3), range(3)))
    yield made
    for witness in made:
        witness.close()


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
    witnesses[0]._holds_store = True
    with ThreadPoolExecutor(1) as pool:
        lingering = pool.submit(witnesses[0].linger, fault)
        assert not wait([lingering], timeout=0.3).done
        witnesses[2].linger(fault)
        assert wait([lingering], timeout=2.0).done


def test_a_lost_store_is_survived(witnesses: list[Witness], monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("connection reset")

    monkeypatch.setattr(witnesses[0], "_store", Lost())
    assert witnesses[0].find() is None and witnesses[0].find_late() is None
    witnesses[0].note(Fault(0, "x"))
    witnesses[2].close()
    assert witnesses[0].find() == Fault(2, VANISHED)
    monkeypatch.setattr(witnesses[0], "_is_store_lost", False)
    witnesses[0].note(Fault(0, "x"))
    assert witnesses[0]._is_store_lost


def test_a_world_of_one_blames_nobody() -> None:
    alone = Witness(GROUP, 0, 1)
    alone.note(Fault(0, "x"))
    assert alone.find() is None and alone.find_late() is None
    alone.close()


def test_without_a_network_store_the_host_name_is_the_address(tmp_path: Any) -> None:
    assert _own_address(FileStore(str(tmp_path / "store"), 1)).count(".") == 3


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

    waiting = second.submit(lambda: there.agree([1]), torch.empty(0))
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
