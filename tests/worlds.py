"""Worlds of ranks for tests: threads for speed, real processes over Gloo for truth."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TESTS = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_processes(world_size: int, work: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run `work(*args)` in `world_size` real processes that share a Gloo world; results by rank.

    `work` must be importable from a test module. The first failing rank's traceback becomes the error.
    """
    results = [
        pickle.loads(result.payload) if result.ok else result
        for result in start(world_size, work, *args, timeout=timeout)
    ]
    failed = [r for r in results if isinstance(r, Outcome)]
    if failed:
        raise AssertionError("\n".join(f"rank {r.rank} (exit {r.code}):\n{r.output[-4000:]}" for r in failed))
    return results


class Outcome:
    """How one process ended."""

    def __init__(self, rank: int, code: int, output: str, payload: bytes) -> None:
        self.rank, self.code, self.output, self.payload = rank, code, output, payload

    @property
    def ok(self) -> bool:
        return self.code == 0 and bool(self.payload)


def start(world_size: int, work: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Outcome]:
    """As `run_processes`, but failures are returned, not raised. Every process is gone when this returns."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        call.write_bytes(pickle.dumps((work.__module__, work.__qualname__, args)))
        processes = [_spawn(rank, world_size, port, folder, timeout) for rank in range(world_size)]
        try:
            outputs = [process.communicate(timeout=timeout + 20)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [
            Outcome(rank, process.returncode, output, _payload(Path(folder) / f"result{rank}"))
            for rank, (process, output) in enumerate(zip(processes, outputs, strict=True))
        ]


def _spawn(rank: int, world_size: int, port: int, folder: str, timeout: float) -> subprocess.Popen[str]:
    environment = os.environ | {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, str(Path(__file__)), folder, str(timeout)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _payload(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _main(folder: str, timeout: str) -> None:
    torch.set_num_threads(1)
    module, name, args = pickle.loads((Path(folder) / "call").read_bytes())
    work = getattr(__import__(module), name)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout)))
    try:
        result = work(*args)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    (Path(folder) / f"result{dist.get_rank()}").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
