"""What kernels do with the memory of a GPU: bytes per second, against a copy, `torch.topk` and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import inf
from time import perf_counter
from typing import Any

import torch

from oktopk.bench.host import describe_machine
from oktopk.bench.kernels import DENSITY
from oktopk.bench.synchronisation import PIECES
from oktopk.bench.timing import race
from oktopk.kernels import Kernels, ReferenceKernels, choose
from oktopk.kernels.staged import StagedKernels
from oktopk.training.devices import Place
from oktopk.types import Difference

COPY = "copy (torch)"


@dataclass(frozen=True)
class TrafficRow:
    """One piece of work, and what it must read and write at least."""

    work: str
    seconds: float
    nbytes: int

    @property
    def gigabytes_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9


@dataclass(frozen=True)
class DeviceResult:
    """Everything `oktopk bench kernels --device cuda` shows."""

    device: str
    kernels: str
    reason: str
    numel: int
    density: float
    rows: list[TrafficRow]
    extra_memory: float | None  # most that a selection takes beside gradient and residual, over the gradient

    def of_copy(self, row: TrafficRow) -> float:
        """Its bytes per second over those of a copy on the same device."""
        copy = next(one for one in self.rows if one.work == COPY)
        return row.gigabytes_per_second / copy.gigabytes_per_second

    def to_json(self) -> dict[str, Any]:
        known = {name: value for name, value in asdict(self).items() if value is not None}
        rows = [
            asdict(row) | {"gigabytes_per_second": row.gigabytes_per_second, "of_copy": self.of_copy(row)}
            for row in self.rows
        ]
        return known | {"rows": rows, "machine": describe_machine()}


def measure_on(place: Place, numel: int, repeats: int) -> DeviceResult:
    """Seconds on the wall until the device is done, since that is what a training waits for."""
    choice = choose(place.device)
    bench = _Bench(place, choice.kernels, numel)
    works = {name: (_finished(work, place), nbytes) for name, (work, nbytes) in bench.works().items()}
    best = race({name: work for name, (work, _) in works.items()}, repeats, _finished(bench.begin, place), perf_counter)
    rows = [TrafficRow(name, best[name], nbytes) for name, (_, nbytes) in works.items()]
    return DeviceResult(
        place.name, choice.kernels.name, choice.reason, numel, DENSITY, rows, bench.extra_memory()
    )  # fmt: skip


def traffic_rows(result: DeviceResult) -> list[dict[str, Any]]:
    """What a device does with its memory, in figures for people."""
    return [
        {
            "work": row.work,
            "ms": f"{1e3 * row.seconds:.3f}",
            "GB/s": f"{row.gigabytes_per_second:.1f}",
            "of a copy": f"{result.of_copy(row):.0%}",
        }
        for row in result.rows
    ]


class _Bench:
    """A gradient and a residual on a device, and what is done with them."""

    def __init__(self, place: Place, kernels: Kernels, numel: int) -> None:
        generator = torch.Generator().manual_seed(numel)
        self.place, self.kernels, self.k = place, kernels, max(1, round(DENSITY * numel))
        self.plain = StagedKernels(place.device, ReferenceKernels())
        self.grad = torch.randn(numel, generator=generator).to(place.device)
        self.start = torch.randn(numel, generator=generator).mul_(2).clamp_(-4, 4).to(place.device)
        self.residual, self.spare = self.start.clone(), torch.empty_like(self.start)
        self.pieces = self.grad.split(-(-numel // PIECES))
        self.difference = Difference(self.residual, (self.start + 0.01 * self.grad).split(-(-numel // PIECES)))

    def begin(self) -> None:
        """As everything is before it is timed."""
        self.residual.copy_(self.start)

    def works(self) -> dict[str, tuple[Callable[[], object], int]]:
        """Each with its bytes: vectors read and written once, sparse vectors left out."""
        grad, residual, kernels, vector = self.grad, self.residual, self.kernels, self.grad.nbytes
        chosen, _ = kernels.select_topk(residual, self.k)
        return {
            COPY: (lambda: self.spare.copy_(grad), 2 * vector),
            "add_ (torch)": (lambda: residual.add_(grad), 3 * vector),
            "check, add, choose and retain": (lambda: self._select(kernels), 4 * vector),
            "the same in plain torch": (lambda: self._select(self.plain), 4 * vector),
            "add pieces and choose": (lambda: kernels.add(self.spare, residual, self.pieces, self.k), 3 * vector),
            "add and choose": (lambda: kernels.accumulate_(residual, grad, self.k), 3 * vector),
            "choose": (lambda: kernels.select_topk(residual, self.k), vector),
            "choose from updates": (lambda: kernels.scan(self.difference, self.k), 2 * vector),
            "fill": (lambda: kernels.fill_([self.spare], chosen), vector),
            "torch.topk, gather and clear": (self._topk, vector),
        }

    def extra_memory(self) -> float | None:
        """Of a device that counts it."""
        if self.place.device.type != "cuda":
            return None
        before = torch.cuda.memory_allocated(self.place.device)
        torch.cuda.reset_peak_memory_stats(self.place.device)
        self._select(self.kernels)
        return (torch.cuda.max_memory_allocated(self.place.device) - before) / self.grad.nbytes

    def _select(self, kernels: Kernels) -> None:
        kernels.all_below([self.grad], inf)
        kernels.accumulate_(self.residual, self.grad, self.k)
        kernels.retain_(self.residual, kernels.select_topk(self.residual, self.k)[0])

    def _topk(self) -> None:
        indices = self.residual.abs().topk(self.k).indices
        self.spare[: self.k] = self.residual[indices]
        self.residual[indices] = 0.0


def _finished(work: Callable[[], object], place: Place) -> Callable[[], None]:
    def until_done() -> None:
        work()
        place.finish()

    return until_done
