"""Batches of utterances of similar length, dealt out evenly to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oktopk.errors import DataError

JITTER = 0.1  # lengths are taken as up to this fraction longer or shorter, so that batches differ between epochs


@dataclass(frozen=True)
class LengthSampler:
    """Which utterances form which batch: a function of seed and epoch, so any step of any epoch can be found again."""

    lengths: Sequence[int]  # samples of each utterance
    batch_size: int  # per rank; fewer when the corpus cannot fill one batch per rank
    seed: int

    def steps(self, world_size: int) -> int:
        """Batches per rank and epoch."""
        return len(self.lengths) // (world_size * self._batch(world_size))

    def batches(self, epoch: int, rank: int, world_size: int) -> list[list[int]]:
        """This rank's batches. Those of equal number on other ranks have nearly the same lengths.

        Epoch 0 goes from short to long, which gets CTC off the ground; the others are shuffled. Utterances that do not
        fill a last batch sit the epoch out; each epoch draws others.
        """
        rng = np.random.default_rng([self.seed, epoch])
        size, steps = world_size * self._batch(world_size), self.steps(world_size)
        chosen = rng.permutation(len(self.lengths))[: steps * size]
        lengths = np.asarray(self.lengths)[chosen] * rng.uniform(1 - JITTER, 1 + JITTER, len(chosen))
        groups = chosen[np.argsort(lengths, kind="stable")].reshape(steps, size)
        order = np.arange(steps) if epoch == 0 else rng.permutation(steps)
        return [group[rank::world_size].tolist() for group in groups[order]]

    def _batch(self, world_size: int) -> int:
        if len(self.lengths) < world_size:
            raise DataError(
                f"{world_size} ranks need at least {world_size} training utterances, the corpus has "
                f"{len(self.lengths)}; start fewer workers or give more data."
            )
        return min(self.batch_size, len(self.lengths) // world_size)
