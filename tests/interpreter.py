"""Triton's interpreter, without its greatest expense, and with an eye on memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from oktopk.kernels import triton, triton_loops, triton_search


@contextmanager
def patched_once() -> Iterator[None]:
    """The interpreter replaces the whole language at every call of a function; once is enough, and much faster."""
    scopes = [interpreter._patch_lang(function.fn) for function in (triton_loops.scan, tl.standard.zeros)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())
        yield
    for scope in reversed(scopes):
        scope.restore()


@dataclass
class Traffic:
    """How many entries of some tensors were read and written."""

    read: int = 0
    written: int = 0


@contextmanager
def counted_traffic(*tensors: torch.Tensor) -> Iterator[Traffic]:
    """Counts loads from these tensors and stores to them. Whatever else a kernel touches must be its argument."""
    traffic, launch = Traffic(), triton_search.launch
    load, store = interpreter._interpreter.load, interpreter._interpreter.store
    counted, allowed = [_range(tensor) for tensor in tensors], []

    def touched(pointers: np.ndarray, mask: np.ndarray) -> int:
        addresses = pointers[mask]
        known = np.zeros(addresses.shape, bool)
        for first, end in allowed:
            known |= (addresses >= first) & (addresses < end)
        assert known.all(), "a kernel leaves the tensors that it was given"
        return sum(int(((addresses >= first) & (addresses < end)).sum()) for first, end in counted)

    def count_load(pointers: np.ndarray, mask: np.ndarray, *rest: Any) -> Any:
        traffic.read += touched(pointers, mask)
        return load(pointers, mask, *rest)

    def count_store(pointers: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        traffic.written += touched(pointers, mask)
        return store(pointers, value, mask)

    def watched_launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        allowed[:] = counted + [_range(arg) for arg in args if isinstance(arg, torch.Tensor)]
        launch(kernel, programs, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", SimpleNamespace(**vars(interpreter._interpreter)))
        patch.setattr(interpreter._interpreter, "load", count_load)
        patch.setattr(interpreter._interpreter, "store", count_store)
        for module in (triton, triton_search):
            patch.setattr(module, "launch", watched_launch)
        yield traffic


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
