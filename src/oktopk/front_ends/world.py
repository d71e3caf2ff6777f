"""Joining the world of ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


def init_process_group(backend: str = "gloo", timeout: timedelta | None = None) -> None:
    """`torch.distributed.init_process_group`, for scripts that `torchrun --max-restarts` may start again.

    torchrun keeps one store over all attempts, and Gloo finds the addresses of the dead workers in it. Here each
    attempt has its own part of the store. Without torchrun it is the same as torch's.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, rank, world_size = next(rendezvous("env://"))
    store = PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
