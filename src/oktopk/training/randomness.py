"""The random numbers of a run: seeded by rank, kept in checkpoints."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed every generator a workload may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Different numbers on every rank: a dropout mask that all share would be one mask, not many."""
    seed_all(seed + 1_000_003 * (rank + 1) + 7919 * step)


def random_state() -> dict[str, Any]:
    """State of every generator a workload may draw from."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    return {
        "torch": torch.get_rng_state(),
        **gpu,
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Continue where they were. A GPU that a run comes to, or leaves, has numbers of its own."""
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
