"""Who takes part in the step benchmark: every way to synchronise a DDP model that a user might pick instead of ours.

A contender is named as in tables: "floor", "ddp dense", "ddp fp16", "powersgd 1", or one of ours, with its wire format:
"oktopk bfloat16". A third word says how gradients are handed over: "fused" reduces DDP's buckets as one vector at the
end of backward, "single" is one bucket for all of the gradient, "optimizer" is `DistributedOptimizer` around a plain
loop, also as one vector; without it, DDP's buckets one by one. The last word may be "flat": every rank reduces for
itself, where otherwise those of a host sum densely first.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.algorithms import ALGORITHMS
from oktopk.config import AUTO, WIRES
from oktopk.errors import ConfigError, nearest
from oktopk.front_ends.ddp import register
from oktopk.front_ends.optimizer import DistributedOptimizer
from oktopk.front_ends.options import Fuse
from oktopk.reducer import Reducer
from oktopk.reduction.autotune import AutoConfig, trials, wire_trials
from oktopk.reduction.streams import future_on

BASELINES = ("floor", "ddp dense", "ddp fp16", "powersgd 1", "powersgd 4")
ONE_LINE = "register"  # oktopk.register(ddp, density=...) and nothing else
CHOICES = ("oktopk bfloat16 fused", "oktopk int8 fused", "oktopk bfloat16", "oktopk int8")  # of the one line, 27.57 M
OURS = (
    *(f"{algorithm} float32" for algorithm in ALGORITHMS),
    *(f"oktopk {wire}" for wire in ("float16", "bfloat16", "int8", "int4")),
    "oktopk bfloat16 fused",
    "oktopk int8 fused",
    AUTO,
    ONE_LINE,  # from here on last, because they make the process keep its memory
    "oktopk bfloat16 optimizer",
    "oktopk int8 optimizer",
)
EVERYONE = (*BASELINES, *OURS)
DEFAULT_CAP_MB = 25  # DDP's own
SINGLE_BUCKET_MB = 1_000_000
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Attached:
    """A model that is synchronised in one way."""

    model: nn.Module
    optimizer: Optimizer
    bucket_mb: int  # of what is reduced as one vector
    warmup: int  # steps until it does what it does for the rest of its life
    sent: Callable[[], int]  # bytes this rank sent in the last step by its own account; -1 if it keeps none
    phases: Callable[[], dict[str, float]] = field(default=dict)
    close: Callable[[], None] = field(default=lambda: None)


def attach(
    name: str, model: nn.Module, density: float, cap_mb: int = DEFAULT_CAP_MB, ranks_per_host: int = 1
) -> Attached:
    """Wrap the model so that it is synchronised as `name` says."""
    kind, *details = name.split() if name != AUTO else (AUTO, "float32")
    if kind == "floor":
        return _floor(model, cap_mb)
    if kind == "ddp":
        return _builtin(model, details[0], cap_mb)
    if kind == "powersgd":
        return _powersgd(model, int(details[0]))
    hosts = 1 if "flat" in details else ranks_per_host
    if name == ONE_LINE:
        return _one_line(model, density, cap_mb)
    if "optimizer" in details:
        return _our_optimizer(model, kind, details[0], density, hosts)
    cap_mb = SINGLE_BUCKET_MB if "single" in details else cap_mb
    # Said, not left to `register`: where ranks share cores it would choose one vector, and no row would be of buckets.
    return _ours(model, kind, details[0], density, cap_mb, "step" if "fused" in details else "bucket", hosts)


def require_known(names: Iterable[str]) -> None:
    """Refuse names that `attach` would not understand, before any process is started."""
    hows = ("", " single", " fused", " optimizer")
    ours = {f"{name} {wire}{how}{f}" for name in ALGORITHMS for wire in WIRES for how in hows for f in ("", " flat")}
    for name in names:
        if name not in ours and name not in EVERYONE:
            raise ConfigError(f"unknown contender {name!r}. {nearest(name, ours | set(EVERYONE))}")


def _no_synchronisation(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = future_on(bucket.buffer().device)
    done.set_result(bucket.buffer())
    return done


def _floor(model: nn.Module, cap_mb: int) -> Attached:
    ddp = _ddp(model, cap_mb)
    ddp.register_comm_hook(None, _no_synchronisation)
    return Attached(ddp, _sgd(ddp), cap_mb, 2, lambda: 0)


def _builtin(model: nn.Module, values: str, cap_mb: int) -> Attached:
    ddp = _ddp(model, cap_mb)
    width = 2 if values == "fp16" else 4
    if values == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    ranks = dist.get_world_size()
    numel = sum(parameter.numel() for parameter in model.parameters())
    return Attached(ddp, _sgd(ddp), cap_mb, 1, lambda: 2 * width * numel * (ranks - 1) // ranks)


def _powersgd(model: nn.Module, rank: int) -> Attached:
    # With two buckets or more the hook starts collectives on Gloo's callback threads, in any order, and hangs.
    ddp = _ddp(model, SINGLE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Attached(ddp, _sgd(ddp), SINGLE_BUCKET_MB, 3, lambda: -1)


def _ours(model: nn.Module, algorithm: str, wire: str, density: float, cap_mb: int, fuse: Fuse, hosts: int) -> Attached:
    ddp = _ddp(model, cap_mb)
    reducer = register(ddp, algorithm, density, wire=wire, fuse=fuse, hosts=hosts)
    # DDP changes its buckets after the first step; what is chosen by trying must have been chosen.
    warmup = 2 + (trials(AutoConfig()) if algorithm == AUTO else 0)
    return _watched(ddp, _sgd(ddp), SINGLE_BUCKET_MB if fuse == "step" else cap_mb, warmup, reducer)


def _one_line(model: nn.Module, density: float, cap_mb: int) -> Attached:
    ddp = _ddp(model, cap_mb)
    reducer = register(ddp, density=density)
    return _watched(ddp, _sgd(ddp), cap_mb, 2 + wire_trials(), reducer)


def _our_optimizer(model: nn.Module, algorithm: str, wire: str, density: float, hosts: int) -> Attached:
    optimizer = DistributedOptimizer(
        _sgd(model), model, algorithm, density, wire=wire, fuse="step", keep_memory=True, hosts=hosts
    )
    return _watched(model, optimizer, SINGLE_BUCKET_MB, 2, optimizer.reducer)


def _watched(model: nn.Module, optimizer: Optimizer, bucket_mb: int, warmup: int, reducer: Reducer) -> Attached:
    return Attached(
        model,
        optimizer,
        bucket_mb,
        warmup,
        lambda: int(reducer.last_step.bytes_sent),
        lambda: dict(reducer.last_step.seconds),
        reducer.close,
    )


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _ddp(model: nn.Module, cap_mb: int) -> DistributedDataParallel:
    # Every rank builds the model from the same seed, so nothing needs to be broadcast over a slow link.
    return DistributedDataParallel(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True, init_sync=False)
