"""What the tests of `DistributedOptimizer` run on every rank of a real world."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import oktopk
from front_end_cases import SPARSE, STEPS, Ledger, Net, Result, batches, result_of


class Normed(Net):
    """With buffers, and different on every rank until the weights are broadcast."""

    def __init__(self) -> None:
        super().__init__(seed=dist.get_rank())
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean += dist.get_rank()

    def forward(self, x: Tensor, with_extra: bool = True) -> Tensor:
        return self.norm(super().forward(x, with_extra))


def wrapped(
    make: Callable[[], nn.Module] = Net,
    sgd: dict[str, Any] | None = None,
    forward: Callable[[nn.Module, Tensor, int], Tensor] = lambda m, x, _: m(x),
    accumulate: int = 1,
    **options: Any,
) -> Result:
    model = make()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, **(sgd or {}))
    optimizer = oktopk.DistributedOptimizer(
        inner, model, accumulate=accumulate, bucket_mb=0.002, **{**SPARSE, **options}
    )
    ledger = Ledger()
    ledger.watch(optimizer.reducer)
    for step, x in enumerate(batches(dist.get_rank(), STEPS)):
        forward(model, x, step).square().mean().backward()
        if (step + 1) % accumulate == 0:
            optimizer.synchronize()
            ledger.apply(model)
            optimizer.step()
            optimizer.zero_grad()
    return result_of(model, optimizer.reducer, ledger)


def unused(on: Callable[[int], bool]) -> Callable[..., Tensor]:
    return lambda m, x, step: m(x, step % 3 != 1 or not on(dist.get_rank()))


CASES: dict[str, Callable[[], Result]] = {
    "default": wrapped,
    "one vector": lambda: wrapped(fuse="step"),
    "different starts": lambda: wrapped(Normed),
    "accumulation": lambda: wrapped(accumulate=3),
    "unused on one rank": lambda: wrapped(forward=unused(lambda rank: rank == 1), sgd={"weight_decay": 0.01}),
    "unused on all ranks": lambda: wrapped(forward=unused(lambda _: True), sgd={"weight_decay": 0.01}),
    "clipped before": lambda: wrapped(norm_clip=0.05),
    "bfloat16": lambda: wrapped(lambda: Bf16Net()),
}


class Bf16Net(Net):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: Tensor, with_extra: bool = True) -> Tensor:
        return super().forward(x.bfloat16(), with_extra).float()


def run_cases() -> dict[str, Result]:
    return {name: case() for name, case in CASES.items()}


def train(optimizer: oktopk.DistributedOptimizer, model: nn.Module, steps: int = STEPS) -> dict[str, Tensor]:
    for x in batches(dist.get_rank(), steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.reducer.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_as_one_process() -> dict[str, list[dict[str, Tensor]]]:
    """Pairs of trainings that must agree: ours on P ranks, and one process that sees all batches."""
    return {
        "momentum correction, dense": [_ours({}, momentum_correction=0.9), _alone({"momentum": 0.9})],
        "folded learning rate, dense": [_ours({}, fold_learning_rate=True), _alone({})],
        "weight decay and momentum": [
            _ours({"momentum": 0.9, "weight_decay": 0.1}), _alone({"momentum": 0.9, "weight_decay": 0.1})
        ],
    }  # fmt: skip


def _ours(sgd: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, **sgd)
    return train(oktopk.DistributedOptimizer(inner, model, "dense", **options), model)


def _alone(sgd: dict[str, Any]) -> dict[str, Tensor]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **sgd)
    for xs in zip(*(batches(rank, STEPS) for rank in range(dist.get_world_size())), strict=True):
        optimizer.zero_grad()
        sum(model(x).square().mean() for x in xs).div(len(xs)).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def duties() -> dict[str, Any]:
    """Schedulers, closures, no_sync, misuse: what an optimizer must be able to do."""
    seen: dict[str, Any] = {}
    model = Net()
    optimizer = oktopk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **SPARSE)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    data = list(batches(dist.get_rank(), 8))

    def backward(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(data[0])

    seen["closure"] = float(optimizer.step(closure).detach())
    scheduler.step()
    seen["lr"] = optimizer.param_groups[0]["lr"], optimizer.inner.param_groups[0]["lr"]
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    seen["state"] = sorted(saved)
    optimizer.zero_grad()
    with optimizer.no_sync():
        backward(data[1])
    backward(data[2])
    optimizer.step()
    seen["step"] = optimizer.reducer.step
    for name, misuse in {
        "twice": lambda: (backward(data[3]), backward(data[4])),
        "zero_grad": lambda: (optimizer.zero_grad(), None),
        "group": lambda: optimizer.add_param_group({"params": []}),
    }.items():
        with contextlib.suppress(oktopk.OkTopkError):
            try:
                misuse()
                seen[name] = "nothing was raised"
            except oktopk.OkTopkError as error:
                seen[name] = str(error)
    optimizer.reducer.close()
    return seen


def scaled() -> dict[str, Any]:
    """With a GradScaler: one overflow, then on."""
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    optimizer = oktopk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model, scaler=scaler, bucket_mb=0.002, **SPARSE
    )
    kept = True
    for step, x in enumerate(batches(dist.get_rank(), 8)):
        before = optimizer.reducer.residuals()
        optimizer.zero_grad()
        scaler.scale(model(x * float("inf") if step == 4 and dist.get_rank() == 0 else x).square().mean()).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
        if step == 4:
            kept = all(torch.equal(before[name], r) for name, r in optimizer.reducer.residuals().items())
    optimizer.reducer.close()
    return {"kept": kept, "weights": {name: p.detach() for name, p in model.named_parameters()}}
