"""A training script that resumes by itself: what `torchrun --max-restarts` restarts in the tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from front_end_cases import SMALL_BUCKETS, SPARSE, Net, batches

STEPS, EVERY = 20, 5


def main(folder: Path, kill_at: int) -> None:
    torch.set_num_threads(1)
    oktopk.init_process_group("gloo")
    rank = dist.get_rank()
    model = Net()
    ddp = DDP(model, **SMALL_BUCKETS)
    reducer = oktopk.register(ddp, **SPARSE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = 0
    if (folder / "latest").exists():
        first = int((folder / "latest").read_text())
        model.load_state_dict(torch.load(folder / f"model-{first}.pt", weights_only=True))
        oktopk.load(reducer, folder / f"reducer-{first}")
        (folder / "restarted").touch()
    for step, x in enumerate(batches(rank, STEPS)):
        if step < first:
            continue
        if step == kill_at and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            save(folder, step + 1, model, reducer)
    if rank == 0:
        torch.save(model.state_dict(), folder / "final.pt")
    reducer.close()
    dist.destroy_process_group()


def save(folder: Path, step: int, model: Net, reducer: oktopk.Reducer) -> None:
    oktopk.save(reducer, folder / f"reducer-{step}")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / f"model-{step}.pt")
        (folder / "latest.tmp").write_text(str(step))
        (folder / "latest.tmp").replace(folder / "latest")
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
