"""Gradients that the ranks of a host average before each step: the host is then one worker, with one set of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from oktopk.errors import UnsupportedError
from oktopk.front_ends.weights import Weights, flat, trained_by, unwrap_optimizer
from oktopk.reducer import Reducer
from oktopk.reduction.gradient import Gradient
from oktopk.reduction.inside import Inside


class HostGradients:
    """Averages the gradients of each optimizer once before each of its steps. Where ranks are alone it does nothing."""

    def __init__(self, reducer: Reducer, trained: Sequence[Weights], optimizers: Sequence[Optimizer]) -> None:
        self._reducer, self._is_alone = reducer, reducer.hosts.is_flat
        self._names = {id(t): name for vector in trained for name, t in zip(vector.names, vector.tensors, strict=True)}
        self._averaged: set[int] = set()  # optimizers whose next step is going to find means
        self._compared: list[str] = []  # buffers that ranks of the host have found to be alike
        if not self._is_alone and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            raise UnsupportedError(
                "LBFGS evaluates the loss inside a step as often as that loss wants, which differs between ranks of a "
                "host: pass hosts=None."
            )

    def watch(self, trained: Sequence[Weights]) -> Iterator[Callable[[], None]]:
        """See gradients that come after others were averaged: a step was left out, or more is added. How to stop."""
        if self._is_alone:
            return
        for tensor in (tensor for vector in trained for tensor in vector.tensors):
            yield tensor.register_post_accumulate_grad_hook(lambda _: self._averaged.clear()).remove

    def average_(self, optimizer: Optimizer) -> None:
        """Replace gradients by their means over the ranks of this host, unless they are that already."""
        if not self._is_alone and id(optimizer) not in self._averaged:
            self.average_again_(optimizer)

    def average_again_(self, optimizer: Optimizer) -> None:
        """The same whatever they are: they have just been computed."""
        if self._is_alone:
            return
        named = {self._names[id(parameter)]: parameter for parameter in trained_by([optimizer])}
        self._reducer._communicate_inside(lambda inside: _average_(named, inside))
        self._averaged.add(id(optimizer))

    def average_buffers_(self, vectors: Sequence[Weights]) -> None:
        """Of each rank's own batches, so that what a host changed is told by any of its ranks."""
        if self._is_alone or not vectors:
            return
        named = dict(chain.from_iterable(zip(v.names, v.tensors, strict=True) for v in vectors))
        if list(named) != self._compared:  # which are averaged changes on all ranks together
            self._reducer._communicate_inside(lambda inside: inside.said_by_any(named, ()))
            self._compared = list(named)
        self._reducer._communicate_inside(lambda inside: _average_all_(vectors, inside))

    def stepped(self, optimizer: Optimizer) -> None:
        """Its gradients are used up."""
        self._averaged.discard(id(optimizer))

    def before_unscaling(self, scaler: Any) -> Callable[[], None]:
        """Let a scaler see means only: all ranks of a host then skip a step, or none. Returns how to undo that."""
        step, unscale = scaler.step, getattr(scaler, "unscale_", None)

        def stepped(given: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = unwrap_optimizer(given)
            self.average_(optimizer)
            try:
                return step(given, *args, **kwargs)
            finally:
                self.stepped(optimizer)

        def unscaled(given: Any) -> Any:
            self.average_(unwrap_optimizer(given))
            assert unscale is not None
            return unscale(given)

        def undo() -> None:
            scaler.step = step
            if unscale is not None:
                scaler.unscale_ = unscale

        scaler.step = stepped
        if unscale is not None:
            scaler.unscale_ = unscaled
        return undo


def _average_(named: Mapping[str, Tensor], inside: Inside) -> None:
    """Those that some rank of the host has; on others they count as zero, and are there afterwards."""
    some = inside.said_by_any(named, [name for name, parameter in named.items() if parameter.grad is not None])
    chosen = {name: _grad_of(name, parameter) for name, parameter in named.items() if name in some}
    for dtype in dict.fromkeys(grad.dtype for grad in chosen.values()):
        of_dtype = {name: grad for name, grad in chosen.items() if grad.dtype == dtype}
        pieces = tuple(flat(grad) for grad in of_dtype.values())
        inside.average_(Gradient(tuple((name, grad.numel()) for name, grad in of_dtype.items()), pieces))


def _average_all_(vectors: Sequence[Weights], inside: Inside) -> None:
    for vector in vectors:
        inside.average_(vector.own())


def _grad_of(name: str, parameter: Tensor) -> Tensor:
    """In the memory format of its parameter, which is the same on every rank."""
    grad = parameter.grad
    if grad is None:
        grad = parameter.grad = torch.zeros_like(parameter)
    if grad.is_sparse:
        raise UnsupportedError(
            f"the gradient of {name} is sparse, and the ranks of a host average dense ones: use sparse=False, or pass "
            "hosts=None."
        )
    if grad.stride() != parameter.stride() and not (grad.is_contiguous() and parameter.is_contiguous()):
        grad = parameter.grad = torch.empty_like(parameter).copy_(grad)
    return grad
