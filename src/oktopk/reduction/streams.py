"""Streams of the thread that communicates: it neither waits in the queue of the backward pass nor holds that up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
JobContext = Callable[[], AbstractContextManager[None]]


class Streams:
    """One of each GPU that a reducer has met. Other devices do what they are told in order, whoever tells them."""

    def __init__(self) -> None:
        self._own: dict[torch.device, torch.cuda.Stream] = {}

    def after(self, tensors: Sequence[Tensor]) -> JobContext:
        """A context for the communication thread, in which a device has done all that it was told so far.

        To be asked for by the thread that told it to write `tensors`. Nobody waits on the host: the stream does.
        """
        # Several only if somebody makes a mistake, which all ranks shall hear of in the usual way.
        devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type == "cuda")
        if not devices:
            return nullcontext
        return self._context({device: _event(device) for device in devices}, tensors)

    def after_all(self) -> JobContext:
        """The same for work on anything, wherever it is: on the GPUs met so far, and on the caller's."""
        devices = dict.fromkeys(self._own)
        if torch.cuda.is_initialized():
            devices[torch.device("cuda", torch.cuda.current_device())] = None
        return self._context({device: _event(device) for device in devices})

    def hand_over(self, result: T) -> T:
        """Let the caller's streams have the tensors of a result: their memory is handed out again after these."""
        for tensor in _tensors_in(result):
            if tensor.device.type == "cuda":
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return result

    def finish(self) -> None:
        """Wait for all that was begun: then its results are there for every thread."""
        for stream in self._own.values():
            stream.synchronize()

    def _context(self, told: Mapping[torch.device, torch.cuda.Event], tensors: Sequence[Tensor] = ()) -> JobContext:
        @contextmanager
        def context() -> Iterator[None]:
            with ExitStack() as stack:
                for device, event in told.items():
                    stream = self._of(device)
                    stream.wait_event(event)
                    for tensor in tensors:
                        if tensor.device == device:
                            tensor.record_stream(stream)  # whoever frees it, nobody gets it before we are done
                    stack.enter_context(torch.cuda.stream(stream))
                yield

        return context

    def _of(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._own:
            self._own[device] = torch.cuda.Stream(device)
        return self._own[device]


def future_on(device: torch.device) -> torch.futures.Future:
    """A future for something on `device`: torch takes results only on devices that it was told of."""
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def _event(device: torch.device) -> torch.cuda.Event:
    """Of all that the caller's stream was told."""
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors_in(part)
