"""The optimizers a recipe may name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from oktopk.errors import ConfigError, nearest
from oktopk.workloads.base import Recipe
from oktopk.workloads.lamb import Lamb

_BETA1 = 0.9  # memory of gradients under adamw and lamb


def make_optimizer(recipe: Recipe, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The recipe's optimizer over the parameters."""
    if recipe.optimizer not in OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {recipe.optimizer!r}. {nearest(recipe.optimizer, OPTIMIZERS)}")
    return OPTIMIZERS[recipe.optimizer](recipe, parameters)


def _sgd(recipe: Recipe, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)


def _adamw(recipe: Recipe, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=recipe.lr, betas=(_BETA1, recipe.beta2), weight_decay=recipe.weight_decay)


def _lamb(recipe: Recipe, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return Lamb(parameters, lr=recipe.lr, betas=(_BETA1, recipe.beta2), weight_decay=recipe.weight_decay)


OPTIMIZERS: dict[str, Callable[[Recipe, Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "lamb": _lamb,
}
