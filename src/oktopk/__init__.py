"""Sparse all-reduce for training neural networks over networks that are slower than the machines.

>>> import torch, oktopk
>>> reducer = oktopk.Reducer(algorithm="oktopk", density=0.01)
>>> mean = reducer.reduce("weight", torch.randn(1000, 10))
>>> reducer.close()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oktopk.algorithms import ALGORITHMS
    from oktopk.checkpoint import RankState, load, save
    from oktopk.config import PAPER_BERT, PAPER_LSTM, PAPER_VGG
    from oktopk.errors import OkTopkError
    from oktopk.front_ends.allreduce import sparse_allreduce
    from oktopk.front_ends.ddp import HookState, hook, register
    from oktopk.front_ends.fsdp import register_fsdp
    from oktopk.front_ends.local_steps import LocalSteps, local_steps
    from oktopk.front_ends.optimizer import DistributedOptimizer
    from oktopk.front_ends.world import init_process_group
    from oktopk.metrics import StepRecord
    from oktopk.reducer import Reducer
    from oktopk.schedule import exponential_warmup
    from oktopk.types import Reduced, SparseVector

__version__ = "0.2.0.dev0"

# Where each name is found when it is first used: the command line must not wait for torch to say what it can do.
_HOMES = {
    "ALGORITHMS": "oktopk.algorithms",
    "PAPER_BERT": "oktopk.config",
    "PAPER_LSTM": "oktopk.config",
    "PAPER_VGG": "oktopk.config",
    "DistributedOptimizer": "oktopk.front_ends.optimizer",
    "HookState": "oktopk.front_ends.ddp",
    "LocalSteps": "oktopk.front_ends.local_steps",
    "OkTopkError": "oktopk.errors",
    "RankState": "oktopk.checkpoint",
    "Reduced": "oktopk.types",
    "Reducer": "oktopk.reducer",
    "SparseVector": "oktopk.types",
    "StepRecord": "oktopk.metrics",
    "exponential_warmup": "oktopk.schedule",
    "hook": "oktopk.front_ends.ddp",
    "init_process_group": "oktopk.front_ends.world",
    "load": "oktopk.checkpoint",
    "local_steps": "oktopk.front_ends.local_steps",
    "register": "oktopk.front_ends.ddp",
    "register_fsdp": "oktopk.front_ends.fsdp",
    "save": "oktopk.checkpoint",
    "sparse_allreduce": "oktopk.front_ends.allreduce",
}

__all__ = [
    "ALGORITHMS",
    "PAPER_BERT",
    "PAPER_LSTM",
    "PAPER_VGG",
    "DistributedOptimizer",
    "HookState",
    "LocalSteps",
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
    "local_steps",
    "register",
    "register_fsdp",
    "save",
    "sparse_allreduce",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        return _submodule(name)
    globals()[name] = found = getattr(import_module(_HOMES[name]), name)
    return found


def _submodule(name: str) -> Any:
    try:
        return import_module(f"oktopk.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"oktopk.{name}":
            raise
        raise AttributeError(f"module 'oktopk' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return [*__all__, *globals()]
