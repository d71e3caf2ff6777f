"""A GPU that is not there: tensors that say they are on it, and a count of how often the host waits for it.

What is told to it is done on the CPU at once, but for copies to the host: these are done when somebody waits. A tensor
of the host among tensors of the device is an error, as it is on a real one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from oktopk.kernels import staging, triton, triton_search
from oktopk.reduction import communication
from oktopk.transport import ThreadTransport

GPU = torch.device("cuda", 0)

# What cannot go on before the device has answered.
WAITS = {
    "item", "tolist", "cpu", "numpy", "nonzero", "unique", "equal", "allclose", "masked_select", "__bool__",
    "__float__", "__int__", "__index__", "__contains__", "is_nonzero", "argwhere",
}  # fmt: skip
FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_like", "zeros_like"}


@dataclass
class Gpu:
    """What happened on it, by rank: ranks of a thread world have one each."""

    waits: dict[str, list[str]] = field(default_factory=dict)  # by thread
    log: list[str] = field(default_factory=list)

    def wait(self, why: str) -> None:
        self.waits.setdefault(threading.current_thread().name, []).append(why)


class OnGpu(torch.Tensor):
    """A tensor of the device."""

    def record_stream(self, stream: Any) -> None:
        assert _GPU is not None
        _GPU.log.append(f"{stream._name} holds memory")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


class Telling(TorchFunctionMode):
    """Lets a thread make tensors on the device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


_PROPERTIES = {
    "is_available": True, "device_count": 1, "set_device": None, "get_device_name": "a GPU that is not there",
    "memory_allocated": 1000, "max_memory_allocated": 3000, "memory_reserved": 4000,
}  # fmt: skip
_GPU: Gpu | None = None
_PENDING: list[tuple[Tensor, Tensor]] = []


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    owner = getattr(func, "__self__", None)
    if name == "__get__" and isinstance(args[0], OnGpu):
        known = {torch.Tensor.device: GPU, torch.Tensor.is_cuda: True, torch.Tensor.is_cpu: False}
        for attribute, value in known.items():
            if owner is attribute:
                return value
    leaves = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    on_gpu = any(isinstance(leaf, OnGpu) for leaf in leaves)
    to_gpu = _target(name, args, kwargs)
    if name == "copy_":
        return _copy(*args, **kwargs)
    if name in ("_parse_to", "_has_compatible_shallow_copy_type"):  # of nn.Module.to: only look at what they are given
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)
    if name == "backward":  # hooks run inside, and must see tensors of the device
        return torch.autograd.backward(_plain(args[0]))
    if on_gpu and name != "__get__":
        _check_alone(name, tree_leaves((args[:-1] if name == "__setitem__" else args, dict(kwargs))))
        _check_wait(name, args, to_gpu)
    with torch._C.DisableTorchFunction():
        result = func(*tree_map(_plain_device, args), **tree_map(_plain_device, dict(kwargs)))
        if name in ("to", "cpu") and to_gpu is not on_gpu:
            result = result.clone()  # elsewhere
    if args and result is args[0]:
        return result
    stays = on_gpu and name not in ("cpu", "numpy") if to_gpu is None else to_gpu
    return tree_map(lambda x: x.as_subclass(OnGpu) if stays and type(x) is Tensor else x, result)


def _target(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool | None:
    """Whether the result is asked to be on the device; None: it is not said."""
    given = [*args[1:], *kwargs.values()] if name == "to" else [kwargs.get("device")]
    for value in given:
        if isinstance(value, (torch.device, str)):
            return torch.device(value).type == "cuda"
    return None


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between device and host, or within one of them."""
    plain = _plain(target)
    if isinstance(source, OnGpu) and not isinstance(target, OnGpu):
        if non_blocking:
            plain.reshape(-1).view(torch.uint8).fill_(0x77)  # nobody may read it yet
            _PENDING.append((plain, _plain(source)))
            return target
        assert _GPU is not None
        _GPU.wait("copy_")
    with torch._C.DisableTorchFunction():
        plain.copy_(_plain(source))
    return target


def _check_alone(name: str, leaves: list[Any]) -> None:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    strangers = [tensor for tensor in tensors if not isinstance(tensor, OnGpu) and tensor.dim() > 0]
    assert not strangers, f"{name} of tensors on the device and on the host"


def _check_wait(name: str, args: tuple[Any, ...], to_gpu: bool | None) -> None:
    assert _GPU is not None
    masks = name in ("__getitem__", "__setitem__") and any(
        isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
    )
    if name in WAITS or masks or (name == "to" and to_gpu is False):
        _GPU.wait(name)


def _plain(x: Any) -> Any:
    return x.as_subclass(torch.Tensor) if isinstance(x, OnGpu) else x


def _plain_device(x: Any) -> Any:
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == "cuda" else x


def to_gpu(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnGpu)


def _refusing(verb: Any) -> Any:
    """A verb of a transport, which takes tensors of the host as Gloo does."""

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        on_gpu = any(isinstance(leaf, OnGpu) for leaf in tree_leaves((args, kwargs)))
        assert not on_gpu or self.world_size == 1, "a message on the device"
        return verb(self, *args, **kwargs)

    return checked


def to_host(tensor: Tensor) -> Tensor:
    """What a tensor holds, without a count."""
    return _plain(tensor).clone()


class _Stream:
    """Only says what it is told."""

    def __init__(self, gpu: Gpu, name: str = "own") -> None:
        self._gpu, self._name = gpu, name

    def record_event(self) -> str:
        self._gpu.log.append(f"{self._name} records")
        return f"event of {self._name}"

    def wait_event(self, event: str) -> None:
        self._gpu.log.append(f"{self._name} waits for {event}")

    def synchronize(self) -> None:
        self._gpu.wait("synchronize")


class _Future(torch.futures.Future):
    """One of a device, that says when it is settled."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def set_result(self, result: Any) -> None:
        self._gpu.log.append(f"settled on {_CURRENT.name}")
        super().set_result(result)


class _Current(threading.local):
    name = "default"


_CURRENT = _Current()


def _apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """As torch's, but what it moves becomes a tensor of the device, and not only its memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
        return _APPLY(module, fn, recurse)


_APPLY = torch.nn.Module._apply


@contextmanager
def fake_gpu() -> Iterator[Gpu]:
    """A device for the tests of this thread and of communication threads."""
    global _GPU
    _GPU = gpu = Gpu()
    lock, launch, begin = threading.RLock(), triton_search.launch, _Stream.__init__

    @contextmanager
    def stream(which: _Stream) -> Iterator[None]:
        before, _CURRENT.name = _CURRENT.name, which._name
        try:
            with Telling():
                yield
        finally:
            _CURRENT.name = before

    def wait_for(device: torch.device) -> None:
        gpu.wait("wait")
        while _PENDING:
            target, source = _PENDING.pop(0)
            target.copy_(source)

    def locked_launch(*args: Any, **options: Any) -> None:
        with lock:  # the interpreter has one place for the number of a program
            launch(*map(_plain, args), **options)

    def pinned(like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    with pytest.MonkeyPatch.context() as patch, Telling():
        patch.setattr(staging, "_pinned", pinned)
        patch.setattr(staging, "_wait_for", wait_for)
        for module in (triton, triton_search):
            patch.setattr(module, "launch", locked_launch)
        for verb in ("all_reduce_", "all_gather", "all_to_all", "exchange"):
            patch.setattr(ThreadTransport, verb, _refusing(getattr(ThreadTransport, verb)))
        for name, value in _PROPERTIES.items():
            patch.setattr(torch.cuda, name, lambda *_, value=value: value)
        patch.setattr(torch.nn.Module, "_apply", _apply)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream(gpu, _CURRENT.name))
        patch.setattr(torch.cuda, "Stream", type("Stream", (_Stream,), {"__init__": lambda self, _: begin(self, gpu)}))
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(communication, "future_on", lambda device: _Future(gpu))
        yield gpu
    _GPU = None
