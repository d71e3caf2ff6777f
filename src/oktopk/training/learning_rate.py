"""The learning rate at each step, from the recipe alone: nothing to save, nothing to resume."""

from __future__ import annotations

from oktopk.workloads.base import Recipe


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int, world_size: int) -> float:
    """Warm-up, then decay per epoch, by steps and linearly, whichever the recipe asks for."""
    warmup_steps = recipe.lr_warmup_epochs * steps_per_epoch
    if step < warmup_steps:
        start = recipe.lr / world_size
        return start + (recipe.lr - start) * (step + 1) / (warmup_steps + 1)
    epoch = step // max(1, steps_per_epoch)
    drops = sum(epoch >= drop for drop in recipe.lr_steps)
    lr = float(recipe.lr * recipe.lr_decay**epoch * 0.1**drops)
    return lr * _linear_share(step, warmup_steps, recipe.epochs * steps_per_epoch) if recipe.lr_linear_decay else lr


def _linear_share(step: int, warmup_steps: float, total_steps: int) -> float:
    return max(0.0, (total_steps - step) / max(1.0, total_steps - warmup_steps))
