"""Which examples a rank sees, and when: a function of seed and epoch only, so that any step can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import nn

from oktopk.errors import DataError


def steps_per_epoch(examples: int, batch_size: int, world_size: int, source: str) -> int:
    """Full batches that every rank gets; the rest of the last one waits for another epoch's order."""
    steps = examples // (batch_size * world_size)
    if steps == 0:
        raise DataError(
            f"{source} has {examples} training examples, fewer than one batch of {batch_size} for each of "
            f"{world_size} ranks: lower batch_size, use fewer workers, or give more data."
        )
    return steps


def rank_batches(
    examples: int, batch_size: int, seed: int, epoch: int, rank: int, world_size: int, start: int = 0
) -> Iterator[tuple[NDArray[np.int64], np.random.Generator]]:
    """(example numbers, a generator of that batch's own) from batch `start` on."""
    order = np.random.default_rng([seed, epoch]).permutation(examples)
    for step in range(start, examples // (batch_size * world_size)):
        batch = step * world_size + rank
        yield order[batch * batch_size : (batch + 1) * batch_size], np.random.default_rng([seed, epoch, batch])


def shard(examples: int, rank: int, world_size: int, batch_size: int) -> Iterator[NDArray[np.int64]]:
    """This rank's share of a validation set, in batches; the last may be short, and there may be none."""
    mine = np.arange(rank, examples, world_size)
    for first in range(0, len(mine), batch_size):
        yield mine[first : first + batch_size]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and back in its former one afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
