"""What messages weigh and what making them costs, against `add_` and the numpy codec, in one run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oktopk.bench.measurement import Measurement, Measurements
from oktopk.bench.timing import race, threads
from oktopk.config import WIRES
from oktopk.types import SparseVector
from oktopk.wire import HEADER_BYTES, Wire, plain
from oktopk.wire import indices as index_codecs

NUMEL = 27_569_568  # the LSTM of the paper
DENSITY = 0.01
DENSITIES = (0.02, 0.01, 0.001)


@dataclass(frozen=True)
class WireRow:
    """One value format at one density, indices coded as the library chooses."""

    wire: str
    density: float
    nnz: int
    bits_per_pair: float
    pack_seconds: float
    unpack_seconds: float


@dataclass(frozen=True)
class IndexRow:
    """One index codec at one density."""

    codec: str
    density: float
    bits_per_index: float
    entropy: float


@dataclass(frozen=True)
class ErrorRow:
    """What rounding takes from values of one kind: its square over theirs, in blocks as they come."""

    wire: str
    values: str
    error: float


@dataclass(frozen=True)
class WireResult(Measurements):
    """Everything `oktopk bench wire` shows."""

    rows: list[WireRow]
    indices: list[IndexRow]
    errors: list[ErrorRow]

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {
            "wires": [asdict(row) for row in self.rows],
            "indices": [asdict(row) for row in self.indices],
            "errors": [asdict(row) for row in self.errors],
        }


def measure_wire(numel: int = NUMEL, repeats: int = 10) -> WireResult:
    """Measure on one thread; about half a minute at the full size."""
    with threads(1):
        vectors = {density: uniform(numel, density) for density in DENSITIES}
        rows = [_wire_row(wire, density, vectors[density], repeats) for density in DENSITIES for wire in WIRES]
        indices = [row for density in DENSITIES for row in _index_rows(density, vectors[density])]
        figures = [*_size_figures(rows, indices), *_time_figures(vectors[DENSITY], numel, repeats)]
    if numel != NUMEL:  # the targets are about the full size
        figures = [figure.without_targets() for figure in figures]
    errors = [_error_row(wire, kind, values) for kind, values in samples().items() for wire in WIRES]
    return WireResult(numel, figures, rows, indices, errors)


def uniform(numel: int, density: float) -> SparseVector:
    """Exactly round(density * numel) entries, anywhere with the same chance."""
    generator = torch.Generator().manual_seed(numel)
    k = max(1, round(density * numel))
    drawn = torch.randint(numel, (int(1.2 * k) + 16,), generator=generator).unique()
    chosen = drawn[torch.randperm(drawn.numel(), generator=generator)[:k]].sort().values
    return SparseVector(chosen.to(torch.int32), torch.randn(chosen.numel(), generator=generator), numel)


def samples(count: int = 1 << 14, density: float = DENSITY) -> dict[str, Tensor]:
    """Values as they travel: all that there are, or the largest of light-tailed and of heavy-tailed ones."""
    generator = torch.Generator().manual_seed(count)
    normal, *others = torch.randn(4, round(count / density), generator=generator)
    student = normal / torch.stack(others).square().mean(0).sqrt()
    return {"normal": normal[:count], "top of normal": _top(normal, count), "top of Student t(3)": _top(student, count)}


def _top(values: Tensor, count: int) -> Tensor:
    """In their order."""
    return values[values.abs().topk(count).indices.sort().values]


def _error_row(name: str, kind: str, values: Tensor) -> ErrorRow:
    indices = torch.arange(values.numel(), dtype=torch.int32)
    seen = Wire(name).pack(SparseVector(indices, values, values.numel())).values
    return ErrorRow(name, kind, float((seen - values).double().square().sum() / values.double().square().sum()))


def entropy(density: float) -> float:
    """Bits that an index needs at least, when positions are uniform."""
    return -math.log2(density) - (1 - density) / density * math.log2(1 - density)


def _wire_row(name: str, density: float, vector: SparseVector, repeats: int) -> WireRow:
    wire = Wire(name)
    message = wire.pack(vector).message
    best = race({"pack": lambda: wire.pack(vector), "unpack": lambda: wire.unpack(message)}, repeats)
    return WireRow(name, density, vector.nnz, 8 * message.numel() / vector.nnz, best["pack"], best["unpack"])


def _index_rows(density: float, vector: SparseVector) -> list[IndexRow]:
    rows = []
    for codec in ("rice", "bitmap", "block16", "raw32"):
        message = Wire("float32", indices=codec).pack(vector).message
        bits = 8 * (message.numel() - HEADER_BYTES) / vector.nnz - 32
        rows.append(IndexRow(codec, density, bits, entropy(density)))
    return rows


_BITS_PER_PAIR = (
    ("bfloat16", 25.5, 24.5),
    ("int8", 17.5, 16.5),
    ("int4", 13.0, 12.5),
    ("codebook2", 11.0, 10.5),
)  # wire, must, aim


def _size_figures(rows: list[WireRow], indices: list[IndexRow]) -> list[Measurement]:
    pairs = {row.wire: row.bits_per_pair for row in rows if row.density == DENSITY}
    bits = {row.density: row.bits_per_index for row in indices if row.codec == "rice"}
    return [
        *(
            Measurement(f"bits_per_pair_{wire}", f"bits per pair at {DENSITY}, {wire}", pairs[wire], must, aim)
            for wire, must, aim in _BITS_PER_PAIR
        ),
        *(
            Measurement(f"bits_per_index_{d}", f"bits per index at {d}", bits[d], 1.05 * entropy(d), 1.02 * entropy(d))
            for d in DENSITIES
        ),
    ]


def _time_figures(vector: SparseVector, numel: int, repeats: int) -> list[Measurement]:
    wire, residual, grad = Wire("bfloat16", indices="rice"), torch.randn(numel), torch.randn(numel)
    works: dict[str, Callable[[], object]] = {
        "add": lambda: residual.add_(grad),
        "wire": lambda: wire.unpack(wire.pack(vector).message),
    }
    best = race(works, repeats)
    numpy_seconds = race({"plain": lambda: _plain_round_trip(vector)}, 2)["plain"]
    ratio = best["wire"] / best["add"]
    return [
        Measurement("round_trip_over_add", "pack + unpack (bfloat16, Rice) / add_", ratio, 1.0, 0.4),
        Measurement("round_trip_seconds", "pack + unpack, seconds", best["wire"]),
        Measurement("add_seconds", "one add_, seconds", best["add"]),
        Measurement("plain_indices_seconds", "numpy codec, indices only, seconds", numpy_seconds),
    ]


def _plain_round_trip(vector: SparseVector) -> bool:
    """Rice-coded gaps there and back without numba."""
    indices = vector.indices.numpy()
    plan = index_codecs.plan(indices, vector.numel, index_codecs.RICE)
    data, back = np.empty(plan.nbytes, np.uint8), np.empty_like(indices)
    plain.rice_encode(indices, plan.parameter, data)
    return plain.rice_decode(data, plan.parameter, int(indices[0]), vector.numel, back)
