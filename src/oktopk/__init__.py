"""Sparse all-reduce for training neural networks over networks that are slower than the machines.

>>> import torch, oktopk
>>> reducer = oktopk.Reducer(algorithm="oktopk", density=0.01)
>>> mean = reducer.reduce("weight", torch.randn(1000, 10))
>>> reducer.close()
"""

from oktopk.algorithms import ALGORITHMS
from oktopk.checkpoint import RankState, load, save
from oktopk.config import PAPER_BERT, PAPER_LSTM, PAPER_VGG
from oktopk.errors import OkTopkError
from oktopk.front_ends.allreduce import sparse_allreduce
from oktopk.front_ends.ddp import HookState, hook, register
from oktopk.front_ends.fsdp import register_fsdp
from oktopk.front_ends.optimizer import DistributedOptimizer
from oktopk.front_ends.world import init_process_group
from oktopk.metrics import StepRecord
from oktopk.reducer import Reducer
from oktopk.schedule import exponential_warmup
from oktopk.types import Reduced, SparseVector

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "PAPER_BERT",
    "PAPER_LSTM",
    "PAPER_VGG",
    "DistributedOptimizer",
    "HookState",
    "OkTopkError",
    "RankState",
    "Reduced",
    "Reducer",
    "SparseVector",
    "StepRecord",
    "exponential_warmup",
    "hook",
    "init_process_group",
    "load",
    "register",
    "register_fsdp",
    "save",
    "sparse_allreduce",
]
