"""Is the network what it claims to be? The time of a round and the rate between ranks, as Gloo sees them."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from oktopk.bench.rank import World

ROUNDS = 5  # at a time, so that the barrier before them does not count


def measure(world: World, nbytes: int = 4_000_000, repeats: int = 20) -> None:
    """Emit seconds of a round between all ranks, and what a stream from rank 0 to rank 1 reaches."""
    seconds = [one_round(world) for _ in range(repeats)]
    sent = world.wire_bytes()[0]
    rate = max(stream(world, nbytes) for _ in range(3))
    world.emit(
        rank=world.rank, round_seconds=median(seconds), bytes_per_second=rate, wire_sent=world.wire_bytes()[0] - sent
    )


def one_round(world: World) -> float:
    """Seconds for a few bytes from every rank to every other; every rank must call it."""
    tokens = torch.zeros(world.world_size, dtype=torch.int64)
    dist.barrier()
    started = perf_counter()
    for _ in range(ROUNDS):
        dist.all_to_all_single(torch.empty_like(tokens), tokens)
    return (perf_counter() - started) / ROUNDS


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
