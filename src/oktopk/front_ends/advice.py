"""What a user should hear once: sparse gradients under Adam-like optimizers cost quality, and what does not."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from oktopk.config import ReducerConfig

log = logging.getLogger("oktopk")

ADVICE = (
    "%s divides by the root of mean squares, and so damps entries that arrive late and in one lump: with sparse "
    "gradients it stays behind dense unless a third or more of its steps are dense (warmup_steps). "
    "oktopk.local_steps(model, optimizer) reduces updates instead and needs no dense steps."
)


def is_adam_like(optimizer: Optimizer) -> bool:
    """Whether it keeps mean squares of gradients, as Adam, AdamW and LAMB do."""
    return any("betas" in group for group in optimizer.param_groups)


def scales_layers(optimizer: Optimizer) -> bool:
    """Whether it makes every layer's step as long as the layer's weights ask for, as LAMB does."""
    return "lamb" in type(optimizer).__name__.lower()


def advise(optimizer: Optimizer) -> None:
    if is_adam_like(optimizer):
        log.warning(ADVICE, type(optimizer).__name__)


def advise_at_first_step(parameters: Iterable[nn.Parameter]) -> RemovableHandle:
    """As `advise`, of the optimizer that turns out to step these parameters; the handle ends it."""
    known = {id(parameter) for parameter in parameters}

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
            known.clear()  # once is enough. To remove itself it must not: torch is walking through the hooks
            advise(optimizer)

    return register_optimizer_step_pre_hook(look)


def is_worth_advice(algorithm: str, config: ReducerConfig, rank: int) -> bool:
    """Gradients that will be sparse, on the one rank that speaks."""
    return rank == 0 and algorithm != "dense" and config.density != 1.0
