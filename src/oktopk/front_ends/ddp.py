"""One line for `DistributedDataParallel`: a communication hook.

This module must not postpone its annotations: torch looks at the real ones of `hook`.
"""

import logging
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from oktopk.config import Density
from oktopk.errors import ConfigError, UnsupportedError
from oktopk.front_ends.fusing import Bucket, ByBucket, ByStep, ByTrial, Fusing, Future
from oktopk.front_ends.names import names_of
from oktopk.reducer import Reducer
from oktopk.reduction.communication import future_on
from oktopk.transport import ThreadWorld

log = logging.getLogger("oktopk")

Fuse = Literal["bucket", "step"]


def register(
    module: nn.Module,
    algorithm: str = "oktopk",
    density: Density = 0.01,
    warmup_steps: int = 0,
    *,
    fuse: Fuse | None = None,
    scaler: Any = None,
    **options: Any,
) -> Reducer:
    """Reduce the gradients of a DDP module sparsely; every rank must call this once, before the first backward.

    `fuse="bucket"` reduces each bucket while backward goes on; `fuse="step"` all of them as one vector at its end, as
    in the paper. None means buckets, but with `algorithm="auto"` whichever makes steps shorter. `scaler` is the
    GradScaler, if there is one. Other options are those of `Reducer`.

    >>> import torch, oktopk
    >>> reducer = oktopk.register(torch.nn.Linear(4, 2), density=0.01)  # not DDP: works, and says that it does nothing
    >>> reducer.close()
    """
    state = HookState(module, algorithm, density, warmup_steps, fuse=fuse, scaler=scaler, **options)
    if state.ddp is not None:
        state.ddp.register_comm_hook(state, hook)
    return state.reducer


def hook(state: "HookState", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `ddp.register_comm_hook(oktopk.HookState(ddp), oktopk.hook)`."""
    return state.take(bucket)


class HookState:
    """What `hook` needs to know: the reducer, and the names of the parameters.

    As in torch's own hooks: `ddp.register_comm_hook(oktopk.HookState(ddp, density=0.01), oktopk.hook)`.
    """

    def __init__(
        self,
        module: nn.Module,
        algorithm: str = "oktopk",
        density: Density = 0.01,
        warmup_steps: int = 0,
        *,
        fuse: Fuse | None = None,
        scaler: Any = None,
        **options: Any,
    ) -> None:
        if fuse not in ("bucket", "step", None):
            raise ConfigError(f"fuse must be 'bucket', 'step' or None, got {fuse!r}.")
        self.ddp = _unwrap(module)
        if scaler is not None:
            options.setdefault("on_nonfinite", "skip")
        self.reducer = _make_reducer(self.ddp, algorithm, density, warmup_steps, options)
        self._names = names_of(module if self.ddp is None else self.ddp.module)
        self._used = _watch_use(self.ddp, self._names)
        self._fusing = _fusing(fuse, self.reducer, self._names)
        self._scaler = scaler
        self._pending: list[Future] = []

    def take(self, bucket: GradBucket) -> Future:
        """Start reducing a bucket in place. The future never fails: `backward` itself does, see `_end_step`."""
        if not isinstance(bucket, GradBucket):
            raise _python_reducer()
        if self.ddp is None:
            raise UnsupportedError(
                "this HookState was made from a plain module: make it from the DDP module, HookState(ddp)."
            )
        if not getattr(self.ddp, "_divide_by_initial_world_size", True):
            raise UnsupportedError("join(divide_by_initial_world_size=False) cannot work: the mean is over all ranks.")
        if bucket.index() == 0:
            self._begin_step()
        flat, settled = bucket.buffer(), future_on(bucket.buffer().device)
        reduced = self._fusing.take(self._describe(bucket))
        reduced.add_done_callback(lambda _: settled.set_result(flat))
        self._pending.append(reduced)
        if bucket.is_last():
            self._end_step()
        return settled

    def _describe(self, bucket: GradBucket) -> Bucket:
        layout = [(self._names[id(parameter)], parameter.numel()) for parameter in bucket.parameters()]
        unused = frozenset(name for name, _ in layout if self._used is not None and name not in self._used)
        return Bucket(layout, bucket.buffer(), unused, bucket.index() == 0, bucket.is_last())

    def _begin_step(self) -> None:
        self._pending.clear()
        if self._scaler is not None and self._scaler.is_enabled():
            self.reducer.set_gradient_scale(self._scaler.get_scale())

    def _end_step(self) -> None:
        if self._used is not None:
            self._used.clear()
        if torch._C._current_graph_task_id() == -1:
            self._surface()  # a rank that has left `join` runs its hook outside backward
            return
        # An exception inside a future would reach the training thread without its type, and leave DDP half-way. So the
        # future succeeds, DDP finishes, and then, in a callback queued by a callback and hence after DDP's own, the
        # original exception leaves `backward`.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._surface))

    def _surface(self) -> None:
        pending, self._pending = self._pending, []
        for reduced in pending:
            reduced.wait()


def _unwrap(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP module inside `torch.compile`; None for a module that is not DDP. Refuses what cannot work."""
    module = getattr(module, "_orig_mod", module)
    if not isinstance(module, DistributedDataParallel):
        return None
    if getattr(module, "_use_python_reducer", False):
        raise _python_reducer()
    if module.mixed_precision is not None:
        raise UnsupportedError(
            "DDP's own mixed_precision registers a communication hook of its own, and DDP takes one only. "
            "Use torch.autocast, or convert the model with model.to(torch.bfloat16)."
        )
    if module._comm_hooks:
        raise UnsupportedError(
            "this DDP module already has a communication hook, and DDP takes one only: "
            "call oktopk.register once, and no other register_comm_hook."
        )
    return module


def _python_reducer() -> UnsupportedError:
    return UnsupportedError(
        "torch._dynamo.config.optimize_ddp = 'python_reducer' compiles communication hooks into the graph, where a "
        "sparse all-reduce cannot run. Use the default, optimize_ddp = True."
    )


def _make_reducer(
    ddp: DistributedDataParallel | None, algorithm: str, density: Density, warmup_steps: int, options: dict[str, Any]
) -> Reducer:
    if ddp is None:
        log.warning(
            "nothing is compressed: this is not a DistributedDataParallel module, so its gradients stay on this rank. "
            "Wrap it in DDP before oktopk.register, or use oktopk.DistributedOptimizer."
        )
        options = {**options, "group": ThreadWorld(1).transports()[0]}
    elif dist.get_world_size(ddp.process_group) == 1:
        log.warning("nothing is compressed: the world has one rank, so gradients are left as they are.")
        warmup_steps = _FOREVER
    options.setdefault("group", None if ddp is None else ddp.process_group)
    return Reducer(algorithm, density, warmup_steps=warmup_steps, **options)


def _fusing(fuse: Fuse | None, reducer: Reducer, names: dict[int, str]) -> Fusing:
    if fuse == "step":
        return ByStep(reducer, names)
    return (
        ByBucket(reducer)
        if fuse == "bucket" or reducer._pipeline.tuner is None
        else ByTrial(reducer, reducer._pipeline.tuner, names)
    )


_FOREVER = 2**62  # steps


def _watch_use(ddp: DistributedDataParallel | None, names: dict[int, str]) -> set[str] | None:
    """Which parameters took part in backward since the last synchronisation, kept up by hooks; None if all must."""
    if ddp is None or not (ddp.find_unused_parameters or ddp.static_graph):
        return None
    used: set[str] = set()
    for parameter in ddp.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: used.add(names[id(p)]))
    return used
