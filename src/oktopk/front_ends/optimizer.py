"""For scripts without DDP: an optimizer that reduces gradients over ranks before it steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from oktopk.config import Density
from oktopk.errors import ConfigError, OkTopkError, UnsupportedError
from oktopk.front_ends.advice import advise, is_worth_advice
from oktopk.front_ends.attached import AttachedReducer
from oktopk.front_ends.broadcast import broadcast_
from oktopk.front_ends.clipping import NormClip, require_limit, scale_of
from oktopk.front_ends.memory import keep_freed_memory
from oktopk.front_ends.options import FrontEndOptions, Fuse
from oktopk.front_ends.parameter_buckets import ParameterBucket, in_buckets, in_one_bucket
from oktopk.front_ends.parameters import Named, named_parameters, refuse_unsupported, sparse_gradient


class DistributedOptimizer(Optimizer):
    """Wraps an optimizer; gradients are reduced bucket by bucket while backward goes on, and `step` waits for them.

    `model` is the module, or its `named_parameters()` (then pass `buffers` too, if there are any). Rank 0's weights
    and buffers are copied to every rank. `param_groups`, `state`, schedulers, closures, `state_dict` and `zero_grad`
    are those of the wrapped optimizer; `reducer` holds residuals and records. `close` (or the end of a `with` block)
    takes the hooks off the model, which then trains with any optimizer on this rank alone.

    >>> import torch, oktopk
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = oktopk.DistributedOptimizer(optimizer, model, density=0.5, min_numel=0)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.close()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | Iterable[tuple[str, nn.Parameter]],
        algorithm: str = "oktopk",
        density: Density = 0.01,
        warmup_steps: int = 0,
        *,
        buffers: Iterable[Tensor] = (),
        accumulate: int = 1,
        norm_clip: float | None = None,
        norm_clip_after: float | None = None,
        fold_learning_rate: bool = False,
        fuse: Fuse = "bucket",
        bucket_mb: float = 25.0,
        scaler: Any = None,
        keep_memory: bool = False,
        **options: Unpack[FrontEndOptions],
    ) -> None:
        """Every rank must do this with the same arguments.

        `accumulate`: backward passes per step; see also `no_sync`.
        `norm_clip`: limit of the local gradient norm over all parameters, divided by the root of the world size as in
            Deep Gradient Compression; there is no overlap then, since all gradients must be known first.
        `norm_clip_after`: limit of the norm of the mean.
        `fold_learning_rate`: residuals hold learning rate times gradient, as in the paper's algorithm, so that what is
            sent late weighs as much as when it was computed.
        `keep_memory`: with parameters on the CPU, let this process keep the memory of gradients from step to step
            (`mallopt` of glibc) instead of asking the system for it anew.
        `momentum_correction`, `factor_masking` and others: options of the reducer.
        """
        _check(optimizer, accumulate, fuse, norm_clip, norm_clip_after, options)
        named, buffers = _parameters(optimizer, model, buffers)
        refuse_unsupported(named, model if isinstance(model, nn.Module) else None, in_one_vector=fuse == "step")
        if scaler is not None:
            options.setdefault("on_nonfinite", "skip")
        self.inner = optimizer
        self.reducer = AttachedReducer(algorithm, density, warmup_steps=warmup_steps, **options)
        if not warmup_steps and is_worth_advice(algorithm, self.reducer.config, self.reducer.rank):
            advise(optimizer)
        self.reducer.communicate(lambda transport: broadcast_([*(p for _, p in named), *buffers], transport))
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if keep_memory and any(parameter.device.type == "cpu" for _, parameter in trained):
            keep_freed_memory()
        self._buckets = in_one_bucket(trained) if fuse == "step" else in_buckets(trained, bucket_mb * 2**20)
        self._accumulate, self._scaler, self._fold = accumulate, scaler, fold_learning_rate
        self._clip = NormClip(norm_clip, self.reducer.world_size, scaler) if norm_clip is not None else None
        self._norm_clip_after = norm_clip_after
        self._groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._passes: dict[int, int] = {}
        self._under_way: list[torch.futures.Future[Tensor]] = []
        self._is_synchronised = self._is_paused = self._is_closed = False
        self._names = {id(parameter): name for name, parameter in trained}
        take = _weakly(self)
        self._hooks = [parameter.register_post_accumulate_grad_hook(take) for _, parameter in trained]
        self.reducer.on_close(self._detach)

    # -- reducing ------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every gradient is its mean over ranks; `step` does it unless you did, e.g. to clip by hand."""
        while len(self._under_way) < len(self._buckets):
            self._submit_next()
        for bucket, reduced in zip(self._buckets, self._under_way, strict=True):
            reduced.wait()
            self._hand_back(bucket)
        self._begin_again()
        self._is_synchronised = True
        if self._norm_clip_after is not None:
            used = [p for bucket in self._buckets for _, p in bucket.parameters if p.grad is not None]
            nn.utils.clip_grad_norm_(used, self._norm_clip_after * scale_of(self._scaler))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context only accumulate."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _take(self, parameter: Tensor) -> None:
        """A gradient is complete, after `accumulate` backward passes."""
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise sparse_gradient(self._names[id(parameter)])
        if self._is_paused:
            return
        if self._is_synchronised:
            raise OkTopkError("backward after synchronize(): call step() or zero_grad() between them.")
        passes = self._passes[id(parameter)] = self._passes.get(id(parameter), 0) + 1
        if passes > self._accumulate:
            raise OkTopkError(
                f"more than accumulate={self._accumulate} backward passes without step(): their gradients are on the "
                "way already. Raise accumulate, or use no_sync() for all passes but the last."
            )
        while self._clip is None and len(self._under_way) < len(self._buckets) and self._is_next_ready():
            self._submit_next()

    def _is_next_ready(self) -> bool:
        bucket = self._buckets[len(self._under_way)]
        return all(self._passes.get(id(parameter), 0) == self._accumulate for _, parameter in bucket.parameters)

    def _submit_next(self) -> None:
        if not self._under_way:
            if self._scaler is not None:
                self.reducer.set_gradient_scale(scale_of(self._scaler))
            self._shrink = self._clip_factor()
        bucket = self._buckets[len(self._under_way)]
        pieces = bucket.take(lambda parameter: self._shrink * self._weight(parameter))
        self._under_way.append(self.reducer.submit(bucket.layout, pieces, bucket.unused))

    def _hand_back(self, bucket: ParameterBucket) -> None:
        # A parameter that no rank used has no gradient, and an optimizer then leaves it alone.
        bucket.hand_back(lambda parameter: 1.0 / self._weight(parameter), skip=self.reducer._pipeline.unused)

    def _weight(self, parameter: nn.Parameter) -> float:
        """What a gradient is multiplied by while it travels and waits."""
        if not self._fold:
            return 1.0
        rate = float(self.inner.param_groups[self._groups[id(parameter)]]["lr"])
        if not rate > 0.0:
            raise ConfigError(f"fold_learning_rate needs a learning rate above 0, got {rate}.")
        return rate

    def _clip_factor(self) -> float:
        if self._clip is None:
            return 1.0
        return self._clip.factor(p.grad for bucket in self._buckets for _, p in bucket.parameters if p.grad is not None)

    def _begin_again(self) -> None:
        self._passes.clear()
        self._under_way.clear()

    def close(self) -> None:
        """Leave the process group and the model: its gradients stay on this rank from now on."""
        self.reducer.close()

    def __enter__(self) -> DistributedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _detach(self) -> None:
        self._is_closed = True
        self._begin_again()
        for hook in self._hooks:
            hook.remove()

    # -- being an optimizer --------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronise, then step. A closure is synchronised each time the optimizer calls it."""
        if self._is_closed:
            raise OkTopkError("this DistributedOptimizer is closed: step its `inner` to go on with this rank alone.")
        if closure is not None:
            return self.inner.step(lambda: self._evaluate(closure))
        if not self._is_synchronised:
            if self._scaler is not None and self._scaler.is_enabled():
                raise OkTopkError("with a GradScaler call synchronize() before scaler.unscale_ or scaler.step.")
            self.synchronize()
        self._is_synchronised = False
        return self.inner.step()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._is_synchronised = False
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        self._is_synchronised = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._under_way:
            raise OkTopkError("zero_grad() between backward and step(): these gradients are on the way already.")
        self._is_synchronised = False
        self._passes.clear()
        self.inner.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        """That of the wrapped optimizer; residuals differ between ranks and are saved by `oktopk.save`."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UnsupportedError(
            "parameters cannot join later: add every group to the optimizer before wrapping it in DistributedOptimizer."
        )

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.inner!r})"


def _weakly(optimizer: DistributedOptimizer) -> Callable[[Tensor], None]:
    """Its hook. Parameters hold their hooks where no garbage collector looks, and the optimizer holds parameters."""
    known = weakref.ref(optimizer)

    def take(parameter: Tensor) -> None:
        alive = known()
        if alive is not None:
            alive._take(parameter)

    return take


def _check(
    optimizer: Optimizer,
    accumulate: int,
    fuse: str,
    norm_clip: float | None,
    norm_clip_after: float | None,
    options: FrontEndOptions,
) -> None:
    if accumulate < 1:
        raise ConfigError(f"accumulate must be 1 or more, got {accumulate}: it counts backward passes per step.")
    if fuse not in ("bucket", "step"):
        raise ConfigError(f"fuse must be 'bucket' or 'step', got {fuse!r}.")
    for name, limit in {"norm_clip": norm_clip, "norm_clip_after": norm_clip_after}.items():
        if limit is not None:
            require_limit(name, limit)
    momenta = [group["momentum"] for group in optimizer.param_groups if group.get("momentum")]
    if options.get("momentum_correction") and momenta:
        raise ConfigError(
            f"the optimizer has momentum {momenta[0]}, and momentum_correction applies it before sending: "
            "set the optimizer's to 0, or it counts twice."
        )


def _parameters(
    optimizer: Optimizer, model: nn.Module | Iterable[Named], buffers: Iterable[Tensor]
) -> tuple[list[Named], list[Tensor]]:
    """Named parameters and buffers; every parameter of the optimizer must have a name."""
    if isinstance(model, nn.Module):
        named = named_parameters(model)
        buffers = [*buffers, *model.buffers()]
    else:
        named = list(model)
    known = {id(parameter) for _, parameter in named}
    nameless = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if nameless:
        raise ConfigError(f"{nameless} parameters of the optimizer have no name: pass the model they belong to.")
    if len({name for name, _ in named}) < len(named):
        raise ConfigError("two parameters have the same name: names must tell parameters apart.")
    return named, list(buffers)
