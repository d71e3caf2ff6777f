"""Streams of the thread that communicates: it neither waits in the queue of the backward pass nor holds that up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor

Turn = Callable[[], AbstractContextManager[None]]


class Streams:
    """One of each GPU that a reducer has met. Other devices do what they are told in order, whoever tells them."""

    def __init__(self) -> None:
        self._own: dict[torch.device, torch.cuda.Stream] = {}

    def turn(self, tensors: Sequence[Tensor]) -> Turn:
        """A context for the communication thread, in which a device has done all that it was told so far.

        To be asked for by the thread that told it to write `tensors`. Nobody waits on the host: the stream does.
        """
        device = tensors[0].device
        if device.type != "cuda":
            return nullcontext
        written = torch.cuda.current_stream(device).record_event()

        @contextmanager
        def turn() -> Iterator[None]:
            stream = self._of(device)
            stream.wait_event(written)
            for tensor in tensors:
                tensor.record_stream(stream)  # whoever frees it, it is not handed out again before we are done
            with torch.cuda.stream(stream):
                yield

        return turn

    @contextmanager
    def turn_of_all(self) -> Iterator[None]:
        """A context for the communication thread and for work on what is kept, wherever that is."""
        with ExitStack() as stack:
            for stream in self._own.values():
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def finish(self) -> None:
        """Wait for all that was begun: then its results are there for every thread."""
        for stream in self._own.values():
            stream.synchronize()

    def _of(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._own:
            self._own[device] = torch.cuda.Stream(device)
        return self._own[device]


def future_on(device: torch.device) -> torch.futures.Future:
    """A future for something on `device`: torch wants to know devices that have streams."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)
