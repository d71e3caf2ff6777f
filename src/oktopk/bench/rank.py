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


class RankContext:
    """What a task knows of the rank it runs on, and where it puts its records."""

    def __init__(self, rank: int, world_size: int, interface: str, writer: int) -> None:
        self.rank, self.world_size, self.interface = rank, world_size, interface
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
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout)))
    context = RankContext(dist.get_rank(), dist.get_world_size(), os.environ["GLOO_SOCKET_IFNAME"], int(writer))
    module, function = task.split(":")
    getattr(import_module(module), function)(context, **json.loads(arguments))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
