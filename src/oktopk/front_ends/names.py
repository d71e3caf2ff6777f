"""What parameters are called."""

from __future__ import annotations

from torch import nn

COMPILED = "_orig_mod."  # what torch.compile puts in front of a module's names


def names_of(module: nn.Module) -> dict[int, str]:
    """id of each parameter -> its name, the same with and without `torch.compile`. Shared parameters have one."""
    return {id(parameter): name.replace(COMPILED, "") for name, parameter in module.named_parameters()}
