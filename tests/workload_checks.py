"""What tests of every workload do: train a little, and evaluate in shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn


def losses_of(
    workload: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any], clip: float | None = None
) -> list[float]:
    """Train on the batches, one step each; the loss before every step."""
    losses = []
    for batch in batches:
        loss = workload.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_shards_add_up(workload: Any, model: nn.Module, world_sizes: Sequence[int]) -> dict[str, float]:
    """What ranks find in their shares is together what one finds alone; that."""
    alone: dict[str, float] = workload.evaluate(model, 0, 1)
    for world_size in world_sizes:
        shared = [workload.evaluate(model, rank, world_size) for rank in range(world_size)]
        for name, total in alone.items():
            # float32 sums in another order, of batches of other shapes
            assert sum(part[name] for part in shared) == pytest.approx(total, rel=1e-4)
    return alone
