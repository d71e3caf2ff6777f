"""A plain DDP script with one line more, and checkpoints that resume exactly.

torchrun --nproc-per-node 2 examples/ddp.py
torchrun --nproc-per-node 2 examples/ddp.py runs/ddp-example 40   # again, for the second time: resumes at step 40
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk


def pick_device() -> torch.device:
    """A GPU for each rank of a host, where there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(64, 32, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


def main(folder: Path | None, steps: int) -> None:
    oktopk.init_process_group("gloo")  # as torch's, and safe to restart
    rank, device = dist.get_rank(), pick_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    ddp = DDP(model.to(device))
    reducer = oktopk.register(ddp, algorithm="oktopk", density=0.05, warmup_steps=10)  # the one line
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)

    first = 0
    if folder is not None and (folder / "training.pt").exists():
        saved = torch.load(folder / "training.pt", weights_only=True, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        oktopk.load(reducer, folder / "reducer")  # what each rank still owes, and where it was

    for step in range(first, first + steps):
        x, y = (part.to(device) for part in batch(step, rank))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            record = reducer.last_step
            print(
                f"step {step + 1} loss {loss:.3f} {record.phase}: sent {record.bytes_sent} bytes, "
                f"a dense all-reduce {record.dense_bytes}"
            )

    if folder is not None:
        oktopk.save(reducer, folder / "reducer")  # every rank
        if rank == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": first + steps}
            torch.save(saved, folder / "training.pt")
    reducer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None, int(sys.argv[2]) if sys.argv[2:] else 40)
