"""Starting workers on this machine with torch's elastic launcher, and stopping them without orphans."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from oktopk.errors import PeerError
from oktopk.training.environment import RankInfo
from oktopk.training.interrupts import die_with_parent
from oktopk.training.turns import turn_variables

# What ends the workers, and how long they have for a last checkpoint. An older torch takes neither: SIGUSR1 then ends
# the launcher itself, and workers that have lost their launcher write a checkpoint and end too.
_ENDING: dict[str, Any] = {"signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "shutdown_timeout": 120}
PARENT_VARIABLE = "OKTOPK_LAUNCHER_PID"


def launch_workers(workers: int, module_arguments: Sequence[str]) -> int:
    """Run `python -m ...` as `workers` ranks on this machine; the exit code.

    A signal that asks to stop goes on to the workers, which write a checkpoint: 0 after SIGTERM and SIGUSR1
    (pre-emption), 130 after Ctrl-C. A worker's own exit code is handed on.
    """
    _silence_agent()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_worker(workers)))
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    try:
        with tempfile.TemporaryDirectory(prefix="oktopk-launch-") as logs:
            os.environ.update(turn_variables(Path(logs), workers))
            elastic_launch(_launch_config(workers, logs), sys.executable)("-u", "-m", *module_arguments)
    except SignalException as stopped:
        return 128 + signal.SIGINT if stopped.sigval == signal.SIGINT else 0
    except ChildFailedError as failed:
        return _exit_code(failed)
    return 0


def launch_command(workers: int, module_arguments: Sequence[str]) -> str:
    """The command that does by hand what `launch_workers` does."""
    threads = threads_per_worker(workers)
    start = ["torchrun", "--standalone", "--nproc-per-node", str(workers), "-m", *module_arguments]
    return f"OMP_NUM_THREADS={threads} {shlex.join(start)}"


def threads_per_worker(workers: int, cores: int | None = None) -> int:
    """Cores divided fairly: more threads than cores only make workers wait for each other."""
    return max(1, (cores or len(os.sched_getaffinity(0))) // workers)


def bind_worker(info: RankInfo | None) -> None:
    """Threads and cores of this worker, and an end with its launcher's end."""
    if info is None:
        return
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or threads_per_worker(info.local_world_size)))
    mine = cores_of(info.local_rank, info.local_world_size, cores)
    if mine:
        os.sched_setaffinity(0, mine)
    if os.environ.get(PARENT_VARIABLE) == str(os.getppid()):
        die_with_parent(signal.SIGTERM)


def cores_of(local_rank: int, local_world_size: int, cores: Sequence[int]) -> list[int]:
    """The cores to pin a worker to; none when it would get fewer than two.

    A worker computes on one thread and communicates on another: on a single core they could not overlap.
    """
    share = len(cores) // local_world_size
    return list(cores[local_rank * share : (local_rank + 1) * share]) if share >= 2 and local_world_size > 1 else []


def _launch_config(workers: int, logs: str) -> LaunchConfig:
    known = {field.name for field in fields(LaunchConfig)}
    return LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=workers, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=0, monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(logs), **{name: _ENDING[name] for name in _ENDING.keys() & known},
    )  # fmt: skip


def _silence_agent() -> None:
    """The workers say what went wrong in their own words; the agent would say it again in more."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.distributed.elastic") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.CRITICAL)


def _exit_code(failed: ChildFailedError) -> int:
    rank, failure = failed.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        raise PeerError(
            f"worker {rank} was killed by {name}; the others were stopped. If nobody did, memory may have run out "
            "(dmesg says so). Continue the run from its last checkpoint with --resume."
        ) from None
    return failure.exitcode
