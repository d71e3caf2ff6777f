"""One line for `DistributedDataParallel`: a communication hook.

This module must not postpone its annotations: torch looks at the real ones of `hook`.
"""

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from oktopk.config import AUTO, Density
from oktopk.errors import ConfigError, OkTopkError, UnsupportedError
from oktopk.front_ends.advice import advise_at_first_step, is_worth_advice
from oktopk.front_ends.attached import AttachedReducer
from oktopk.front_ends.bucket_reduction import BucketReduction, UsedParameters
from oktopk.front_ends.clipping import NormClip, require_limit
from oktopk.front_ends.defaults import (
    FOREVER,
    NAMES,
    default_algorithm,
    default_fuse,
    default_rival,
    default_wire,
    trained_numel,
)
from oktopk.front_ends.fusing import ByBucket, ByStep, ByTrial, Fusing, Future
from oktopk.front_ends.memory import keep_freed_memory
from oktopk.front_ends.options import FrontEndOptions, Fuse
from oktopk.front_ends.parameters import Named, named_parameters, refuse_unsupported
from oktopk.transport import ThreadWorld
from oktopk.transport.links import is_process_group

log = logging.getLogger("oktopk")


def register(
    module: nn.Module,
    algorithm: str | None = None,
    density: Density = 0.01,
    warmup_steps: int = 0,
    *,
    fuse: Fuse | None = None,
    norm_clip: float | None = None,
    keep_memory: bool | None = None,
    scaler: Any = None,
    **options: Unpack[FrontEndOptions],
) -> AttachedReducer:
    """Reduce the gradients of a DDP module sparsely; every rank must call this, before a backward.

    What is not given is chosen. `algorithm` is "oktopk", but "topka" for small models and few ranks, where a round
    costs more than it saves: by rule, and by trying where both may be right. For models of a million parameters and
    more: `wire` by trying float32, bfloat16 and int8 in the first 12 to 16 sparse steps, `fuse` by whether ranks have
    processors of their own. Rank 0 logs what and why: `logging.getLogger("oktopk").setLevel("INFO")`;
    `reducer.algorithm` and `reducer.decisions` tell too.
    `fuse="bucket"` reduces each bucket while backward goes on; `fuse="step"` all of them as one vector at its end, as
    in the paper. With `algorithm="auto"` both are tried, and dense steps too. `keep_memory` lets the process keep what
    it frees (glibc only), so that gradients do not come in fresh memory every step: by default only where ranks share
    cores and `fuse` was chosen; False leaves it as it is.
    `norm_clip` limits the norm of each rank's gradient before it is sent, divided by the root of the world size as in
    Deep Gradient Compression. All gradients must be known for that, so it means `fuse="step"`. `scaler` is the
    GradScaler, if there is one. Other options are those of `Reducer`.

    Closing the reducer (it is a context manager too) takes it off: the module goes on as plain DDP, and may be
    registered again. Copies of the module, by `copy.deepcopy` or `torch.save`, are plain DDP.

    >>> import torch, oktopk
    >>> reducer = oktopk.register(torch.nn.Linear(4, 2), density=0.01)  # not DDP: works, and says that it does nothing
    >>> reducer.close()
    """
    state = HookState(
        module, algorithm, density, warmup_steps, fuse=fuse, norm_clip=norm_clip, keep_memory=keep_memory,
        scaler=scaler, **options,
    )  # fmt: skip
    reducer, ddp = state.reducer, _unwrap(module)
    if ddp is not None:
        _install(ddp, state)
        if reducer.world_size > 1 and is_worth_advice(reducer.algorithm, reducer.config, reducer.rank):
            reducer.on_close(advise_at_first_step(ddp.parameters()).remove)
    return reducer


def hook(state: "HookState", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `ddp.register_comm_hook(oktopk.HookState(ddp), oktopk.hook)`."""
    return state.take(bucket)


class HookState:
    """What `hook` needs to know: the reducer, and the names of the parameters.

    As in torch's own hooks: `ddp.register_comm_hook(oktopk.HookState(ddp, density=0.01), oktopk.hook)`. Options are
    those of `register`. When the reducer is closed, the hook does what DDP does without one.
    """

    def __init__(
        self,
        module: nn.Module,
        algorithm: str | None = None,
        density: Density = 0.01,
        warmup_steps: int = 0,
        *,
        fuse: Fuse | None = None,
        norm_clip: float | None = None,
        keep_memory: bool | None = None,
        scaler: Any = None,
        **options: Unpack[FrontEndOptions],
    ) -> None:
        ddp = _unwrap(module)
        if ddp is not None:
            _refuse(ddp)
        # Weakly: DDP holds its hook through C++, where no garbage collector looks for a circle.
        self._ddp = weakref.ref(ddp) if ddp is not None else None
        self._group = ddp.process_group if ddp is not None else None
        fuse = _checked(fuse, norm_clip)
        parameters = named_parameters(module) if ddp is None else _reduced_by(ddp)
        refuse_unsupported(parameters, module, in_one_vector=fuse == "step")
        if scaler is not None:
            options.setdefault("on_nonfinite", "skip")
        name, why = "oktopk" if algorithm is None else algorithm, ""
        options.setdefault("wire", default_wire(name, parameters) if ddp is not None else "float32")
        if algorithm is None and ddp is not None and options["wire"] != AUTO:
            name, why = default_algorithm(*_asked(ddp, parameters, density, options))
        reducer = _make_reducer(ddp, name, density, warmup_steps, options)
        reducer._pipeline.is_algorithm_fixed = algorithm is not None
        if algorithm is None and ddp is not None and reducer._pipeline.tuner is not None:
            reducer._pipeline.tuner.rival = default_rival(*_asked(ddp, parameters, density, options))
        said = [f"{name} ({why})"] if why else []
        if fuse is None and name != AUTO:
            fuse, how = _chosen_fuse(parameters, reducer, keep_memory)
            said.append(how)
        elif keep_memory:
            keep_freed_memory()
        _say(said, reducer)
        names = {id(parameter): name for name, parameter in parameters}
        clip = NormClip(norm_clip, reducer.world_size, scaler) if norm_clip is not None else None
        fusing = _fusing(fuse, clip, reducer, names)
        is_watched = ddp is not None and (ddp.find_unused_parameters or ddp.static_graph)
        self._use(BucketReduction(reducer, names, fusing, UsedParameters(parameters) if is_watched else None, scaler))

    @property
    def reducer(self) -> AttachedReducer:
        """The reducer in use; there is none after it was closed."""
        if self._reduction is None:
            raise OkTopkError("the reducer of this hook is closed: oktopk.register(ddp, ...) makes a new one.")
        return self._reduction.reducer

    @property
    def is_closed(self) -> bool:
        return self._reduction is None

    def take(self, bucket: GradBucket) -> Future:
        """Start reducing a bucket in place. The future never fails: `backward` itself does, with the error's type."""
        if not isinstance(bucket, GradBucket):
            raise _python_reducer()
        if self._ddp is None:
            raise UnsupportedError(
                "this HookState was made from a plain module: make it from the DDP module, HookState(ddp)."
            )
        if not getattr(self._ddp(), "_divide_by_initial_world_size", True):
            raise UnsupportedError("join(divide_by_initial_world_size=False) cannot work: the mean is over all ranks.")
        if self._reduction is None:
            assert self._group is not None
            return allreduce_hook(self._group, bucket)
        return self._reduction.take(bucket)

    def take_over(self, other: "HookState") -> None:
        """Use the reducer of another state from now on: DDP keeps the state that it was given first."""
        assert self._reduction is None and other._reduction is not None
        reduction, other._reduction = other._reduction, None
        self._use(reduction)

    def _use(self, reduction: BucketReduction) -> None:
        self._reduction: BucketReduction | None = reduction
        reduction.reducer.on_close(self._let_go)

    def _let_go(self) -> None:
        if self._reduction is not None:
            self._reduction.detach()
        self._reduction = None

    def __reduce__(self) -> tuple[Callable[[], "HookOfTheOriginal"], tuple[()]]:
        """A copy of a DDP module has no hook, and its own C++ part has none either."""
        return HookOfTheOriginal, ()


class HookOfTheOriginal:
    """Stands in a copied DDP module where the original has its hook."""


def _unwrap(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP module inside `torch.compile`; None for a module that is not DDP."""
    module = getattr(module, "_orig_mod", module)
    return module if isinstance(module, DistributedDataParallel) else None


def _refuse(ddp: DistributedDataParallel) -> None:
    """Refuse what cannot work."""
    if getattr(ddp, "_use_python_reducer", False):
        raise _python_reducer()
    if ddp.mixed_precision is not None:
        raise UnsupportedError(
            "DDP's own mixed_precision registers a communication hook of its own, and DDP takes one only. "
            "Use torch.autocast, or convert the model with model.to(torch.bfloat16)."
        )
    for _, state in ddp._comm_hooks:
        if isinstance(state, HookOfTheOriginal) or (isinstance(state, HookState) and state.is_closed):
            continue
        raise UnsupportedError(
            "this DDP module already has a communication hook, and DDP takes one only: call oktopk.register once, or "
            "close the reducer that it returned before, and no other register_comm_hook."
        )


def _install(ddp: DistributedDataParallel, state: HookState) -> None:
    """Make DDP call a state, or, since it takes one only, a closed one before it act as this."""
    for _, known in ddp._comm_hooks:
        if isinstance(known, HookState):
            return known.take_over(state)
    return ddp.register_comm_hook(state, hook)


def _python_reducer() -> UnsupportedError:
    return UnsupportedError(
        "torch._dynamo.config.optimize_ddp = 'python_reducer' compiles communication hooks into the graph, where a "
        "sparse all-reduce cannot run. Use the default, optimize_ddp = True."
    )


def _checked(fuse: Fuse | None, norm_clip: float | None) -> Fuse | None:
    """How buckets are fused; all gradients must be known to clip them."""
    if fuse not in ("bucket", "step", None):
        raise ConfigError(f"fuse must be 'bucket', 'step' or None, got {fuse!r}.")
    if norm_clip is not None:
        require_limit("norm_clip", norm_clip)
    if norm_clip is not None and fuse == "bucket":
        raise ConfigError(
            "norm_clip must know all gradients of a step, and fuse='bucket' sends the first while backward computes "
            "the last: use fuse='step', or leave fuse out."
        )
    return "step" if norm_clip is not None else fuse


def _reduced_by(ddp: DistributedDataParallel) -> list[Named]:
    return named_parameters(ddp.module, ddp.parameters_to_ignore)


def _make_reducer(
    ddp: DistributedDataParallel | None, algorithm: str, density: Density, warmup_steps: int, options: FrontEndOptions
) -> AttachedReducer:
    if ddp is None:
        log.warning(
            "nothing is compressed: this is not a DistributedDataParallel module, so its gradients stay on this rank. "
            "Wrap it in DDP before oktopk.register, or use oktopk.DistributedOptimizer."
        )
        options = {**options, "group": ThreadWorld(1).transports()[0]}
    elif dist.get_world_size(ddp.process_group) == 1:
        log.warning("nothing is compressed: the world has one rank, so gradients are left as they are.")
        warmup_steps = FOREVER
    options.setdefault("group", None if ddp is None else ddp.process_group)
    return AttachedReducer(algorithm, density, warmup_steps=warmup_steps, **options)


def _asked(
    ddp: DistributedDataParallel, parameters: list[Named], density: Density, options: FrontEndOptions
) -> tuple[int, int, Density, FrontEndOptions]:
    """What the choice of an algorithm goes by."""
    group: Any = options.get("group") or ddp.process_group
    ranks = group.size() if is_process_group(group) else group.world_size
    return trained_numel(parameters), ranks, density, options


def _chosen_fuse(parameters: list[Named], reducer: AttachedReducer, keep_memory: bool | None) -> tuple[Fuse, str]:
    """By rule, and what to say of it.

    Where ranks share cores, page faults of gradients that come in fresh memory cost as much as reducing them.
    """
    fuse, why = reducer.communicate(lambda transport: default_fuse(parameters, transport))
    keeps = fuse == "step" if keep_memory is None else keep_memory
    kept = ", freed memory is kept" if keeps and keep_freed_memory() else ""
    return fuse, f"{NAMES[fuse]} ({why}{kept})"


def _say(chosen: list[str], reducer: AttachedReducer) -> None:
    """Log what was chosen: with the wire once that is found, or now."""
    tuner = reducer._pipeline.tuner
    if chosen and tuner is not None:
        tuner.preface = "".join(f"{what}, " for what in chosen)
    elif chosen and reducer.rank == 0:
        log.info("%s, values as %s.", ", ".join(chosen), reducer.config.wire)


def _fusing(fuse: Fuse | None, clip: NormClip | None, reducer: AttachedReducer, names: Mapping[int, str]) -> Fusing:
    if fuse == "step":
        return ByStep(reducer, names, clip)
    tuner = reducer._pipeline.tuner
    return ByBucket(reducer) if fuse == "bucket" or tuner is None else ByTrial(reducer, tuner, names)
