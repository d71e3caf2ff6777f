"""What two ranks do with gradients on a device: as on the host, bit for bit, and nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from oktopk.bench import models
from oktopk.bench.rank import RankContext
from oktopk.front_ends.ddp import register
from oktopk.front_ends.local_steps import local_steps
from oktopk.front_ends.optimizer import DistributedOptimizer
from oktopk.reducer import Reducer

STEPS = 3
REDUCERS: Mapping[str, Mapping[str, Any]] = {
    "oktopk": {},
    "oktopk int8": {"wire": "int8"},
    "oktopk after a dense step": {"warmup_steps": 1},
    "topka": {"algorithm": "topka"},
    "gtopk": {"algorithm": "gtopk"},
    "gaussiank": {"algorithm": "gaussiank"},
    "randomk": {"algorithm": "randomk"},
    "dense bfloat16": {"algorithm": "dense", "wire": "bfloat16"},
}
# Its threshold comes from a mean and a deviation, which every kind of device adds up in an order of its own.
OF_ITS_OWN = "gaussiank"
FRONT_ENDS = ("register", "register, one vector", "DistributedOptimizer", "local_steps")


def measure(context: RankContext, numel: int) -> None:
    """The work of one rank: one record for each way to reduce, and one for each way to train."""
    for name, options in REDUCERS.items():
        found = _reduced(context, numel, options)
        context.emit(what=name, **found | ({"same_as_host": None} if name == OF_ITS_OWN else {}))
    for name in FRONT_ENDS:
        context.emit(what=name, **_trained(context, numel, name))


def _reduced(context: RankContext, numel: int, options: Mapping[str, Any]) -> dict[str, Any]:
    given = [_gradient(numel, context.rank, step) for step in range(STEPS)]
    ours, owed = _means(given, context.place.device, options)
    theirs, expected = _means(given, torch.device("cpu"), options)
    same = all(torch.equal(a, b) for a, b in zip([*ours, owed], [*theirs, expected], strict=True))
    went_in, left = (_over_ranks(vectors) for vectors in (given, [owed]))
    lost = (went_in - left - context.world_size * torch.stack(ours).double().sum(0)).abs().max() / went_in.abs().max()
    return {"same_as_host": same, "lost": float(lost), "digest": _digest(ours)}


def _means(given: list[Tensor], device: torch.device, options: Mapping[str, Any]) -> tuple[list[Tensor], Tensor]:
    """The mean of every step, and what is owed then, on the host."""
    with Reducer(density=0.01, **options) as reducer:
        means = [reducer.reduce("w", gradient.to(device)).cpu() for gradient in given]
        return means, reducer.residuals().get("w", torch.zeros_like(given[0])).cpu()


def _trained(context: RankContext, numel: int, name: str) -> dict[str, Any]:
    """A few steps of a model; the digest of its weights must be that of the others."""
    torch.manual_seed(0)
    model, loss = models.synthetic(numel, context.rank, place=context.place)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    module: torch.nn.Module = model
    if name.startswith("register"):
        module = DistributedDataParallel(model)
        handle: Any = register(module, density=0.01, fuse="step" if "vector" in name else "bucket")
    elif name == "local_steps":
        handle = local_steps(model, optimizer)
    else:
        handle = optimizer = DistributedOptimizer(optimizer, model, density=0.01, norm_clip=1.0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(module)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    if name == "local_steps":
        handle.finish()
    digest = _digest([parameter.detach().cpu() for parameter in model.parameters()])
    handle.close()
    return {"digest": digest, "finite": all(loss == loss for loss in losses)}


def _gradient(numel: int, rank: int, step: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def _over_ranks(vectors: list[Tensor]) -> Tensor:
    """Their sum over vectors and ranks."""
    total = torch.stack(vectors).double().sum(0)
    dist.all_reduce(total)
    return total


def _digest(tensors: list[Tensor]) -> str:
    digest = sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]
