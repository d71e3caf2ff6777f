"""Every failure path of a reducer ends: jobs are settled, sinks may fail, overflow is everyone's, reads wait."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk.errors import NonFiniteError
from oktopk.metrics import StepRecord
from oktopk.reduction.communication import CommunicationThread
from oktopk.transport import ThreadTransport, ThreadWorld, run_world
from oktopk.transport.base import Fault

HUGE = 3e38


class _CannotLeave(ThreadTransport):
    """A transport whose `abort` fails, as that of a group whose store is gone may."""

    def abort(self, fault: Fault) -> None:
        raise RuntimeError("the store is gone")


def _raise(error: BaseException) -> Callable[[], Any]:
    def work() -> None:
        raise error

    return work


@pytest.mark.timeout(20)
@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(3)])
def test_a_job_is_settled_although_leaving_the_group_fails(error: BaseException) -> None:
    transport = ThreadWorld(1).transports()[0]
    transport.__class__ = _CannotLeave
    thread = CommunicationThread(transport, lambda: (0, "pack"))
    future = thread.submit(_raise(error), torch.zeros(1))
    with pytest.raises(Exception, match=r"a bug|SystemExit"):
        future.wait()
    with pytest.raises(Exception, match=r"a bug|SystemExit"):
        thread.run(lambda: None)
    thread.close()


def test_a_sink_that_fails_is_dropped_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def sink(record: StepRecord) -> None:
        seen.append(record.step)
        if record.step == 1:
            raise OSError(28, "No space left on device")

    with oktopk.Reducer(density=0.5, min_numel=0, metrics=sink) as reducer:
        for _ in range(4):
            assert reducer.reduce("a", torch.ones(8)).any()
    assert seen == [0, 1]
    assert caplog.text.count("goes on without it") == 1


def _overflow(transport: ThreadTransport, on_nonfinite: str, scattered: bool) -> tuple[Any, Tensor, Tensor]:
    """Rank 1 is owed so much that one more such gradient does not fit into float32; that of rank 0 does."""
    options: Any = {"density": 0.25, "min_numel": 0, "on_nonfinite": on_nonfinite, "group": transport}
    with oktopk.Reducer(**options) as reducer:
        owed = {"a": torch.full((4,), HUGE if transport.rank == 1 else 1.0), "b": torch.ones(4)}
        reducer._pipeline.feedback.load_state_dict(owed)
        grads = [torch.full((4,), HUGE if transport.rank == 1 else 1.0), torch.ones(4)]
        bucket = grads if scattered else torch.cat(grads)
        try:
            result: Any = reducer.submit([("a", 4), ("b", 4)], bucket).wait()
        except NonFiniteError as error:
            result = str(error)
        return result, reducer.residuals()["a"], owed["a"]


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_overflow_together_with_what_is_owed_is_agreed_on_as_a_bad_gradient(on_nonfinite: str, scattered: bool) -> None:
    for result, residual, owed in run_world(2, lambda t: _overflow(t, on_nonfinite, scattered)):
        if on_nonfinite == "raise":
            assert "rank 1" in result and "overflows" in result
        else:
            assert result.isnan().all()
        assert torch.equal(residual, owed), "residuals are untouched"


def test_large_gradients_that_do_not_overflow_are_reduced() -> None:
    with oktopk.Reducer(density=1.0, min_numel=0) as reducer:
        reducer._pipeline.feedback.load_state_dict({"a": torch.full((4,), -HUGE)})
        assert torch.equal(reducer.reduce("a", torch.full((4,), HUGE)), torch.zeros(4))


def test_residuals_sit_out_and_come_back_although_the_reduction_fails() -> None:
    with oktopk.Reducer(density=0.5, min_numel=0) as reducer:
        feedback, layout = reducer._pipeline.feedback, (("a", 4), ("b", 4))
        reducer.submit(layout, torch.arange(1.0, 9.0)).wait()
        before = feedback.state_dict()["a"]
        assert before.any()
        with pytest.raises(KeyError), feedback.withheld(layout, {"a"}):
            raise KeyError("in the reduction")
        assert torch.equal(feedback.state_dict()["a"], before)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("read", ["residuals", "state_dict"])
def test_reads_wait_until_what_was_submitted_is_done(read: str) -> None:
    """A state taken while the communication thread writes would be half of one step and half of another."""
    under_way, go_on = threading.Event(), threading.Event()
    with oktopk.Reducer(density=0.5, min_numel=0) as reducer:
        compensate = reducer._pipeline.feedback.compensate

        def slow(*args: Any) -> Tensor:
            acc = compensate(*args)
            under_way.set()
            go_on.wait(10)
            return acc

        reducer._pipeline.feedback.compensate = slow  # type: ignore[method-assign]
        future = reducer.submit([("a", 4)], torch.tensor([4.0, 3.0, 2.0, 1.0]))
        under_way.wait(10)
        threading.Timer(0.2, go_on.set).start()
        state = getattr(reducer, read)()
        future.wait()
        residual = state["a"] if read == "residuals" else state["residuals"]["a"]
        assert torch.equal(residual, torch.tensor([0.0, 0.0, 2.0, 1.0])), "what was sent has left it"


def test_state_can_be_read_after_close() -> None:
    reducer = oktopk.Reducer(density=0.5, min_numel=0)
    reducer.reduce("a", torch.tensor([2.0, 1.0]))
    reducer.close()
    assert torch.equal(reducer.residuals()["a"], torch.tensor([0.0, 1.0]))


@pytest.mark.timeout(20)
def test_a_reducer_that_nobody_holds_goes_and_its_thread_ends() -> None:
    reducer = oktopk.Reducer(density=0.5, min_numel=0)
    reducer.reduce("a", torch.ones(4))
    known, thread = weakref.ref(reducer), reducer._thread._thread
    del reducer
    gc.collect()
    assert known() is None
    thread.join(10)
    assert not thread.is_alive()


_DROPS_ITS_REDUCER = """
import torch, oktopk

def submit():
    reducer = oktopk.Reducer(min_numel=0)
    return [reducer.submit([(f"layer {i}", 100_000)], torch.ones(100_000)) for i in range(20)]

for future in submit():
    future.wait()
print("all done")
"""


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_what_was_submitted_is_done_although_its_reducer_was_dropped_and_the_process_ends_well() -> None:
    ended = subprocess.run([sys.executable, "-c", _DROPS_ITS_REDUCER], capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr
    assert "all done" in ended.stdout


def test_who_reads_while_another_thread_closes_waits_until_nobody_writes() -> None:
    writing, may_end, written = threading.Event(), threading.Event(), []

    def write() -> None:
        writing.set()
        may_end.wait(10)
        written.append("done")

    thread = CommunicationThread(ThreadWorld(1).transports()[0], lambda: (0, "pack"))
    thread.submit(write, torch.zeros(1))
    assert writing.wait(10)
    closing = threading.Thread(target=thread.close)
    closing.start()
    while not thread._is_closed:
        closing.join(0.01)
    threading.Timer(0.1, may_end.set).start()
    assert thread.read(lambda: list(written)) == ["done"]
    closing.join(10)
