"""Real processes, one per rank, in a cluster; records come back while they run, and nobody outlives a failure."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import IO, Any, NoReturn

from oktopk.bench.cluster import Cluster
from oktopk.bench.signals import signals_held
from oktopk.errors import CommunicationError, PeerError
from oktopk.training.interrupts import die_with_parent

PORT = 29400  # free in a namespace that was just made
LAST_WORDS = 12  # lines of a dead rank's standard error that its epitaph quotes

Record = dict[str, Any]

# Emulated hosts are one machine: NCCL must not find a way around their network.
_NCCL = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


@dataclass(frozen=True)
class _Exit:
    rank: int
    code: int


def run_ranks(
    cluster: Cluster,
    task: str,
    arguments: Mapping[str, Any],
    timeout: float = 600.0,
    on_record: Callable[[Record], None] = lambda record: None,
) -> list[list[Record]]:
    """Run the function `task` ("module:function") on every rank; what each rank emitted, by rank.

    `on_record` sees rank 0's records as they come. If a rank dies, or time is up, all are ended and an error says who.
    """
    world_size = cluster.world_size
    records: list[list[Record]] = [[] for _ in range(world_size)]
    with tempfile.TemporaryDirectory(prefix="oktopk-bench-") as folder, _processes() as processes:
        events: queue.Queue[_Exit | tuple[int, Record]] = queue.Queue()
        port = PORT if cluster.emulated else _free_port()
        for rank in range(world_size):
            with signals_held():  # a rank that nobody knows yet could not be waited for
                processes.append(_start(cluster, rank, port, task, arguments, Path(folder), events, timeout))
        for event in _until_all_left(events, world_size, timeout):
            if isinstance(event, _Exit):
                _fail(event, cluster, Path(folder))
            rank, record = event
            records[rank].append(record)
            if rank == 0:
                on_record(record)
    return records


def _until_all_left(
    events: queue.Queue[_Exit | tuple[int, Record]], world_size: int, timeout: float
) -> Iterator[_Exit | tuple[int, Record]]:
    """Records, and exits that are failures, until every rank has left."""
    deadline, running = monotonic() + timeout, set(range(world_size))
    while running:
        try:
            event = events.get(timeout=max(0.0, deadline - monotonic()))
        except queue.Empty:
            raise CommunicationError(f"ranks {sorted(running)} did not finish within {timeout:.0f} s.") from None
        if not isinstance(event, _Exit):
            yield event
            continue
        running.discard(event.rank)
        if event.code:
            yield event


def _start(
    cluster: Cluster, rank: int, port: int, task: str, arguments: Mapping[str, Any], folder: Path,
    events: queue.Queue[_Exit | tuple[int, Record]], timeout: float,
) -> subprocess.Popen[bytes]:  # fmt: skip
    reader, writer = os.pipe()
    argv = [sys.executable, "-m", "oktopk.bench.rank", task, json.dumps(dict(arguments)), str(writer), f"{timeout:.0f}"]
    with open(folder / f"{rank}.err", "wb") as stderr:
        process = subprocess.Popen(
            cluster.command(rank, argv), env=_environment(cluster, rank, port), pass_fds=[writer],
            stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, preexec_fn=partial(die_with_parent, signal.SIGKILL),
            start_new_session=True,
        )  # fmt: skip
    os.close(writer)
    threading.Thread(target=_listen, args=(rank, process, os.fdopen(reader), events), daemon=True).start()
    return process


def _listen(
    rank: int, process: subprocess.Popen[bytes], lines: IO[str], events: queue.Queue[_Exit | tuple[int, Record]]
) -> None:
    with lines:
        for line in lines:
            events.put((rank, json.loads(line)))
    events.put(_Exit(rank, process.wait()))


def _environment(cluster: Cluster, rank: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank), "WORLD_SIZE": str(cluster.world_size), "LOCAL_RANK": str(rank % cluster.per_host),
        "MASTER_ADDR": cluster.master, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": cluster.interface,
        "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
    } | (_NCCL | {"NCCL_SOCKET_IFNAME": cluster.interface} if cluster.emulated else {})  # fmt: skip


@contextmanager
def _processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()


def _fail(exit: _Exit, cluster: Cluster, folder: Path) -> NoReturn:
    how = f"was killed by {signal.Signals(-exit.code).name}" if exit.code < 0 else f"exited with code {exit.code}"
    words = _last_words((folder / f"{exit.rank}.err").read_text(errors="replace").splitlines())
    raise PeerError(f"rank {exit.rank} on host {exit.rank // cluster.per_host} {how}.{words}")


def _last_words(lines: Sequence[str]) -> str:
    spoken = [line for line in lines if line.strip() and not line.startswith("[Gloo]")]
    return "".join(f"\n    {line}" for line in spoken[-LAST_WORDS:])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
