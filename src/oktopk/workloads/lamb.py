"""LAMB (You et al., 2020): Adam whose step on each tensor is scaled to the size of that tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oktopk.errors import ConfigError


class Lamb(Optimizer):
    """Large-batch Adam, as used to pre-train BERT.

    Example: `Lamb(model.parameters(), lr=2e-3, weight_decay=0.01)`
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),  # larger = longer memory of gradients and of their squares
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(f"lr must be 0 or more and betas in [0, 1), got {lr} and {betas}.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_(parameter, group)
        return loss

    def _update_(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        steps, (slow, slower) = state["step"].item(), group["betas"]
        state["mean"].lerp_(parameter.grad, 1 - slow)
        state["square"].mul_(slower).addcmul_(parameter.grad, parameter.grad, value=1 - slower)
        # One temporary, worked on in place: mean / (root of square + eps), both as if they had not begun at zero.
        update = state["square"].sqrt().mul_((1 - slower**steps) ** -0.5).add_(group["eps"])
        torch.div(state["mean"], update, out=update).mul_(1 / (1 - slow**steps))
        update.add_(parameter, alpha=group["weight_decay"])
        parameter.sub_(update, alpha=group["lr"] * _trust(parameter, update))


def _trust(parameter: Tensor, update: Tensor) -> float:
    """Size of the tensor over size of its update; 1 where one of them is zero."""
    weight, step = parameter.norm().item(), update.norm().item()
    return weight / step if weight > 0 and step > 0 else 1.0
