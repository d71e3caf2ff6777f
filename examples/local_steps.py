"""Local steps: every rank trains by itself; changes of weights travel in turn, in two bits each. No dense phase.

torchrun --nproc-per-node 2 examples/local_steps.py
torchrun --nproc-per-node 2 examples/local_steps.py runs/local-example 40   # the second time it resumes at step 40
"""

import os
import sys
from pathlib import Path

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


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(64, 32, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


def main(folder: Path | None, steps: int) -> None:
    oktopk.init_process_group("gloo")
    rank, device = dist.get_rank(), pick_device()
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    handle = oktopk.local_steps(model, optimizer)  # the one line; DDP is not needed

    if folder is not None and (folder / "manifest.json").exists():
        oktopk.load(handle, folder)  # weights, what each rank still owes, and its optimizer

    for step in range(handle.step, handle.step + steps):
        x, y = (part.to(device) for part in batch(step, rank))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()  # synchronises too
        if rank == 0 and step % 10 == 9:
            record = handle.reducer.last_step
            print(
                f"step {step + 1} loss {loss:.3f} {record.phase}: sent {record.bytes_sent} bytes, "
                f"a dense all-reduce {record.dense_bytes}"
            )

    if folder is not None:
        oktopk.save(handle, folder)  # every rank
    with handle.shared():  # the same weights on every rank: evaluate and export these
        x, y = (part.to(device) for part in batch(10**6, 0))
        test_loss = nn.functional.mse_loss(model(x), y)
    handle.finish()
    if rank == 0:
        print(f"test loss {test_loss:.3f} after {handle.step} steps, all of them sparse")
    handle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None, int(sys.argv[2]) if sys.argv[2:] else 40)
