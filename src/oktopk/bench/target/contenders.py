"""Who takes part: ways to train together that a user might pick, each as it is documented or was published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from oktopk.bench.contenders import DEFAULT_CAP_MB, SINGLE_BUCKET_MB
from oktopk.bench.rivals import RIVALS
from oktopk.bench.target.bf16_hook import bf16_hook
from oktopk.bench.target.schedule import WHOLE, Schedule
from oktopk.bench.training_step import Steps, clip_of
from oktopk.config import AUTO
from oktopk.errors import ConfigError, nearest
from oktopk.front_ends.ddp import register
from oktopk.metrics import MemorySink
from oktopk.reduction.autotune import wire_trials
from oktopk.training.config import TrainConfig
from oktopk.training.optimizers import make_optimizer
from oktopk.training.synchronisation import make_synchronisation
from oktopk.transport.base import Transport
from oktopk.workloads.base import Recipe

DENSE_NAME, OURS = "ddp dense", "updates"
POWERSGD_START = 0.1  # of all steps stay dense at first, as torch recommends


@dataclass(frozen=True)
class Setting:
    """What a contender is attached to."""

    config: TrainConfig
    recipe: Recipe
    model: nn.Module  # the same weights on every rank
    transport: Transport
    schedule: Schedule


@dataclass(frozen=True)
class Participant:
    """One rank of a training whose ranks are kept together in one way."""

    model: nn.Module  # losses are computed with it
    optimizer: Steps
    clip: Callable[[], object]  # limit gradients before they are stepped on
    exchange: Callable[[int], None] = lambda step: None  # what follows a step, if it is not part of it
    finish: Callable[[], None] | None = None  # the last step is done: all ranks end with the same weights
    shared: Callable[[], AbstractContextManager[None]] = nullcontext  # inside, the model has the weights with which a
    # training ends that ends right after an exchange
    close: Callable[[], None] = lambda: None
    settles: int = 1  # steps of a kind until the next are like all others


@dataclass(frozen=True)
class Contender:
    """A way to train together."""

    how: str  # in words, for tables
    reduce: Literal["gradients", "updates"]  # whose recipe it follows: updates are stepped on by every rank alone
    schedule: Callable[[Recipe, int], Schedule]  # from the recipe and the number of steps
    attach: Callable[[Setting], Participant]
    every: int = 1  # what `oktopk train --every` is told
    overlap: bool = False  # and whether --overlap
    is_ours: bool = False  # it follows the recipe in what it sends, too


def require_contenders(names: Sequence[str]) -> None:
    for name in names:
        if name not in CONTENDERS:
            raise ConfigError(f"unknown contender {name!r}. {nearest(name, CONTENDERS)}")
    if len(set(names)) != len(names):
        raise ConfigError(f"every contender takes part once, got {', '.join(names)}.")


# -- gradients -------------------------------------------------------------------------------------------------------


def _ddp(setting: Setting, hook: Callable[..., Any] | None = None) -> Participant:
    ddp = _wrapped(setting, DEFAULT_CAP_MB)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    return _stepping(setting, ddp)


def _powersgd(setting: Setting, rank: int) -> Participant:
    # In one bucket: with more, the hook starts collectives on Gloo's callback threads, in any order, and hangs.
    ddp = _wrapped(setting, SINGLE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=setting.schedule.start
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _stepping(setting, ddp)


def _register(setting: Setting) -> Participant:
    """The line of the README with the recipe's density, dense start and limit of the norm."""
    ddp, recipe = _wrapped(setting, DEFAULT_CAP_MB), setting.recipe
    reducer = register(ddp, density=recipe.density, warmup_steps=setting.schedule.start, norm_clip=recipe.norm_clip)
    settles = 2 + (wire_trials() if reducer.config.wire == AUTO else 0)
    optimizer = make_optimizer(recipe, setting.model.parameters())
    return Participant(ddp, optimizer, lambda: None, close=reducer.close, settles=settles)


def _wrapped(setting: Setting, cap_mb: int) -> DistributedDataParallel:
    return DistributedDataParallel(setting.model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True, init_sync=False)


def _stepping(setting: Setting, ddp: DistributedDataParallel) -> Participant:
    optimizer = make_optimizer(setting.recipe, setting.model.parameters())
    return Participant(ddp, optimizer, clip_of(setting.recipe, setting.model))


# -- updates ---------------------------------------------------------------------------------------------------------


def _updates(setting: Setting) -> Participant:
    """As `oktopk train --reduce updates` does."""
    optimizer = make_optimizer(setting.recipe, setting.model.parameters())
    made = make_synchronisation(setting.config, setting.recipe, optimizer, setting.model, MemorySink())
    return Participant(setting.model, made, made.synchronize, finish=made.finish, close=made.close, shared=made.shared)


def _rival(setting: Setting, name: str, settings: Mapping[str, float]) -> Participant:
    own = in_one_piece_(setting.model)  # so that nothing has to be copied for a synchronisation
    shapes = [parameter.shape for parameter in setting.model.parameters()]
    outer = {"every": setting.schedule.outer} if setting.schedule.outer else {}
    rival = RIVALS[name](own, shapes, setting.transport, **settings, **outer)

    def exchange(step: int) -> None:
        if (step + 1) % setting.schedule.every == 0:
            rival.synchronize_(own)

    optimizer = make_optimizer(setting.recipe, setting.model.parameters())
    return Participant(
        setting.model, optimizer, clip_of(setting.recipe, setting.model), exchange, lambda: rival.finish_(own)
    )


@torch.no_grad()
def in_one_piece_(model: nn.Module) -> Tensor:
    """Let all parameters be views of one vector, which is returned."""
    parameters = list(model.parameters())
    whole = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
    return whole


# -- the table -------------------------------------------------------------------------------------------------------


def _whole(recipe: Recipe, steps: int) -> Schedule:
    return Schedule(start=WHOLE)


def _always(recipe: Recipe, steps: int) -> Schedule:
    return Schedule()


def _after_a_tenth(recipe: Recipe, steps: int) -> Schedule:
    return Schedule(start=max(2, round(POWERSGD_START * steps)))


def _after_warmup(recipe: Recipe, steps: int) -> Schedule:
    return Schedule(start=recipe.warmup_steps)


def _local(how: str, every: int, name: str, settings: Mapping[str, float] | None = None, outer: int = 0) -> Contender:
    attach = partial(_rival, name=name, settings=settings or {})
    levels = RIVALS[name].levels
    return Contender(how, "updates", lambda recipe, steps: Schedule(0, every, outer, levels), attach)


def _gradients(
    how: str, schedule: Callable[[Recipe, int], Schedule], attach: Callable[[Setting], Participant]
) -> Contender:
    return Contender(how, "gradients", schedule, attach)


def _ours(every: int = 1, overlap: bool = False) -> Contender:
    flags = f"{f' --every {every}' if every > 1 else ''}{' --overlap' if overlap else ''}"
    how = f"`oktopk train --reduce updates{flags}`"

    def schedule(recipe: Recipe, steps: int) -> Schedule:
        return Schedule(every=every, levels=recipe.keep_owed is not None and recipe.keep_owed < 1)

    return Contender(how, "updates", schedule, _updates, every, overlap, is_ours=True)


CONTENDERS: dict[str, Contender] = {
    DENSE_NAME: _gradients("DDP, float32", _whole, _ddp),
    "ddp bf16": _gradients("DDP, torch's bfloat16 hook", _always, partial(_ddp, hook=bf16_hook)),
    "powersgd 1": _gradients("torch's hook, rank 1, a tenth dense", _after_a_tenth, partial(_powersgd, rank=1)),
    "powersgd 4": _gradients("torch's hook, rank 4, a tenth dense", _after_a_tenth, partial(_powersgd, rank=4)),
    "register": replace(
        _gradients("`oktopk.register(ddp)`, density and dense start of the recipe", _after_warmup, _register),
        is_ours=True,
    ),
    "diloco": _local("dense mean every 20 steps, outer Nesterov 0.7 / 0.9", 20, "diloco"),
    "diloco plain": _local("dense mean every 20 steps, no outer step", 20, "diloco", {"rate": 1.0, "momentum": 0.0}),
    "sparseloco": _local("64 of every 4,096 in 2 bits, every 15 steps, decay 0.95", 15, "sparseloco"),
    "sparseloco 4": _local("the same every 4 steps", 4, "sparseloco"),
    "sparta 0.005": _local("a random 0.5% of the weights, every step", 1, "sparta", {"share": 0.005}),
    "sparta 0.01": _local("a random 1% of the weights, every step", 1, "sparta", {"share": 0.01}),
    "sparta 0.1": _local("a random 10% of the weights, every step", 1, "sparta", {"share": 0.1}),
    "sparta diloco": _local(
        "a random 0.5% every step, a DiLoCo step every 100", 1, "sparta_diloco", {"share": 0.005}, 100
    ),
    OURS: _ours(),
    "updates overlap": _ours(overlap=True),
    "updates 4": _ours(4),
}
