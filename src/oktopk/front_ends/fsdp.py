"""FSDP2: parameters sharded inside a group, gradients reduced sparsely between replicas of that group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from oktopk.config import Density
from oktopk.errors import UnsupportedError
from oktopk.front_ends.attached import AttachedReducer
from oktopk.front_ends.broadcast import broadcast_
from oktopk.front_ends.options import GroupOptions
from oktopk.front_ends.parameters import COMPILED, named_parameters, refuse_unsupported
from oktopk.reducer import Reducer


def register_fsdp(
    module: nn.Module,
    group: Any,
    algorithm: str = "oktopk",
    density: Density = 0.01,
    warmup_steps: int = 0,
    **options: Unpack[GroupOptions],
) -> AttachedReducer:
    """Reduce the shards of a module over `group`, the ranks that hold the same shard.

    The module must be sharded with `fully_shard` over a one-dimensional mesh, e.g. `mesh["shard"]` of a mesh with the
    dimensions ("replicate", "shard"); `group` is then `mesh["replicate"].get_group()`. Replicas start from the shards
    of the first rank of `group`. Options are those of `Reducer`. When the reducer is closed, replicas go on with the
    dense mean.
    """
    # Imported here: it costs everyone who does not use FSDP a second.
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    sharded = [(name.replace(COMPILED, ""), m) for name, m in module.named_modules() if isinstance(m, FSDPModule)]
    if not sharded:
        raise UnsupportedError("nothing here is sharded by FSDP2: call fully_shard first, or use oktopk.register.")
    refuse_unsupported(named_parameters(module), module, in_one_vector=False)
    reducer = AttachedReducer(algorithm, density, group, warmup_steps, **options)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in [*module.parameters(), *module.buffers()]]
    reducer.communicate(lambda transport: broadcast_(local, transport))
    for name, part in sharded:
        part.set_all_reduce_hook(_reducing(reducer, name or "root"))

    def detach() -> None:
        for _, part in sharded:
            part.set_all_reduce_hook(_averaging(group))

    reducer.on_close(detach)
    return reducer


def _reducing(reducer: Reducer, name: str) -> Callable[[Tensor], None]:
    def reduce_(shard: Tensor) -> None:
        reducer.submit([(name, shard.numel())], shard.view(-1)).wait()

    return reduce_


def _averaging(group: Any) -> Callable[[Tensor], None]:
    def average_(shard: Tensor) -> None:
        dist.all_reduce(shard.div_(dist.get_world_size(group)), group=group)

    return average_
