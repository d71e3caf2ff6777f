"""Joining the world of ranks."""

from __future__ import annotations

import os
from contextlib import closing
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from oktopk.errors import CommunicationError, ConfigError
from oktopk.transport.bounded_store import BoundedStore
from oktopk.transport.rendezvous import Rendezvous

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_process_group(backend: str = "gloo", timeout: timedelta | None = None) -> None:
    """`torch.distributed.init_process_group`, for scripts that `torchrun --max-restarts` may start again.

    torchrun keeps one store over all attempts, and Gloo finds the addresses of the dead workers in it. Here each
    attempt has its own part of the store, and so has each call within an attempt. Ranks that do not come within
    `timeout` (default: torch's, 30 minutes) are named. Without torchrun it is otherwise the same as torch's.
    """
    limit = timeout or dist.default_pg_timeout
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: start the script with torchrun, e.g. torchrun --nproc-per-node 2 train.py, "
            "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself."
        )
    store, rank, world_size = _open_store(limit)
    if world_size > 1:
        store = _own_part(store, rank, world_size, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _open_store(limit: timedelta) -> tuple[Store, int, int]:
    """Of this attempt of torchrun's, with our rank and the world size."""
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=limit))
    except dist.DistError as error:
        raise CommunicationError(
            f"rank {os.environ['RANK']} did not meet the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} within {limit.total_seconds():g} s ({str(error).splitlines()[0][:200]}): "
            f"start all {os.environ['WORLD_SIZE']} ranks, with the same MASTER_ADDR (the host of rank 0) and "
            "MASTER_PORT (free there, open to the others)."
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt {attempt}", store), rank, world_size


def _own_part(store: Store, rank: int, world_size: int, limit: timedelta) -> Store:
    """A part of the store that nobody has used, once every rank has come."""
    with closing(BoundedStore(lambda: store, limit.total_seconds())) as bounded:
        meeting = Rendezvous(bounded, range(world_size), rank)
        meeting.meet("", limit, f"all {world_size} ranks must be started and call init_process_group.")
        return meeting.store.inner
