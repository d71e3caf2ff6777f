"""What the tests of faults run on every rank of a real world."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from front_end_cases import SMALL_BUCKETS, SPARSE, Net, batches

TIMEOUT = 5.0


def model_and_reducer(**options: Any) -> tuple[DDP, oktopk.Reducer]:
    ddp = DDP(Net(), **SMALL_BUCKETS)
    return ddp, oktopk.register(ddp, timeout=timedelta(seconds=TIMEOUT), **SPARSE, **options)


def train(ddp: DDP, steps: int, before_step: Any = None) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step, x in enumerate(batches(dist.get_rank(), steps)):
        if before_step is not None:
            before_step(step)
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()


def caught(work: Any) -> tuple[str, str, float]:
    """Type, message, and seconds until it came."""
    start = monotonic()
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error), monotonic() - start
    return "", "", monotonic() - start


def failing_thread() -> tuple[str, str, float]:
    """An exception inside the communication thread of rank 1, at step 4."""
    ddp, reducer = model_and_reducer()

    def sabotage(step: int) -> None:
        if step == 4 and dist.get_rank() == 1:
            reducer._pipeline.tools.wire.__dict__["pack"] = _raise_key_error

    outcome = caught(lambda: train(ddp, 8, sabotage))
    reducer.close()
    return outcome


def _raise_key_error(*_: object) -> None:
    raise KeyError("the inner part")


def late_rank() -> tuple[str, str, float]:
    """Rank 1 does not come to step 3 until long after the timeout."""
    ddp, reducer = model_and_reducer()

    def dawdle(step: int) -> None:
        if step == 3 and dist.get_rank() == 1:
            threading.Event().wait(TIMEOUT + 4)

    outcome = caught(lambda: train(ddp, 5, dawdle))
    reducer.close()
    return outcome


def mismatch() -> tuple[str, str, float]:
    """Ranks that registered different settings."""
    ddp = DDP(Net())
    reducer = oktopk.register(ddp, algorithm="oktopk" if dist.get_rank() else "topka", **SPARSE)
    outcome = caught(lambda: train(ddp, 1))
    reducer.close()
    return outcome


def several_faults() -> dict[str, tuple[str, str, float]]:
    """One after the other in one world: a broken reducer breaks nothing else."""
    return {"thread": failing_thread(), "late": late_rank(), "mismatch": mismatch(), "again": failing_thread()}


def killed(victim: int, at: float) -> tuple[str, str, float]:
    """`kill -9` of one rank, `at` a step (its fraction: how far into the step's backward)."""
    faulthandler.dump_traceback_later(200)  # if this hangs, say where
    ddp, _ = model_and_reducer()
    death = [0.0]

    def die(step: int) -> None:
        if step == int(at):
            death[0] = monotonic()
            if dist.get_rank() == victim:
                delay = (at - int(at)) * 0.02
                threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    kind, message, _ = caught(lambda: train(ddp, 10_000, die))
    faulthandler.cancel_dump_traceback_later()
    return kind, message, monotonic() - death[0]


def stopped() -> tuple[str, str, float]:
    """Rank 0, whose process holds the store, is stopped (SIGSTOP) before step 3: nothing of it answers any more."""
    ddp, _ = model_and_reducer()
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    start = [0.0]

    def stop(step: int) -> None:
        if step == 3:
            start[0] = monotonic()
            if dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGSTOP)

    kind, message, _ = caught(lambda: train(ddp, 10_000, stop))
    seconds = monotonic() - start[0]
    if dist.get_rank() == dist.get_world_size() - 1:
        threading.Timer(5.0, lambda: os.kill(int(pids[0]), signal.SIGKILL)).start()  # when the others are done too
    return kind, message, seconds


def raising_script() -> None:
    """Rank 1's own code raises at step 3 and nobody catches anything: everyone must exit."""
    ddp, _ = model_and_reducer()

    def fail(step: int) -> None:
        if step == 3 and dist.get_rank() == 1:
            raise ValueError("a bug in the training script")

    train(ddp, 10_000, fail)


def soak(steps: int) -> dict[str, Any]:
    """Random shapes, densities and gradients, some of them not finite."""
    import resource

    schedule = {0: 0.5, steps // 5: 0.1, 2 * steps // 5: 0.02, 3 * steps // 5: 0.3, 4 * steps // 5: 0.01}
    reducer = oktopk.Reducer(density=schedule, min_numel=16, on_nonfinite="skip", warmup_steps=20)
    shared = torch.Generator().manual_seed(0)  # the same on all ranks
    own = torch.Generator().manual_seed(1 + reducer.rank)
    sizes = [int(torch.randint(1, 6000, (1,), generator=shared)) for _ in range(40)]
    weights = [torch.zeros(size) for size in sizes]
    memory, skipped = [], 0
    for step in range(steps):
        which = int(torch.randint(len(sizes), (1,), generator=shared))
        grad = torch.randn(sizes[which], generator=own) * 10 ** float(torch.randint(-6, 6, (1,), generator=own))
        if float(torch.rand(1, generator=own)) < 0.01:
            grad[0] = float("inf")
        mean = reducer.reduce(f"p{which}", grad)
        if mean.isfinite().all():
            weights[which] -= 0.01 * mean
        else:
            skipped += 1
        if step % (steps // 10) == steps // 10 - 1:
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    finite = all(bool(r.isfinite().all()) for r in reducer.residuals().values())
    reducer.close()
    return {"weights": weights, "memory": memory, "skipped": skipped, "finite": finite}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    globals()[sys.argv[1]]()


def killed_while_synchronising(overlap: bool) -> tuple[str, str, float]:
    """Rank 1 is killed in the middle of a synchronisation of updates, the third."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = oktopk.local_steps(
        model, optimizer, algorithm="oktopk", every=2, overlap=overlap, min_numel=0, timeout=TIMEOUT
    )
    data = list(batches(dist.get_rank(), 9))

    def work() -> None:
        for step, x in enumerate(data):
            if step == 5 and dist.get_rank() == 1:
                handle.reducer._pipeline.tools.wire.__dict__["pack"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    outcome = caught(work)
    handle.close()
    return outcome
