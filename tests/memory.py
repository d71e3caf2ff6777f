"""How much memory torch takes in a while."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Peak:
    nbytes: int = 0
    now: int = 0


class _Watch(TorchDispatchMode):
    """Sees every storage that an operation makes, and when it goes."""

    def __init__(self, peak: Peak, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._peak, self._known = peak, {_storage(tensor)._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage(leaf)._cdata not in given | self._known:
                self._take(_storage(leaf))
        return result

    def _take(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self._peak.now += nbytes
        self._peak.nbytes = max(self._peak.nbytes, self._peak.now)
        weakref.finalize(storage, self._give, key, nbytes)

    def _give(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._peak.now -= nbytes


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


@contextmanager
def peak_of_new_memory(*known: torch.Tensor) -> Iterator[Peak]:
    """The most bytes that were in use at a time, of those taken since the beginning and not by `known` tensors."""
    peak = Peak()
    with _Watch(peak, known):
        yield peak
