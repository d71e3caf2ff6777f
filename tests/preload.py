"""What a rank of a test world needs, made once in the server that ranks are forked from."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # a thread pool would not survive the fork

import torch
import torch._dynamo  # the first optimizer and the first DDP import it, which takes longer than most tests
import torch.distributed.checkpoint
import torch.nn.parallel

import oktopk
from oktopk.config import WIRES
from oktopk.transport import run_world

torch.set_num_threads(1)


def load_compiled_code(wire: str) -> None:
    """A step in a world of threads, which are gone before the first fork."""

    def work(transport: object) -> None:
        with oktopk.Reducer(density=0.1, group=transport, min_numel=0, wire=wire) as reducer:
            reducer.reduce("w", torch.randn(4096))

    run_world(2, work)


for _wire in WIRES:
    load_compiled_code(_wire)
