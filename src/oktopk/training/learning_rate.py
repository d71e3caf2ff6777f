"""The learning rate at each step, from the recipe alone: nothing to save, nothing to resume."""

from __future__ import annotations

import math

from oktopk.workloads.base import Recipe


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int, world_size: int) -> float:
    """Warm-up, then decay per epoch, by steps, linearly and as a cosine, whichever the recipe asks for."""
    warmup_steps = recipe.lr_warmup_epochs * steps_per_epoch
    if step < warmup_steps:
        start = recipe.lr * (1 / world_size if recipe.lr_warmup_from is None else recipe.lr_warmup_from)
        return start + (recipe.lr - start) * (step + 1) / (warmup_steps + 1)
    epoch = step // max(1, steps_per_epoch)
    drops = sum(epoch >= drop for drop in recipe.lr_steps)
    left = _share_left(step, warmup_steps, recipe.epochs * steps_per_epoch)
    lr = float(recipe.lr * recipe.lr_decay**epoch * 0.1**drops)
    return lr * (left if recipe.lr_linear_decay else 1.0) * _cosine(left, recipe.lr_cosine_to)


def _share_left(step: int, warmup_steps: float, total_steps: int) -> float:
    """Of the steps after warm-up."""
    return max(0.0, (total_steps - step) / max(1.0, total_steps - warmup_steps))


def _cosine(left: float, to: float) -> float:
    """From 1 when all is left down to `to` when nothing is."""
    return to + (1 - to) * (1 - math.cos(math.pi * left)) / 2
