"""One optimizer step of a workload, as benchmarks that train take it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from oktopk.workloads.base import Recipe, Workload


class Steps(Protocol):
    """What of an optimizer a training needs."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def zero_grad(self) -> None: ...

    def step(self) -> Any: ...


def take_step(
    workload: Workload, model: nn.Module, optimizer: Steps, batch: Any, rate: float, clip: Callable[[], object]
) -> Tensor:
    """Step on the gradients of one batch, which `clip` limits before; the loss."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss = workload.loss(model, batch)
    loss.backward()
    clip()
    optimizer.step()
    return loss.detach()


def clip_of(recipe: Recipe, model: nn.Module) -> Callable[[], object]:
    """Limits the norm of a model's gradients as the recipe says."""
    limit = recipe.norm_clip
    return partial(clip_grad_norm_, list(model.parameters()), limit) if limit else lambda: None
