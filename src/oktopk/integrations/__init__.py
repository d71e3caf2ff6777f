"""Classes for the training loops of others, with checkpoints that resume exactly.

Each framework is imported when its class is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oktopk.integrations.accelerate import local_steps_accelerate, register_accelerate
    from oktopk.integrations.lightning import LightningCallback, LightningLocalSteps
    from oktopk.integrations.transformers import TransformersCallback, TransformersLocalSteps

__all__ = [
    "LightningCallback",
    "LightningLocalSteps",
    "TransformersCallback",
    "TransformersLocalSteps",
    "local_steps_accelerate",
    "register_accelerate",
]

_ROOM_OF = {
    "LightningCallback": "lightning", "LightningLocalSteps": "lightning",
    "TransformersCallback": "transformers", "TransformersLocalSteps": "transformers",
    "local_steps_accelerate": "accelerate", "register_accelerate": "accelerate",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
