"""Limits on the norm of a gradient before it is sent, and the unit that it comes in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from oktopk.errors import ConfigError
from oktopk.kernels.tensors import wide_dtype


class NormClip:
    """Keeps the norm of a rank's whole gradient under a limit."""

    def __init__(self, limit: float, world_size: int, scaler: Any = None) -> None:
        """`limit` is for the mean over ranks, of gradients as they are without the `scaler`.

        Gradients of ranks add up like independent noise, so that the norm of their mean is smaller by the root of the
        world size: Deep Gradient Compression.
        """
        require_limit("norm_clip", limit)
        self._limit, self._scaler = limit / math.sqrt(world_size), scaler

    def factor(self, grads: Iterable[Tensor]) -> float:
        """What to multiply gradients with so that their norm, taken over all of them, keeps to the limit."""
        norms = [torch.linalg.vector_norm(grad, dtype=wide_dtype(grad)) for grad in grads]
        norm = float(torch.stack([part.to(norms[0].device) for part in norms]).norm()) if norms else 0.0
        limit = self._limit * scale_of(self._scaler)
        # A norm that is not finite is for the reducer to find.
        return limit / norm if math.isfinite(norm) and norm > limit else 1.0


def scale_of(scaler: Any) -> float:
    """What gradients are multiplied with by a GradScaler, if there is one."""
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def require_limit(name: str, limit: float) -> None:
    if not limit > 0.0:
        raise ConfigError(f"{name} must be above 0, got {limit}: it is a limit of the gradient's norm, e.g. 1.0.")
