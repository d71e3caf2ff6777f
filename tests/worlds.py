"""Worlds of ranks for tests: real processes over Gloo. (Worlds of threads are `oktopk.transport.run_world`.)

Ranks are forked from a server that has torch imported already: a rank then starts in milliseconds, not seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
Before = Callable[[], None]

_ports = itertools.count(os.getpid())

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["preload"])


def _start_server() -> None:
    """The server looks for what it is to preload on its own path, and is silent when that is not there."""
    sys.audit("tests.fork")  # tests that come here are marked: conftest.py
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        ensure_running()


def free_port() -> int:
    """One that nobody else takes before it is used: no system hands these out by itself, and no other worker does."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 20_000 + 1_000 * (worker % 10) + next(_ports) % 1_000
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run_processes(
    world_size: int, work: Callable[..., Any], *args: Any, timeout: float = 60.0, before: Before | None = None
) -> list[Any]:
    """Run `work(*args)` in `world_size` real processes that share a Gloo world; results by rank.

    `work` must be importable from a test module. The first failing rank's traceback becomes the error. Each process
    calls `before()` before it joins the world.
    """
    outcomes = start(world_size, work, *args, timeout=timeout, before=before)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        raise AssertionError("\n".join(f"rank {o.rank} (exit {o.code}):\n{o.output[-4000:]}" for o in failed))
    return [pickle.loads(outcome.payload) for outcome in outcomes]


class Outcome:
    """How one process ended."""

    def __init__(self, rank: int, code: int | None, output: str, payload: bytes) -> None:
        self.rank, self.code, self.output, self.payload = rank, code, output, payload

    @property
    def ok(self) -> bool:
        return self.code == 0 and bool(self.payload)


def start(
    world_size: int, work: Callable[..., Any], *args: Any, timeout: float = 60.0, before: Before | None = None
) -> list[Outcome]:
    """As `run_processes`, but failures are returned, not raised. Every process is gone when this returns."""
    call = pickle.dumps((work, args, before))
    return _fork(_environments(world_size), _join_and_work, timeout, call, timeout=timeout + 20)


def run_script(world_size: int, script: Path, *words: str, folder: Path, timeout: float = 60.0) -> list[Outcome]:
    """`python script *words` in a folder, by as many ranks as torchrun would start, with the variables it would set."""
    return _fork(_environments(world_size), _run_program, folder, [str(script), *words], timeout=timeout)


def run_program(words: list[str], folder: Path, environment: dict[str, str], timeout: float = 60.0) -> Outcome:
    """`python *words` in a folder: a script, or `-m` and a module, with its arguments."""
    return _fork([environment], _run_program, folder, words, timeout=timeout)[0]


def _fork(environments: list[dict[str, str]], run: Callable[..., None], *args: Any, timeout: float) -> list[Outcome]:
    _start_server()
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(rank)) for rank in range(len(environments))]
        processes = [
            _server.Process(target=_child, args=(environment, place, run, *args))
            for environment, place in zip(environments, places, strict=True)
        ]
        for process in processes:
            process.start()
        _join(processes, timeout)
        return [_outcome(rank, process.exitcode, places[rank]) for rank, process in enumerate(processes)]


def _join(processes: list[Any], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()


def _environments(world_size: int) -> list[dict[str, str]]:
    """What torchrun would set for every rank."""
    world = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
    ranks = [world | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(world_size)]
    return [os.environ | {name: str(value) for name, value in rank.items()} for rank in ranks]


def _outcome(rank: int, code: int | None, place: Path) -> Outcome:
    output, result = (path.read_bytes() if path.exists() else b"" for path in (_output_of(place), _result_of(place)))
    return Outcome(rank, code, output.decode(errors="replace"), result)


def _output_of(place: Path) -> Path:
    return place.with_suffix(".output")


def _result_of(place: Path) -> Path:
    return place.with_suffix(".result")


def _child(environment: dict[str, str], place: Path, run: Callable[..., None], *args: Any) -> None:
    os.environ.clear()
    os.environ |= environment
    _redirect_output(_output_of(place))
    assert "preload" in sys.modules, "every rank would import torch by itself, which takes longer than most tests"
    run(place, *args)


def _join_and_work(place: Path, timeout: float, call: bytes) -> None:
    import torch.distributed as dist

    work, args, before = pickle.loads(call)
    if before is not None:
        before()
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    try:
        result = work(*args)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    _result_of(place).write_bytes(pickle.dumps(result))
    if dist.is_initialized():  # the work may have left already
        dist.destroy_process_group()


def _run_program(_: Path, folder: Path, words: list[str]) -> None:
    os.chdir(folder)
    sys.path.insert(0, os.path.dirname(words[0]))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _redirect_output(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)


def store_client(port: int) -> Any:
    """A connection of its own to the TCPStore of a port here; not every torch that is supported can clone one."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


@contextlib.contextmanager
def frozen_store(clients: int) -> Iterator[tuple[list[Any], Callable[[], None]]]:
    """Connections to a TCPStore in a process of its own, and a function that stops this process (SIGSTOP)."""
    here, there = _server.Pipe()
    process = _server.Process(target=_serve_store, args=(there,))
    _start_server()
    process.start()
    try:
        assert process.pid is not None and here.poll(60)
        port, pid = here.recv(), process.pid
        stores = [store_client(port) for _ in range(clients)]
        yield stores, lambda: os.kill(pid, signal.SIGSTOP)
    finally:
        process.kill()
        process.join()


def _serve_store(pipe: Any) -> None:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()
