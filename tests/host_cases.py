"""What the tests of several ranks per host run on every rank of a real world: what others run, with hosts of two."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import fault_cases
import front_end_cases
import oktopk
from device_groups import sum_over_gloo
from front_end_cases import SPARSE, Net, Result, batches
from inputs import gradient
from oktopk.reduction.inside import Inside

PER_HOST = 2
CASES = [
    "several buckets",
    "one vector",
    "unused on one rank",
    "unused on all ranks",
    "unused, one vector",
    "mixed dtypes",
    "bfloat16 model",
    "warm-up",
    "rounding wire",
    "momentum",
]
CARD_DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float32]
CARD_TIMEOUT = 30.0  # NCCL has half of it to connect
PHASES = ["before the scatter", "after the scatter", "before the gather", "after the gather"]


def in_hosts() -> None:
    SPARSE["hosts"] = PER_HOST  # of this process, whose life is one test


def front_ends() -> tuple[dict[str, Result], dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    in_hosts()
    return front_end_cases.run_cases(CASES), front_end_cases.scaled(), plain_loop(), own_steps()


def plain_loop() -> dict[str, torch.Tensor]:
    """Weights that `DistributedOptimizer` trained."""
    model = Net(seed=dist.get_rank())
    with oktopk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, **SPARSE) as optimizer:
        for x in batches(dist.get_rank(), 6):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert optimizer.reducer.hosts.ranks == ((0, 1), (2, 3))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def own_steps() -> dict[str, torch.Tensor]:
    """What `local_steps` makes of a DDP module: gradients of one step, own weights, and where all end."""
    ddp = DDP(Net(seed=dist.get_rank()))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    with oktopk.local_steps(ddp, optimizer, hosts=PER_HOST, every=2, min_numel=0, density=0.2) as handle:
        assert handle.workers == 2
        for x in batches(dist.get_rank(), 5):
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            alone = flat(p.grad for p in ddp.parameters())
            optimizer.step()
        seen = {"alone": alone, "averaged": flat(p.grad for p in ddp.parameters()), "own": flat(ddp.parameters())}
        with handle.shared():
            seen["shared"] = flat(ddp.parameters())
        handle.finish()
        assert handle.reducer.last_step.inside_bytes > 0
        return seen | {"end": flat(ddp.parameters())}


def flat(tensors: Iterable[Any]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def killed_in_local_steps(victim: int, phase: str, processes: Path) -> tuple[str, str, float]:
    """`kill -9` of one rank in its third step, while its host averages gradients or tells what it reduced."""
    (processes / str(os.getpid())).touch()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    oktopk.local_steps(model, optimizer, hosts=PER_HOST, min_numel=0, timeout=fault_cases.TIMEOUT)
    death = [0.0]

    def work() -> None:
        for step, x in enumerate(batches(dist.get_rank(), 1000)):
            if step == 3:
                death[0] = monotonic()
                if dist.get_rank() == victim:
                    _die_at(phase)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    kind, message, _ = fault_cases.caught(work)
    return kind, message, monotonic() - death[0]


def reduced_on(device_type: str, victim: int | None = None) -> tuple[list[torch.Tensor], bool] | tuple[str, str, float]:
    """Means of a host whose ranks have a card each, and whether these summed; or how a rank hears of one killed.

    On the CPU the same without cards.
    """
    rank = dist.get_rank()
    device = torch.device(device_type, rank if device_type == "cuda" else None)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    else:
        sum_over_gloo()
    group = dist.new_group(backend="cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    reducer = oktopk.Reducer("oktopk", 0.05, group=group, hosts=2, warmup_steps=1, min_numel=0, timeout=CARD_TIMEOUT)

    def work() -> list[torch.Tensor]:
        grads = (gradient("normal", 40_000, rank, step).to(dtype) for step, dtype in enumerate(CARD_DTYPES))
        return [reducer.reduce(str(grad.dtype), grad.to(device)).cpu() for grad in grads]

    means = work()
    if victim is not None:
        if rank == victim:
            _die_at("before the scatter")
        return fault_cases.caught(work)
    inside = reducer._pipeline.inside
    assert inside is not None
    has_summed = inside._devices._group is not None
    reducer.close()
    return means, has_summed


def killed_between_phases(victim: int, phase: str, processes: Path, on_devices: bool = False) -> tuple[str, str, float]:
    """`kill -9` of one rank at step 3, at a certain point of what ranks of a host do together."""
    in_hosts()
    if on_devices:
        sum_over_gloo()
    (processes / str(os.getpid())).touch()
    ddp, _ = fault_cases.model_and_reducer()
    death = [0.0]

    def die(step: int) -> None:
        if step == 3:
            death[0] = monotonic()
            if dist.get_rank() == victim:
                _die_at(phase)

    kind, message, _ = fault_cases.caught(lambda: fault_cases.train(ddp, 10_000, die))
    return kind, message, monotonic() - death[0]


def _die_at(phase: str) -> None:
    when, _, verb = phase.split()
    name = {"scatter": "scatter", "gather": "gather_", "telling": "everyones"}[verb]
    work = getattr(Inside, name)

    def last(*args: Any) -> Any:
        if when == "after":
            work(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(Inside, name, last)
