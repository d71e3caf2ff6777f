"""The algorithms a run may name, with the dataclass of each one's options."""

from __future__ import annotations

from typing import Any

from oktopk.algorithms import ALGORITHMS
from oktopk.config import AUTO, DenseConfig
from oktopk.errors import ConfigError, nearest
from oktopk.reduction.autotune import AutoConfig

CONFIGS: dict[str, type[Any]] = {**{name: config for name, (config, _) in ALGORITHMS.items()}, AUTO: AutoConfig}


def find_config(algorithm: str) -> type[Any]:
    """The options of an algorithm."""
    if algorithm not in CONFIGS:
        raise ConfigError(f"unknown algorithm {algorithm!r}. {nearest(algorithm, CONFIGS)}")
    return CONFIGS[algorithm]


def has_sparse_steps(algorithm: str) -> bool:
    return find_config(algorithm) is not DenseConfig
