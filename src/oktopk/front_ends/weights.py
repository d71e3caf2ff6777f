"""The weights of a model as vectors that can be shared, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from oktopk.errors import ConfigError, UnsupportedError
from oktopk.front_ends.optimizer import DistributedOptimizer
from oktopk.front_ends.parameters import Named, named_parameters
from oktopk.reduction.gradient import Gradient


@dataclass(frozen=True)
class Weights:
    """Parameters (or buffers) of one dtype, which are reduced together."""

    names: tuple[str, ...]
    find: Callable[[], Sequence[Tensor]]  # a module may put another tensor in the place of a buffer
    dtype: torch.dtype
    dense: bool  # all of it at each synchronisation: buffers, which are few

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self.find()

    def own(self) -> Gradient:
        """The weights as they lie in memory now."""
        pieces = tuple(flat(tensor) for tensor in self.tensors)
        return Gradient(tuple((n, p.numel()) for n, p in zip(self.names, pieces, strict=True)), pieces)

    def by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """A copy of each tensor's part of a flat vector."""
        parts = vector.split([tensor.numel() for tensor in self.tensors])
        return {name: part.clone() for name, part in zip(self.names, parts, strict=True)}


def weights_of(module: nn.Module) -> Iterator[Weights]:
    """What is trained, a vector for each dtype."""
    trained = [(name, p) for name, p in named_parameters(module) if p.requires_grad and p.numel()]
    for dtype in dict.fromkeys(parameter.dtype for _, parameter in trained):
        names, parameters = zip(*((name, p) for name, p in trained if p.dtype == dtype), strict=True)
        yield Weights(names, partial(tuple, parameters), dtype, dense=False)


def flat(tensor: Tensor) -> Tensor:
    """All of a dense tensor in the order of its memory, whatever its memory format."""
    tensor = tensor.detach()
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Whether its entries fill one stretch of memory, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def unwrap_optimizers(given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    optimizers = [unwrap_optimizer(one) for one in (given if isinstance(given, (list, tuple)) else [given])]
    if not optimizers:
        raise ConfigError("local_steps needs the optimizer that trains the model, got an empty list.")
    return optimizers


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a framework's wrapper."""
    if isinstance(optimizer, DistributedOptimizer):
        raise UnsupportedError("DistributedOptimizer reduces gradients: pass local_steps the optimizer it wraps.")
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return unwrap_optimizer(inner)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    return optimizer


def unwrap_model(model: nn.Module) -> tuple[DistributedDataParallel | None, nn.Module]:
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel):
        return None, model
    if model._comm_hooks:
        raise UnsupportedError(
            "this DDP module has a communication hook, which reduces gradients; local_steps reduces updates: use one."
        )
    return model, model.module


def check_weights(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse what cannot be shared, and optimizers that do not train this model, all of it."""
    parameters = list(module.named_parameters())
    for name, parameter in parameters:
        _check_parameter(name, parameter)
    devices = {parameter.device for _, parameter in parameters}
    if len(devices) > 1:
        raise UnsupportedError(f"the model's parameters are on several devices, {sorted(map(str, devices))}: use one.")
    _check_together(parameters, optimizers)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise UnsupportedError(f"{name} has no shape yet: run one batch through the lazy module first.")
    if hasattr(parameter, "device_mesh"):
        raise UnsupportedError(f"{name} is sharded over ranks: use oktopk.register_fsdp, which reduces gradients.")
    if parameter.is_complex() or not parameter.is_floating_point():
        raise UnsupportedError(f"{name} is {parameter.dtype}: only floating-point weights can be shared.")
    if not is_dense(parameter):
        raise UnsupportedError(f"{name} does not lie in memory without gaps or overlaps: make it contiguous.")


def _check_together(parameters: Sequence[Named], optimizers: Sequence[Optimizer]) -> None:
    trained = {id(p): name for name, p in parameters if p.requires_grad}
    foreign = sum(id(p) not in trained for p in trained_by(optimizers))
    if foreign:
        raise ConfigError(
            f"{foreign} parameters of the optimizer are not the model's: pass the model that the optimizer trains."
        )
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    idle = [name for key, name in trained.items() if key not in held]
    if idle:
        raise ConfigError(
            f"the optimizer does not have {idle[0]!r} and {len(idle) - 1} other trained parameters: add them, set "
            "requires_grad to False, or pass a list of all optimizers."
        )


def trained_by(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [p for group in groups for p in group["params"] if p.requires_grad and p.numel()]


def describe(optimizers: Sequence[Optimizer]) -> str:
    """What ranks must have in common: the kind of each optimizer, its rates and the rest of its settings."""
    return "".join(f" {type(one).__name__} {[_settings(group) for group in one.param_groups]}" for one in optimizers)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: _comparable(value) for name, value in group.items() if name != "params"}


def _comparable(value: Any) -> Any:
    """The same text on every rank for the same value: that of a function, say, has an address in it."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else f"a tensor of {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return [_comparable(part) for part in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__
