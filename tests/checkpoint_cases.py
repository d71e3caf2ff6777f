"""What the tests of checkpoints run on every rank of a real world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from front_end_cases import SMALL_BUCKETS, SPARSE, Net, batches

HALF = 10
WAYS: dict[str, dict[str, Any]] = {
    "fresh thresholds": {},
    "reused thresholds": {"threshold": "reused", "reestimate_every": 4, "repartition_every": 4, "warmup_steps": 3},
    "one vector": {"fuse": "step"},
    "static graph": {"static_graph": True},
    "momentum": {"momentum_correction": 0.5, "factor_masking": True},
    "optimizer": {"optimizer": True},
    "gaussiank": {"algorithm": "gaussiank"},
}


class Run:
    """A model under training in one of the ways above."""

    def __init__(self, way: str) -> None:
        options = {**SPARSE, **WAYS[way]}
        static, wrapped = options.pop("static_graph", False), options.pop("optimizer", False)
        self.model: nn.Module = Net()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.forward: nn.Module = self.model
        if wrapped:
            self.optimizer = oktopk.DistributedOptimizer(self.optimizer, self.model, bucket_mb=0.002, **options)
            self.reducer = self.optimizer.reducer
        else:
            self.forward = DDP(self.model, static_graph=static, **SMALL_BUCKETS)
            self.reducer = oktopk.register(self.forward, **options)

    def train(self, first: int, last: int) -> Run:
        for step, x in enumerate(batches(dist.get_rank(), last)):
            if step >= first:
                self.optimizer.zero_grad()
                self.forward(x).square().mean().backward()
                self.optimizer.step()
        return self

    def end(self) -> dict[str, dict[str, Tensor]]:
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        residuals = self.reducer.residuals()
        self.reducer.close()
        return {"weights": weights, "residuals": residuals}


def straight_and_half(folder: str) -> dict[str, Any]:
    """Train to the end; and train half the way and save."""
    straight = {}
    for way in WAYS:
        straight[way] = Run(way).train(0, 2 * HALF).end()
        half = Run(way).train(0, HALF)
        oktopk.save(half.reducer, Path(folder) / way)
        dcp.save({"reducer": oktopk.RankState(half.reducer)}, checkpoint_id=Path(folder) / f"{way} dcp")
        if dist.get_rank() == 0:
            torch.save(half.model.state_dict(), Path(folder) / f"{way}.pt")
        half.end()
    return straight


def resume(folder: str, through: str) -> dict[str, Any]:
    """Load in fresh processes and train the rest."""
    resumed = {}
    for way in WAYS:
        run = Run(way)
        run.model.load_state_dict(torch.load(Path(folder) / f"{way}.pt", weights_only=True))
        if through == "dcp":
            dcp.load({"reducer": oktopk.RankState(run.reducer)}, checkpoint_id=Path(folder) / f"{way} dcp")
        else:
            oktopk.load(run.reducer, Path(folder) / way)
        resumed[way] = run.train(HALF, 2 * HALF).end()
    return resumed


def resume_both_ways(folder: str) -> dict[str, Any]:
    return {through: resume(folder, through) for through in ("oktopk", "dcp")}
