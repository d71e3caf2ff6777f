"""What `local_steps` does where nothing was asked for: what it sends, where it keeps what it owes, who is a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.config import MeanOver, UpdateDefaults, usual_updates
from oktopk.config import Optimizer as Kind
from oktopk.errors import ConfigError
from oktopk.front_ends.advice import is_adam_like, scales_layers
from oktopk.front_ends.every import Every
from oktopk.front_ends.options import LocalOptions
from oktopk.reduction.hosts import HostsOption


def chosen_updates(
    algorithm: str | None,
    keep_owed: float | None,
    mean_over: MeanOver | None,
    every: Every,
    optimizers: Sequence[Optimizer],
    overlap: bool,
) -> UpdateDefaults:
    """The usual way for what was given; None: as the interval and the optimizers want it."""
    if overlap and keep_owed is not None and keep_owed < 1:
        raise ConfigError(
            f"overlap=True and keep_owed={keep_owed:g} do not go together: own weights cannot go on from shared weights"
            " that are still on their way. Leave one of them out."
        )
    return usual_updates(_kind_of(optimizers), every, overlap, algorithm, keep_owed, mean_over)


def _kind_of(optimizers: Sequence[Optimizer]) -> Kind | None:
    """What all of them are, as far as it matters here; None: something else, or of several kinds."""
    kinds = {_kind(optimizer) for optimizer in optimizers}
    return kinds.pop() if len(kinds) == 1 else None


def _kind(optimizer: Optimizer) -> Kind | None:
    if is_adam_like(optimizer):
        return "lamb" if scales_layers(optimizer) else "adamw"
    return "sgd" if isinstance(optimizer, torch.optim.SGD) else None


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
