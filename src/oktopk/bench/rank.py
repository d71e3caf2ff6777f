"""The inside of one benchmark process: join the world, run the task, emit records as JSON lines.

Started by `processes.run_ranks`, never by hand: python -m oktopk.bench.rank MODULE:FUNCTION ARGUMENTS FD TIMEOUT
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from oktopk.bench.cluster import interface_bytes
from oktopk.training.devices import HOST, Place, find_place


class RankContext:
    """What a task knows of the rank it runs on, and where it puts its records."""

    def __init__(self, rank: int, world_size: int, interface: str, writer: int, place: Place = HOST) -> None:
        self.rank, self.world_size, self.interface, self.place = rank, world_size, interface, place
        self._file = os.fdopen(writer, "w", buffering=1)

    def emit(self, **record: Any) -> None:
        """Hand a record to the launcher."""
        self._file.write(json.dumps(record, allow_nan=False) + "\n")

    def wire_bytes(self) -> tuple[int, int]:
        """Sent and received by this host's interface, since it was made."""
        return interface_bytes(self.interface)


def main(argv: Sequence[str]) -> None:
    task, arguments, writer, timeout = argv
    torch.set_num_threads(1)
    options = json.loads(arguments)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = find_place(options.pop("device", "cpu"), rank)  # all hosts are this one
    dist.init_process_group(backend_for(place, world_size), timeout=timedelta(seconds=float(timeout)))
    context = RankContext(rank, world_size, os.environ["GLOO_SOCKET_IFNAME"], int(writer), place)
    module, function = task.split(":")
    getattr(import_module(module), function)(context, **options)
    dist.barrier()
    dist.destroy_process_group()


def backend_for(place: Place, world_size: int) -> str:
    """NCCL for what DDP does by itself on GPUs; it cannot serve two ranks of one GPU."""
    is_alone = place.device.type == "cuda" and world_size <= torch.cuda.device_count() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if is_alone else "gloo"


if __name__ == "__main__":
    main(sys.argv[1:])
