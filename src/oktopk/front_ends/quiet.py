"""DDP and scalers that let a rank step by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.errors import UnsupportedError
from oktopk.front_ends.weights import unwrap_optimizer

log = logging.getLogger("oktopk")


_REDUCED_ONCE = "_static_graph_delay_allreduce_enqueued"


class QuietDDP:
    """DDP that neither reduces gradients nor broadcasts buffers, also when somebody turns that on again."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        # With a static graph DDP reduces once at the end of its first backward, unless it thinks that it has.
        self._had_reduced = ddp.__dict__.get(_REDUCED_ONCE)
        if self._had_reduced is not None:
            setattr(ddp, _REDUCED_ONCE, True)
        self._hook = ddp.register_forward_pre_hook(self)
        self(ddp, ())

    def __call__(self, ddp: nn.Module, _: Any) -> None:
        self._ddp.require_backward_grad_sync = self._ddp.require_forward_param_sync = False
        if self._ddp._join_config.enable:
            raise UnsupportedError(
                "join() lets ranks take different numbers of steps, and local_steps needs the same on every rank: give "
                "each as many batches, as torch's DistributedSampler does."
            )

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _WokenDDP, ()

    def end(self) -> None:
        self._hook.remove()
        self._ddp.require_backward_grad_sync = self._ddp.require_forward_param_sync = True
        if self._had_reduced is not None:
            setattr(self._ddp, _REDUCED_ONCE, self._had_reduced)


class _WokenDDP:
    """What the hook is in a copy of the module, by `deepcopy` or `torch.save`: that is plain DDP."""

    _is_awake = False

    def __call__(self, ddp: DistributedDataParallel, _: Any) -> None:
        if self._is_awake:
            return
        self._is_awake = ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
        if _REDUCED_ONCE in ddp.__dict__:
            setattr(ddp, _REDUCED_ONCE, False)


def count_skipped_steps(
    scaler: Any, optimizer: Optimizer, steps: Callable[[], int], skipped: Callable[[], None]
) -> Callable[[], None]:
    """Let a step that the scaler skips on this rank count all the same: others would wait. Returns how to undo that."""
    step = scaler.step

    def counted(given: Optimizer, *args: Any, **kwargs: Any) -> Any:
        before = steps()
        result = step(given, *args, **kwargs)
        if unwrap_optimizer(given) is optimizer and steps() == before:
            skipped()
        return result

    scaler.step = counted

    def undo() -> None:
        scaler.step = step

    return undo
