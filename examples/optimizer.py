"""Without DDP: wrap the optimizer. Weights are broadcast, gradients reduced while backward goes on.

torchrun --nproc-per-node 2 examples/optimizer.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import oktopk


def pick_device() -> torch.device:
    """A GPU for each rank of a host, where there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def main() -> None:
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), pick_device()
    model = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Linear(256, 1))
    model.to(device)
    optimizer = oktopk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02),
        model,
        density=0.05,
        warmup_steps=10,
        accumulate=2,  # backward passes per step
        norm_clip=10.0,  # before gradients are sent
        momentum_correction=0.9,  # instead of the optimizer's own momentum
        factor_masking=True,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)

    generator = torch.Generator().manual_seed(rank)
    for step in range(40):
        total = 0.0
        for _ in range(2):
            x = torch.randn(64, 32, generator=generator).to(device)
            loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True)) / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0 and step % 10 == 9:
            record = optimizer.reducer.last_step
            print(f"step {step + 1} loss {total:.3f} {record.phase}, compression {record.compression_ratio:.1f}x")
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
