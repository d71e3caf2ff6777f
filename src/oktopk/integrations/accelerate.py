"""Hugging Face Accelerate: a reducer that `save_state` saves and `load_state` loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import Unpack

from oktopk.checkpoint import save
from oktopk.front_ends.attached import AttachedReducer
from oktopk.front_ends.ddp import register
from oktopk.front_ends.options import RegisterOptions
from oktopk.integrations.state import FOLDER, load_if_saved


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


def _folder(checkpoint: str, models: Sequence[nn.Module], model: nn.Module) -> Path:
    """One for each model, and the same in every run."""
    number = next((number for number, prepared in enumerate(models) if prepared is model), 0)
    return Path(checkpoint) / (f"{FOLDER}-{number}" if number else FOLDER)
