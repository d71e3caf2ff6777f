"""The contract that every algorithm owes its users, as functions over what each rank saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inputs import gradient
from oktopk import Reducer, StepRecord
from oktopk.bench.cost_model import predict


@dataclass(frozen=True)
class Case:
    """One thing to reduce for a few steps."""

    kind: str
    numel: int
    density: Any  # a constant or a schedule
    steps: int = 3
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.kind}-{self.numel}-{self.density}"


@dataclass(frozen=True)
class Seen:
    """What one rank saw in one step."""

    owed_before: Tensor
    grad: Tensor
    mean: Tensor
    owed_after: Tensor
    record: StepRecord


CASES = [
    *(
        Case(kind, 3000, {0: 0.1, 2: 0.01})
        for kind in ("normal", "heavy", "layers", "mostly_zero", "tied", "one_layer")
    ),
    Case("zero", 500, 0.1, steps=2),
    Case("normal", 2000, 0.001, steps=2),
    Case("normal", 700, 1.0, steps=2),
    Case("layers", 7, 0.9, steps=2),
    Case("normal", 3, 0.5, steps=2),  # fewer entries than ranks
    Case("normal", 1, 1.0, steps=2),
    Case("normal", 0, 0.5, steps=1),
]


def observe(transport: Any, rank: int, algorithm: str, case: Case, **options: Any) -> list[Seen]:
    """Reduce a case on one rank of a world, and note what happened."""
    seen = []
    with Reducer(algorithm, case.density, group=transport, min_numel=0, **options) as reducer:
        for step in range(case.steps):
            grad = gradient(case.kind, case.numel, rank, step).to(case.dtype)
            before = reducer.residuals().get("w", torch.zeros(case.numel))
            mean = reducer.reduce("w", grad)
            after = reducer.residuals().get("w", torch.zeros(case.numel))
            seen.append(Seen(before, grad, mean, after, reducer.last_step))
    return seen


def check_all(ranks: list[list[Seen]], algorithm: str, wire: str = "float32") -> None:
    """Everything that must hold of what all ranks saw."""
    for step in zip(*ranks, strict=True):
        check_same_bits(step)
        check_conservation(step)
        check_volume(step, algorithm, wire)
        check_record(step)


def check_same_bits(ranks: tuple[Seen, ...]) -> None:
    for seen in ranks[1:]:
        assert torch.equal(ranks[0].mean, seen.mean), "ranks got different means"


def check_conservation(ranks: tuple[Seen, ...]) -> None:
    put_in = sum(seen.owed_before.double() + seen.grad.double() for seen in ranks)
    came_out = len(ranks) * ranks[0].mean.double() + sum(seen.owed_after.double() for seen in ranks)
    # float32 rounds each addition to 6e-8 of its size; P of them, and the mean is rounded to the gradient's dtype.
    # Values of 2 bits may leave as more than they were, and their negative difference stays: that counts, too.
    size = sum(
        x.double().abs() for seen in ranks for x in (seen.owed_before, seen.grad, ranks[0].mean, seen.owed_after)
    )
    precision = 1e-6 if ranks[0].grad.dtype in (torch.float32, torch.float64) else 1e-2
    worst = ((put_in - came_out).abs() / (size + 1e-30)).max() if size.numel() else torch.tensor(0.0)
    assert worst <= precision, f"lost {worst:.2e} of an entry"


def check_volume(ranks: tuple[Seen, ...], algorithm: str, wire: str) -> None:
    for seen in ranks:
        record = seen.record
        bound = predict(algorithm, record.numel, record.k, len(ranks), wire, max(4, seen.grad.element_size()))
        assert record.bytes_received <= bound.bytes_received, f"{record.bytes_received} > {bound}"


def check_record(ranks: tuple[Seen, ...]) -> None:
    for seen in ranks:
        record = seen.record
        assert record.selected_global >= int(seen.mean.count_nonzero())
        assert 0.0 <= record.sparsity <= 1.0
        assert abs(record.residual_norm - float(seen.owed_after.double().norm())) <= 1e-3 * (1 + record.residual_norm)
        total = sum(size * n for sizes in record.message_sizes.values() for size, n in sizes.items())
        assert record.bytes_sent == total
