"""One command as every rank of an emulated cluster, as a launcher on each of its hosts would start it."""

from __future__ import annotations

import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from oktopk.bench.cluster import Cluster
from oktopk.bench.signals import signals_held
from oktopk.training.turns import turn_variables
from oktopk.training.workers import PARENT_VARIABLE

PORT = 29400  # free in a namespace that was just made
LAST_WILL = 120.0  # seconds that ranks have for a last checkpoint when they are asked to end


def run_on_hosts(cluster: Cluster, argv: Sequence[str]) -> int:
    """Run `argv` as every rank, with the output of this process; the first exit code that is not 0, or 0.

    A rank that fails takes the others with it; a signal that ends this process goes on to all of them.
    """
    exits: queue.Queue[int] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="oktopk-hosts-") as folder, _ranks() as ranks:
        for rank in range(cluster.world_size):
            with signals_held():  # a rank that nobody knows yet could not be waited for
                ranks.append(_start(cluster, rank, argv, Path(folder)))
        for process in ranks:
            threading.Thread(target=lambda own: exits.put(own.wait()), args=(process,), daemon=True).start()
        return next((code for code in (exits.get() for _ in ranks) if code), 0)


def _start(cluster: Cluster, rank: int, argv: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank), "WORLD_SIZE": str(cluster.world_size), "LOCAL_RANK": str(rank % cluster.per_host),
        "LOCAL_WORLD_SIZE": str(cluster.per_host), "MASTER_ADDR": cluster.master, "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": cluster.interface, "OMP_NUM_THREADS": "1", PARENT_VARIABLE: str(os.getpid()),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else it warns that addresses of emulated hosts have no names
    }  # fmt: skip
    # Emulated hosts share the cores of this machine.
    environment |= turn_variables(folder, cluster.world_size)
    # A session of their own: Ctrl-C in the terminal reaches them through this process, once.
    return subprocess.Popen(
        cluster.command(rank, argv), env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )


@contextmanager
def _ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that do not outlive the block: asked to end, and ended when they do not."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        yield ranks
    finally:
        for process in ranks:
            process.terminate()
        for process in ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WILL)
            process.kill()
            process.wait()
