"""What the tests of leaving a model run on every rank of a real world."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from front_end_cases import SPARSE, Net, batches
from oktopk.front_ends.memory import resident_memory, return_gaps

MODELS = 20
WARM = 5  # models after which everything that is made once has been made
WIDTH = 512  # of a layer that takes 1 MiB


def train(model: nn.Module, optimizer: Any, inputs: list[Tensor]) -> None:
    for x in inputs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# -- nothing is kept ---------------------------------------------------------------------------------------------


def plain(model: nn.Module) -> tuple[nn.Module, Any, Callable[[], None]]:
    ddp = DDP(model)
    return ddp, sgd(ddp), lambda: None


def registered(model: nn.Module) -> tuple[nn.Module, Any, Callable[[], None]]:
    ddp = DDP(model, find_unused_parameters=True)
    return ddp, sgd(ddp), oktopk.register(ddp, **SPARSE).close


def torch_style(model: nn.Module) -> tuple[nn.Module, Any, Callable[[], None]]:
    ddp = DDP(model)
    state = oktopk.HookState(ddp, **SPARSE)
    ddp.register_comm_hook(state, oktopk.hook)
    return ddp, sgd(ddp), state.reducer.close


def wrapped(model: nn.Module) -> tuple[nn.Module, Any, Callable[[], None]]:
    optimizer = oktopk.DistributedOptimizer(sgd(model), model, **SPARSE)
    return model, optimizer, optimizer.close


WAYS = {
    "plain": plain,
    "registered": registered,
    "torch style": torch_style,
    "optimizer": wrapped,
}


def kept() -> dict[str, tuple[int, float]]:
    """How many models live on after they were trained, closed and dropped, and bytes per model, by way."""
    gc.freeze()  # what was there before is not looked at each time
    return {name: _kept(way) for name, way in WAYS.items()}


def _kept(way: Callable[[nn.Module], Any]) -> tuple[int, float]:
    alive: list[weakref.ref[Any]] = []
    for number in range(MODELS):
        model, optimizer, close = way(nn.Linear(WIDTH, WIDTH))
        train(model, optimizer, [torch.ones(2, WIDTH)] * 2)
        close()
        alive += [weakref.ref(model), weakref.ref(next(model.parameters()))]
        del model, optimizer, close
        gc.collect()
        if number == WARM:
            before = _resident_bytes()
    grown = (_resident_bytes() - before) / (MODELS - WARM - 1)
    return sum(reference() is not None for reference in alive), grown


def _resident_bytes() -> int:
    return_gaps()
    return resident_memory()


def dropped_without_closing() -> dict[str, bool]:
    """Whether models and their reducers are gone that were dropped without a word, by way."""
    gone = {}
    for name in ("registered", "torch style", "optimizer"):
        model, optimizer, close = WAYS[name](nn.Linear(8, 8))
        train(model, optimizer, [torch.ones(2, 8)] * 2)
        references = [weakref.ref(model), weakref.ref(close.__self__)]  # type: ignore[attr-defined]
        del model, optimizer, close
        gc.collect()
        gone[name] = all(reference() is None for reference in references)
    return gone


# -- after closing -----------------------------------------------------------------------------------------------


def closed_and_registered_again() -> dict[str, Any]:
    """Weights after closing beside those of plain DDP, and what a second and a third registration do."""
    seen: dict[str, Any] = {"phases": []}
    data = list(batches(dist.get_rank(), 9))
    ddp = DDP(Net(), find_unused_parameters=True)
    for turn in range(3):
        with oktopk.register(ddp, **SPARSE) as reducer:
            train(ddp, sgd(ddp), data[3 * turn : 3 * turn + 2])
            seen["phases"].append((reducer.last_step.phase, reducer.step))
        twin = DDP(copy.deepcopy(ddp.module), find_unused_parameters=True)
        for model in (ddp, twin):
            train(model, sgd(model), data[3 * turn + 2 : 3 * turn + 3])
        seen[f"turn {turn}"] = weights(ddp), weights(twin)
    seen["hooks left"] = sum(bool(p._post_accumulate_grad_hooks) for p in ddp.parameters())
    return seen


def copies() -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Weights that a copied module and the module inside a plain DDP train to, by how it was copied."""
    data = list(batches(dist.get_rank(), 3))
    ddp = DDP(Net(), find_unused_parameters=True)
    reducer = oktopk.register(ddp, **SPARSE)
    train(ddp, sgd(ddp), data)
    made = {"copy": copy.deepcopy(ddp), "file": _through_a_file(ddp)}
    trained = {}
    for name, ours in made.items():
        plain = DDP(copy.deepcopy(ddp.module))
        for model in (ours, plain):
            train(model, sgd(model), data)
        trained[name] = weights(ours), weights(plain)
    again = oktopk.register(made["copy"], **SPARSE)
    train(made["copy"], sgd(made["copy"]), data)
    assert again.last_step.phase == "sparse"
    again.close()
    reducer.close()
    return trained


def _through_a_file(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def closed_optimizer() -> dict[str, Any]:
    """A model whose optimizer was closed: its gradient is this rank's own, and copies of it hold no hook."""
    rank = dist.get_rank()
    model = Net()
    with oktopk.DistributedOptimizer(sgd(model), model, **SPARSE) as optimizer:
        train(model, optimizer, list(batches(rank, 2)))
        copy.deepcopy(model)
        _through_a_file(model)
    seen = {"weights": weights(model)}
    try:
        optimizer.step()
        seen["step"] = "nothing was raised"
    except oktopk.OkTopkError as error:
        seen["step"] = str(error)
    train(model, optimizer.inner, list(batches(rank, 1)))
    seen["apart"] = weights(model)
    return seen


def closed_fsdp() -> tuple[list[Tensor], list[Tensor]]:
    """Shards before and after a step that follows closing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Net(seed=dist.get_rank())  # replicas start from the first one's
    fully_shard(model, mesh=mesh["shard"])
    data = list(batches(dist.get_rank(), 4))
    with oktopk.register_fsdp(model, mesh["replicate"].get_group(), **SPARSE):
        train(model, sgd(model), data[:3])
    before = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    train(model, sgd(model), data[3:])
    return before, [parameter.to_local().detach().clone() for parameter in model.parameters()]


def all_of_it() -> dict[str, Any]:
    """In one world: starting processes costs more than training in them."""
    return {
        "again": closed_and_registered_again(), "copies": copies(), "optimizer": closed_optimizer(),
        "dropped": dropped_without_closing(),
    }  # fmt: skip
