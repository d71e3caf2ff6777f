"""Buffers of a model: those that training changes are averaged, tables and masks that stay as they are never travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from oktopk.errors import CheckpointError, UnsupportedError
from oktopk.front_ends.parameters import COMPILED
from oktopk.front_ends.weights import Weights, flat, is_dense
from oktopk.reduction.agreement import said_by_all
from oktopk.reduction.gradient import Gradient
from oktopk.transport.base import Transport


def is_look_due(synchronisations: int) -> bool:
    """Whether to look for buffers that move, which costs a round: ever more rarely, since most do so at once."""
    return synchronisations & (synchronisations - 1) == 0


class StillBuffers:
    """Floating-point buffers that no rank has been seen to write, and what is in them on every rank alike."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._paths: dict[str, str] = {}  # where the module has a buffer, by its name
        self.restart()

    def restart(self) -> None:
        """Nobody has written any: what is in them now is the same on every rank."""
        found = {f"buffer {path.replace(COMPILED, '')}": path for path, _ in self._module.named_buffers()}
        self._paths = {name: path for name, path in found.items() if self._get(path).is_floating_point()}
        self._values = {name: self._get(path).detach().clone() for name, path in self._paths.items()}

    def moved(self, transport: Transport) -> list[str]:
        """Names of those that some rank has written; all ranks ask together."""
        names = list(self._values)
        still = {name for name, value in self._values.items() if _same_bits(value, self._get(self._paths[name]))}
        kept = said_by_all(names, still, transport) if names else frozenset()
        return [name for name in names if name not in kept]

    def take(self, names: Sequence[str]) -> Iterator[tuple[Weights, Gradient]]:
        """These as vectors, and what they were on every rank. They are no longer counted as still."""
        for dtype in dict.fromkeys(self._values[name].dtype for name in names):
            chosen = tuple(name for name in names if self._values[name].dtype == dtype)
            for name in chosen:
                self._check(name)
            before = tuple(flat(self._values.pop(name)) for name in chosen)
            layout = tuple((name, piece.numel()) for name, piece in zip(chosen, before, strict=True))
            yield self._weights(chosen, dtype), Gradient(layout, before)

    def known(self, names: Iterable[str]) -> list[str]:
        """These, if they are buffers of this model."""
        names = list(names)
        missing = [name for name in names if name not in self._values]
        if missing:
            raise CheckpointError(f"this state is of another model: this one has no {missing[0]}.")
        return names

    def state_dict(self) -> dict[str, Tensor]:
        return {name: self._get(self._paths[name]).detach().clone() for name in self._values}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue with these still, and all others for somebody to `take`."""
        self.restart()
        for name, value in state.items():
            if name not in self._values or self._values[name].shape != value.shape:
                raise CheckpointError(f"this state is of another model: this one has no {name} of {list(value.shape)}.")
            self._get(self._paths[name]).detach().copy_(value)
            self._values[name].copy_(value)

    def _weights(self, names: tuple[str, ...], dtype: torch.dtype) -> Weights:
        paths = [self._paths[name] for name in names]
        return Weights(names, lambda: [self._get(path) for path in paths], dtype, dense=True)

    def _get(self, path: str) -> Tensor:
        return self._module.get_buffer(path)

    def _check(self, name: str) -> None:
        now, before = self._get(self._paths[name]), self._values[name]
        if now.shape != before.shape or now.dtype != before.dtype or not is_dense(now):
            raise UnsupportedError(
                f"{name} was {before.dtype} of {list(before.shape)} and is {now.dtype} of {list(now.shape)}: it cannot "
                "be averaged over ranks. Keep it as a plain attribute of the module if every rank may have its own."
            )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Also of NaN and Inf, as a mask may hold."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))
