"""The weights of a model as vectors that can be shared, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.errors import ConfigError, UnsupportedError
from oktopk.front_ends.optimizer import DistributedOptimizer
from oktopk.front_ends.parameters import COMPILED, named_parameters
from oktopk.reduction.gradient import Gradient


@dataclass(frozen=True)
class Weights:
    """Parameters (or buffers) of one dtype, which are reduced together."""

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    dense: bool  # all of it at each synchronisation: buffers, which are few

    def own(self) -> Gradient:
        """The weights as they lie in memory now."""
        pieces = tuple(_flat(tensor) for tensor in self.tensors)
        return Gradient(tuple((n, p.numel()) for n, p in zip(self.names, pieces, strict=True)), pieces)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """A copy of each tensor's part of a flat vector."""
        parts = flat.split([tensor.numel() for tensor in self.tensors])
        return {name: part.clone() for name, part in zip(self.names, parts, strict=True)}


def weights_of(module: nn.Module) -> Iterator[Weights]:
    parameters = [(name, p) for name, p in named_parameters(module) if p.requires_grad]
    buffers = [
        (f"buffer {name.replace(COMPILED, '')}", b) for name, b in module.named_buffers() if b.is_floating_point()
    ]
    kinds: list[tuple[Sequence[tuple[str, Tensor]], bool]] = [(parameters, False), (buffers, True)]
    for tensors, dense in kinds:
        for dtype in dict.fromkeys(tensor.dtype for _, tensor in tensors):
            chosen = [(name, tensor) for name, tensor in tensors if tensor.dtype == dtype and tensor.numel()]
            if chosen:
                yield Weights(tuple(n for n, _ in chosen), tuple(t for _, t in chosen), dense)


def _flat(tensor: Tensor) -> Tensor:
    """All of a dense tensor in the order of its memory, whatever its memory format."""
    tensor = tensor.detach()
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
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


def check_weights(module: nn.Module, optimizer: Optimizer) -> None:
    trained = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    foreign = [
        p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and id(p) not in trained
    ]
    if foreign:
        raise ConfigError(
            f"{len(foreign)} parameters of the optimizer are not the model's: pass the model that the optimizer trains."
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    idle = [name for key, name in trained.items() if key not in held]
    if idle:
        raise ConfigError(
            f"the optimizer does not have {idle[0]!r} and {len(idle) - 1} other trained parameters: add them, or set "
            "requires_grad to False."
        )
    for name, parameter in module.named_parameters():
        if parameter.is_complex() or not parameter.is_floating_point():
            raise UnsupportedError(f"{name} is {parameter.dtype}: only floating-point weights can be shared.")
        if not _is_dense(parameter):
            raise UnsupportedError(f"{name} does not lie in memory without gaps or overlaps: make it contiguous.")
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise UnsupportedError(f"the model's parameters are on several devices, {sorted(map(str, devices))}: use one.")


def _is_dense(tensor: Tensor) -> bool:
    """Whether its entries fill one stretch of memory, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def count_trained(optimizer: Optimizer) -> int:
    return sum(p.requires_grad and p.numel() > 0 for group in optimizer.param_groups for p in group["params"])


def describe(optimizer: Optimizer) -> str:
    """What ranks must have in common: the kind of optimizer, its rates and the rest of its settings."""
    groups = [
        {
            name: float(value) if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]
    return f" {type(optimizer).__name__} {groups}"
