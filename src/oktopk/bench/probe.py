"""Is the network what it claims to be? The time of a round and the rate between ranks, as Gloo sees them."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from oktopk.bench.rank import RankContext

ROUNDS = 5  # at a time, so that the barrier before them does not count


def measure(context: RankContext, nbytes: int = 4_000_000, repeats: int = 20) -> None:
    """Emit seconds of a round between all ranks, and what a stream from rank 0 to rank 1 reaches."""
    seconds = [one_round() for _ in range(repeats)]
    sent = context.wire_bytes()[0]
    rate = max(stream(nbytes) for _ in range(3))
    context.emit(
        rank=context.rank,
        round_seconds=median(seconds),
        bytes_per_second=rate,
        wire_sent=context.wire_bytes()[0] - sent,
    )


def one_round() -> float:
    """Seconds for a few bytes from every rank to every other; every rank must call it."""
    tokens = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    dist.barrier()
    started = perf_counter()
    for _ in range(ROUNDS):
        dist.all_to_all_single(torch.empty_like(tokens), tokens)
    return (perf_counter() - started) / ROUNDS


def stream(nbytes: int) -> float:
    """Bytes per second from rank 0 to rank 1; every rank must call it."""
    block, token = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    dist.barrier()
    started = perf_counter()
    _pass(block, 0, 1)
    _pass(token, 1, 0)
    return nbytes / (perf_counter() - started)


def _pass(tensor: torch.Tensor, source: int, to: int) -> None:
    if dist.get_world_size() == 1:
        return
    if dist.get_rank() == source:
        dist.send(tensor, to)
    elif dist.get_rank() == to:
        dist.recv(tensor, source)
