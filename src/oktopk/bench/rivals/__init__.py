"""Other ways to train with local steps, as they were published: what ours is compared with at equal bytes.

Benchmark code: plain and slow, every rank of it behind one verb, `synchronize_`, over a metered transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oktopk.bench.rivals.ablation import Ablation
from oktopk.bench.rivals.base import Rival
from oktopk.bench.rivals.diloco import DiLoCo
from oktopk.bench.rivals.sparseloco import SparseLoCo
from oktopk.bench.rivals.sparta import Sparta
from oktopk.bench.rivals.sparta_diloco import SpartaDiLoCo

__all__ = ["RIVALS", "Ablation", "DiLoCo", "Rival", "SparseLoCo", "Sparta", "SpartaDiLoCo"]

# Each is made from the weights that all ranks start with (flat), their shapes, a transport, and published settings.
RIVALS: Mapping[str, type[Any]] = {
    "sparseloco": SparseLoCo,
    "sparta": Sparta,
    "diloco": DiLoCo,
    "sparta_diloco": SpartaDiLoCo,
    "ablation": Ablation,  # no rival: ours, with something left out
}
