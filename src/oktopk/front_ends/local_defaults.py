"""What `local_steps` sends where nothing was asked for, and where it keeps what it owes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.optim import Optimizer

from oktopk.config import RARELY, UpdateDefaults, update_defaults
from oktopk.errors import ConfigError
from oktopk.front_ends.advice import is_adam_like, scales_layers
from oktopk.front_ends.every import Every


def chosen_updates(
    algorithm: str | None, keep_owed: float | None, every: Every, optimizers: Sequence[Optimizer], overlap: bool
) -> UpdateDefaults:
    """The usual way for what was given; `keep_owed` None: as the interval and the optimizers want it."""
    if keep_owed is None:
        return update_defaults(algorithm, _is_rare(every, optimizers, overlap))
    if overlap and keep_owed < 1:
        raise ConfigError(
            f"overlap=True and keep_owed={keep_owed:g} do not go together: own weights cannot go on from shared weights"
            " that are still on their way. Leave one of them out."
        )
    return replace(update_defaults(algorithm, keep_owed < 1), keep_owed=keep_owed)


def _is_rare(every: Every, optimizers: Sequence[Optimizer], overlap: bool) -> bool:
    """Whether ranks step by themselves so often that they had better go on from the same weights."""
    is_often = isinstance(every, int) and every >= RARELY
    return is_often and not overlap and all(is_adam_like(one) and not scales_layers(one) for one in optimizers)
