"""FSDP2: parameters sharded over some ranks, gradients reduced sparsely between replicas of those ranks.

torchrun --nproc-per-node 4 examples/fsdp2.py      (2 replicas of 2 shards; with 2 processes, 2 replicas of 1)
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import oktopk


def pick_device() -> torch.device:
    """A GPU for each rank of a host, where there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def main() -> None:
    device = pick_device()
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(rank)  # different on purpose: replicas start from the first one's weights
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    model.to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    reducer = oktopk.register_fsdp(model, mesh["replicate"].get_group(), density=0.05, warmup_steps=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    generator = torch.Generator().manual_seed(rank)
    for step in range(30):
        x = torch.randn(64, 32, generator=generator).to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            record = reducer.last_step
            print(f"step {step + 1} loss {loss:.3f} {record.phase}, compression {record.compression_ratio:.1f}x")
    # Replicas hold the same shards, bit for bit.
    for parameter in model.parameters():
        shard = parameter.to_local().detach().contiguous()
        others = [torch.empty_like(shard) for _ in range(2)]
        dist.all_gather(others, shard, group=mesh["replicate"].get_group())
        assert torch.equal(others[0], others[1])
    reducer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
