"""Is the emulated network what it claims to be? Round-trip time and rate between ranks, as Gloo sees them."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from oktopk.bench.rank import World


def measure(world: World, nbytes: int = 4_000_000, repeats: int = 20) -> None:
    """Emit seconds of a one-byte round trip and bytes per second of a one-way stream from rank 0 to rank 1."""
    seconds = [round_trip(world) for _ in range(repeats)]
    sent = world.wire_bytes()[0]
    rate = max(stream(world, nbytes) for _ in range(3))
    world.emit(
        rank=world.rank, round_trip=median(seconds), bytes_per_second=rate, wire_sent=world.wire_bytes()[0] - sent
    )


def round_trip(world: World) -> float:
    """Seconds for one byte to rank 1 and back; every rank must call it."""
    token = torch.zeros(1, dtype=torch.uint8)
    dist.barrier()
    started = perf_counter()
    _pass(world, token, 0, 1)
    _pass(world, token, 1, 0)
    return perf_counter() - started


def stream(world: World, nbytes: int) -> float:
    """Bytes per second from rank 0 to rank 1; every rank must call it."""
    block, token = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    dist.barrier()
    started = perf_counter()
    _pass(world, block, 0, 1)
    _pass(world, token, 1, 0)
    return nbytes / (perf_counter() - started)


def _pass(world: World, tensor: torch.Tensor, source: int, to: int) -> None:
    if world.world_size == 1:
        return
    if world.rank == source:
        dist.send(tensor, to)
    elif world.rank == to:
        dist.recv(tensor, source)
