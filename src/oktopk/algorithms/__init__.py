"""One paper, one file, one class, one method."""

from __future__ import annotations

from typing import Any

from oktopk.algorithms.base import Algorithm
from oktopk.algorithms.dense import Dense
from oktopk.algorithms.gaussiank import GaussianK
from oktopk.algorithms.gtopk import GTopk
from oktopk.algorithms.oktopk import OkTopk
from oktopk.algorithms.randomk import RandomK
from oktopk.algorithms.topka import TopkA
from oktopk.algorithms.topkdsa import TopkDSA
from oktopk.config import (
    DenseConfig,
    GaussianKConfig,
    GTopkConfig,
    OkTopkConfig,
    RandomKConfig,
    TopkAConfig,
    TopkDSAConfig,
)

ALGORITHMS: dict[str, tuple[type[Any], type[Any]]] = {
    "dense": (DenseConfig, Dense),
    "topka": (TopkAConfig, TopkA),
    "topkdsa": (TopkDSAConfig, TopkDSA),
    "gtopk": (GTopkConfig, GTopk),
    "gaussiank": (GaussianKConfig, GaussianK),
    "randomk": (RandomKConfig, RandomK),
    "oktopk": (OkTopkConfig, OkTopk),
}

__all__ = ["ALGORITHMS", "Algorithm"]
