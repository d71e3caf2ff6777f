"""Hugging Face Accelerate: what `save_state` saves and `load_state` loads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from oktopk.checkpoint import save
from oktopk.front_ends.attached import AttachedReducer
from oktopk.front_ends.ddp import register
from oktopk.front_ends.local_steps import LocalSteps, local_steps
from oktopk.front_ends.options import LocalStepsOptions, RegisterOptions
from oktopk.integrations.state import FOLDER, copied, load_if_saved


def register_accelerate(accelerator: Any, model: nn.Module, **options: Unpack[RegisterOptions]) -> AttachedReducer:
    """`oktopk.register` on what `accelerator.prepare` returned, with its GradScaler and its checkpoints.

    `accelerator.save_state(folder)` then saves each rank's state into `folder/oktopk`, and `load_state` loads it. The
    folder must be one that every rank sees. The second model that was prepared has `folder/oktopk-1`, and so on.
    Closing the reducer ends that.
    """
    reducer = register(model, scaler=accelerator.scaler, **options)

    def save_state(models: Sequence[nn.Module], weights: object, folder: str) -> None:
        save(reducer, _folder(folder, models, model))

    def load_state(models: Sequence[nn.Module], folder: str) -> None:
        load_if_saved(reducer, _folder(folder, models, model))

    reducer.on_close(accelerator.register_save_state_pre_hook(save_state).remove)
    reducer.on_close(accelerator.register_load_state_pre_hook(load_state).remove)
    return reducer


def local_steps_accelerate(
    accelerator: Any, model: nn.Module, optimizer: Optimizer, **options: Unpack[LocalStepsOptions]
) -> LocalSteps:
    """`oktopk.local_steps` on what `accelerator.prepare` returned, with its GradScaler and its checkpoints.

    `accelerator.save_state(folder)` then saves the weights that all ranks share as the model's, and each rank's own
    state into `folder/oktopk`, which every rank must see (`oktopk-1` for the second model that was prepared);
    `load_state` continues from there. Evaluate inside `handle.shared()`. Closing the handle ends all that.
    """
    handle = local_steps(model, optimizer, scaler=accelerator.scaler, **options)
    found: list[Path] = []  # what `load_state` loads from, once it knows

    def save_state(models: Sequence[nn.Module], weights: list[Any], folder: str) -> None:
        with handle.shared():
            weights[_number(models, model)] = copied(accelerator.get_state_dict(model))
        save(handle, _folder(folder, models, model))

    def load_state(models: Sequence[nn.Module], folder: str) -> None:
        found[:] = [_folder(folder, models, model)]

    handle.on_close(accelerator.register_save_state_pre_hook(save_state).remove)
    handle.on_close(accelerator.register_load_state_pre_hook(load_state).remove)
    _watch_load(accelerator, handle, found)
    return handle


def _watch_load(accelerator: Any, handle: LocalSteps, found: list[Path]) -> None:
    """Hooks come before the model and its optimizer are loaded, and our state is theirs too: it comes after."""
    load_state = accelerator.load_state

    @wraps(load_state)
    def watched(*args: Any, **kwargs: Any) -> None:
        load_state(*args, **kwargs)
        if not load_if_saved(handle, found[0]):
            handle.restart()

    def restore() -> None:
        accelerator.load_state = load_state

    accelerator.load_state = watched
    handle.on_close(restore)


def _number(models: Sequence[nn.Module], model: nn.Module) -> int:
    return next((number for number, prepared in enumerate(models) if prepared is model), 0)


def _folder(checkpoint: str, models: Sequence[nn.Module], model: nn.Module) -> Path:
    """One for each model, and the same in every run."""
    number = _number(models, model)
    return Path(checkpoint) / (f"{FOLDER}-{number}" if number else FOLDER)
