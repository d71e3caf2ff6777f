"""The one thread of a reducer that communicates, and how a failure on any rank becomes an error on every rank."""

from __future__ import annotations

import atexit
import logging
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from oktopk.errors import CommunicationError, OkTopkError, PeerError
from oktopk.reduction.streams import JobContext, Streams, future_on
from oktopk.transport.base import Fault, Transport

log = logging.getLogger("oktopk")

T = TypeVar("T")

LOOK_SECONDS = 1.0  # between looks whether the thread that is waited for still lives
LEAVE_SECONDS = 10.0  # at the end of a process, for the thread of a reducer that was not closed to end


class Agreed(Exception):
    """Carries an error that all ranks raise in the same step: the group is intact, and training may go on.

    If it is final, nothing more is done: a rank has ended, but all know it, and nobody waits for it.
    """

    def __init__(self, error: Exception, is_final: bool = False) -> None:
        super().__init__(str(error))
        self.error, self.is_final = error, is_final


@dataclass
class _Job:
    work: Callable[[], Any]
    future: torch.futures.Future[Any]
    context: JobContext  # in which to do it
    owner: CommunicationThread  # lives until it is done: somebody may wait for it
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None

    def settle(self) -> None:
        try:
            if self.error is not None:
                self.future.set_exception(self.error)
            else:
                self.future.set_result(self.result)
        finally:
            self.done.set()


class CommunicationThread:
    """Does one job after the other, in the order they came.

    A job that fails alone ends all that follow: this rank tells its peers why and leaves the group, so that they fail
    too instead of waiting. The original exception is raised on the rank it came from, a `PeerError` on the others.
    """

    def __init__(self, transport: Transport, where: Callable[[], tuple[int, str]]) -> None:
        self._transport, self._where = transport, where  # where: step and phase
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._streams = Streams()
        self._error: Exception | None = None
        self._is_closed = False
        # Neither the thread nor the interpreter's list of what to do at exit may keep this object alive.
        at_exit = _AtExit(weakref.ref(self), self._jobs)
        self._thread = at_exit.thread = threading.Thread(
            target=_work, args=(at_exit, self._jobs, transport), name="oktopk-communication", daemon=True
        )
        self._end_thread = weakref.finalize(self, self._jobs.put, None)
        self._end_thread.atexit = False
        atexit.register(at_exit)
        self._thread.start()

    def submit(self, work: Callable[[], T], tensors: Sequence[Tensor]) -> torch.futures.Future[T]:
        """Do it later, when `tensors` have been written; the future holds what `work` returns, or what it raised."""
        return self._put(_Job(work, future_on(tensors[0].device), self._streams.after(tensors), self)).future

    def run(self, work: Callable[[], T]) -> T:
        """Do it now, after all that was submitted before. From the thread itself: at once."""
        if threading.current_thread() is self._thread:
            return work()
        job = self._put(_Job(lambda: self._finish(work), torch.futures.Future(), self._streams.after_all(), self))
        while not job.done.wait(LOOK_SECONDS):
            # What the thread does is bounded by the timeout of the group; only its own death is not.
            if not self._thread.is_alive() and not job.done.is_set():
                raise CommunicationError("the communication thread has died, and this reducer with it.")
        if job.error is not None:
            raise job.error
        return self._streams.hand_over(cast(T, job.result))

    def _finish(self, work: Callable[[], T]) -> T:
        result = work()
        self._streams.finish()
        return result

    def read(self, work: Callable[[], T]) -> T:
        """As `run`, for work that only looks at state: also after a failure and after `close`, when nobody writes."""
        if self._is_closed:
            self._join()
        if self._error is not None or self._is_closed:
            self._streams.finish()
            return work()
        return self.run(work)

    def close(self) -> None:
        """Finish what was submitted and leave the group."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end_thread()
        self._join()
        self._transport.close()

    def _join(self) -> None:
        while self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(LOOK_SECONDS)  # each job is bounded by the timeout of the group

    def _put(self, job: _Job) -> _Job:
        if self._error is not None:
            raise self._error
        if self._is_closed or not self._thread.is_alive():
            raise OkTopkError("this reducer is closed.")
        self._jobs.put(job)
        return job

    def _do(self, job: _Job) -> None:
        """Whatever happens in a job, it is settled: somebody waits for it."""
        try:
            with job.context():
                try:
                    self._attempt(job)
                finally:
                    job.settle()  # in its context: who waits for the future waits for what the device was told in it
        except BaseException as error:  # of a device that does not even begin
            if not job.done.is_set():
                job.error = self._failed(error)
                job.settle()

    def _attempt(self, job: _Job) -> None:
        try:
            if self._error is not None:
                raise self._error
            job.result = job.work()
        except Agreed as agreed:
            job.error = agreed.error
            if agreed.is_final:
                self._error = agreed.error
        except BaseException as error:
            job.error = self._failed(error)

    def _failed(self, error: BaseException) -> Exception:
        """What to raise from now on."""
        if self._error is None:
            self._error = self._leave(error if isinstance(error, Exception) else OkTopkError(_text(error)))
        return self._error

    def _leave(self, error: Exception) -> Exception:
        """Say why, leave, and return what to raise on this rank."""
        try:
            return self._blame(error)
        except Exception:
            log.exception("leaving the group failed too; the first error is raised.")
            return error

    def _blame(self, error: Exception) -> Exception:
        step, phase = self._where()
        if not isinstance(error, CommunicationError):
            self._transport.abort(Fault(self._transport.rank, _text(error), step, phase))
            return error
        here = f"seen by rank {self._transport.rank} of {self._transport.world_size}, step {step}, phase {phase}"
        # Its frames hold operations under way, and they hold the sockets that peers wait on.
        traceback.clear_frames(error.__traceback__)
        fault = self._transport.find_fault()
        if fault is None:
            self._transport.abort(Fault(self._transport.rank, _text(error), step, phase))
            return CommunicationError(f"a collective failed although every rank is alive ({here}): {error}")
        if fault.step is None:
            fault = replace(fault, step=step, phase=phase)
        self._transport.abort(fault)
        return PeerError(f"{fault} ({here}: {error})")

    def tell_peers_at_exit(self) -> None:
        """When an exception ends this process, peers shall read which."""
        error = getattr(sys, "last_value", None)
        if error is not None and self._error is None and not self._is_closed:
            self._transport.abort(Fault(self._transport.rank, _text(error), self._where()[0], "training"))


class _AtExit:
    """What is done when the process ends and the thread has not."""

    thread: threading.Thread

    def __init__(self, owner: weakref.ref[CommunicationThread], jobs: queue.Queue[_Job | None]) -> None:
        self.owner, self._jobs = owner, jobs

    def __call__(self) -> None:
        """Tell peers, if an exception ends the process; and let the thread end first.

        It may be doing its last job, or leaving the group: an interpreter that ends under it aborts the process.
        """
        owner = self.owner()
        if owner is not None:
            owner.tell_peers_at_exit()
        self._jobs.put(None)
        self.thread.join(LEAVE_SECONDS)


def _work(at_exit: _AtExit, jobs: queue.Queue[_Job | None], transport: Transport) -> None:
    """What the thread does. Only jobs hold its owner, so that an owner nobody holds can go when they are done."""
    while (job := jobs.get()) is not None:
        job.owner._do(job)
        del job
    if at_exit.owner() is None:  # dropped without being closed
        transport.close()
    atexit.unregister(at_exit)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
