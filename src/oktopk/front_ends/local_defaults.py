"""What `local_steps` does where nothing was asked for: what it sends, where it keeps what it owes, who is a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.config import RARELY, UpdateDefaults, update_defaults
from oktopk.errors import ConfigError
from oktopk.front_ends.advice import is_adam_like, scales_layers
from oktopk.front_ends.every import Every
from oktopk.front_ends.options import LocalOptions
from oktopk.reduction.hosts import HostsOption


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


def complete_options_(
    options: LocalOptions, module: nn.Module, ddp: DistributedDataParallel | None, overlap: bool, scaler: Any
) -> None:
    """Set what was not given and follows from the model and the scaler."""
    if scaler is not None:
        options.setdefault("on_nonfinite", "skip")
    if ddp is not None:
        options.setdefault("group", ddp.process_group)
    device = next(module.parameters(), torch.empty(0)).device
    options["hosts"] = worker_hosts(options.get("hosts", "auto"), overlap, device)


def worker_hosts(wanted: HostsOption, overlap: bool, device: torch.device) -> HostsOption:
    """Which ranks are one worker. "auto" is heeded where averaging neither waits for a reduction nor for a device."""
    if overlap and wanted not in ("auto", None, 1):
        raise ConfigError(
            f"overlap=True and hosts={wanted!r} do not go together: the ranks of a host average gradients at every "
            "step, and would wait for the reduction that travels meanwhile. Pass hosts=None, or no overlap."
        )
    return None if wanted == "auto" and (overlap or device.type != "cpu") else wanted
