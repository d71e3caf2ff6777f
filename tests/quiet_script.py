"""Two ranks that train with `local_steps` in a network of their own, and what its loopback device carried.

Run as `unshare --net python quiet_script.py KIND`: prints the bytes between synchronisations and at one.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import subprocess
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

EVERY, BATCH = 5, 4


def carried() -> int:
    """Bytes that this network's loopback device has received so far."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def settled() -> int:
    """`carried`, once late acknowledgements of what was sent before are through."""
    now, before = carried(), -1
    while now != before:
        time.sleep(0.15)
        now, before = carried(), now
    return now


def rank(number: int, port: int, kind: str, meet: Any, answers: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(number), "WORLD_SIZE": "2"}
    # As torchrun does: Lightning would start workers of its own.
    os.environ |= {
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "quiet",
    }
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import oktopk

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if kind in ("accelerate", "transformers", "lightning"):
        answers.put((number, in_framework(kind, meet), 0.0, ""))
        dist.destroy_process_group()
        return
    torch.manual_seed(number)
    model: nn.Module = nn.Sequential(nn.Linear(50, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 3))
    options = {"ddp": {}, "static": {"static_graph": True}, "unused": {"find_unused_parameters": True}}
    if kind != "plain":
        model = DistributedDataParallel(model, **options[kind.removesuffix(" compiled")])
    step_model = torch.compile(model, backend="eager") if kind.endswith(" compiled") else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = oktopk.local_steps(step_model, optimizer, density=0.1, every=EVERY)
    seen = []
    for _ in range(3 * EVERY):
        optimizer.zero_grad()
        step_model(torch.randn(BATCH, 50)).square().mean().backward()
        optimizer.step()
        meet.wait(60)
        seen.append(settled())
        meet.wait(60)
    handle.finish()
    weights = torch.cat([p.detach().flatten() for p in [*model.parameters(), *model.buffers()]])
    copied = 0.0
    if isinstance(model, DistributedDataParallel):
        other = copy.deepcopy(model)
        other(torch.randn(BATCH, 50)).sum().backward()  # other data on each rank, and yet one gradient: plain DDP
        copied = float(next(other.parameters()).grad.double().sum())
        refused = ""
        try:
            with model.join():
                model(torch.randn(BATCH, 50))
        except oktopk.OkTopkError as error:
            refused = str(error)
        assert "join()" in refused, refused
    answers.put((number, seen, copied, bytes(weights.numpy().tobytes()).hex()))
    handle.close()
    model(torch.randn(BATCH, 50)).sum().backward()  # plain DDP goes on
    dist.destroy_process_group()


def in_framework(kind: str, meet: Any) -> list[int]:
    import integration_updates as trainings

    seen: list[int] = []

    def look() -> None:
        meet.wait(60)
        seen.append(settled())
        meet.wait(60)

    options = {**trainings.OPTIONS, "every": EVERY}
    getattr(trainings, kind)("", False, trainings.Watch(look), options)
    return seen


def main(kind: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    context = multiprocessing.get_context("spawn")
    meet, answers = context.Barrier(2), context.Queue()
    processes = [context.Process(target=rank, args=(number, 29501, kind, meet, answers)) for number in range(2)]
    for process in processes:
        process.start()
    first, second = sorted(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    seen = first[1]
    quiet = [b - a for i, (a, b) in enumerate(pairwise(seen)) if (i + 2) % EVERY]
    loud = [b - a for i, (a, b) in enumerate(pairwise(seen)) if not (i + 2) % EVERY]
    print(json.dumps({"quiet": quiet, "loud": loud, "equal": first[3] == second[3], "copied": first[2] == second[2]}))


if __name__ == "__main__":
    main(sys.argv[1])
