"""What a local selection costs, against `add_`, `topk` and the reference kernels, in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from oktopk.bench.measurement import Measurement, Measurements
from oktopk.bench.synchronisation import PIECES, SynchronisationRow, measure_synchronisations
from oktopk.bench.timing import race, threads
from oktopk.errors import UnsupportedError
from oktopk.kernels import Kernels, ReferenceKernels, choose
from oktopk.types import Difference, SparseVector
from oktopk.wire import Wire

NUMEL = 27_569_568  # the LSTM of the paper
DENSITY = 0.01
DENSITIES = (0.02, 0.01, 0.001)
SIZES = (100_000, 1_000_000, 100_000_000)

_FIRST_STEP = """
import json, time
from math import inf
import torch
imported = time.process_time()
from oktopk.kernels import choose
kernels = choose(torch.device("cpu")).kernels
residual, grad = torch.zeros(100_000), torch.randn(100_000)
kernels.all_below([grad], inf)
kernels.accumulate_(residual, grad, 1000)
chosen, _ = kernels.select_topk(residual, 1000)
kernels.retain_(residual, chosen)
kernels.fill_([grad], chosen)
print(json.dumps(time.process_time() - imported))
"""


@dataclass(frozen=True)
class SizeRow:
    """Cost of a whole local selection at one size."""

    numel: int
    selection_seconds: float
    add_seconds: float

    @property
    def nanoseconds_per_entry(self) -> float:
        return 1e9 * self.selection_seconds / self.numel

    @property
    def ratio(self) -> float:
        return self.selection_seconds / self.add_seconds


@dataclass(frozen=True)
class StageRow:
    """Cost of one kernel at the main size."""

    kernel: str
    seconds: float
    over_add: float


@dataclass(frozen=True)
class WarmUp:
    """CPU seconds of a process until its first selection is done, torch imported."""

    cold: float  # nothing compiled yet
    warm: float  # machine code on disk


@dataclass(frozen=True)
class KernelsResult(Measurements):
    """Everything `oktopk bench kernels` shows."""

    kernels: str
    reason: str
    stages: list[StageRow]
    sizes: list[SizeRow]
    synchronisations: list[SynchronisationRow]
    warm_up: WarmUp

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {
            "kernels": self.kernels,
            "stages": [asdict(row) for row in self.stages],
            "sizes": [
                asdict(row) | {"nanoseconds_per_entry": row.nanoseconds_per_entry, "over_add": row.ratio}
                for row in self.sizes
            ],
            "synchronisations": [asdict(row) | {"over_add": row.over_add} for row in self.synchronisations],
            "warm_up_seconds": asdict(self.warm_up),
        }


def measure_kernels(numel: int = NUMEL, repeats: int = 10, sizes: tuple[int, ...] = SIZES) -> KernelsResult:
    """Measure on one thread; a minute or two at the full size."""
    choice = choose(torch.device("cpu"))
    with threads(1):
        bench = _Bench(choice.kernels, numel)
        figures = [*bench.ratios(repeats), *bench.memory_and_count()]
        if numel != NUMEL:  # the targets are about the full size
            figures = [figure.without_targets() for figure in figures]
        stages = bench.stages(repeats)
        del bench
        rows = [_Bench(choice.kernels, size).row(repeats if size <= NUMEL else 3) for size in sizes]
        whole = measure_synchronisations(numel, repeats)
    return KernelsResult(numel, figures, choice.kernels.name, choice.reason, stages, rows, whole, measure_warm_up())


def measure_warm_up() -> WarmUp:
    """The first step of two fresh processes that share a fresh cache."""
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (_first_step(cache) for _ in range(2))
    return WarmUp(cold, warm)


class _Bench:
    """A gradient, a residual, and the ways to select from their sum."""

    def __init__(self, kernels: Kernels, numel: int) -> None:
        generator = torch.Generator().manual_seed(numel)
        self.kernels = kernels
        self.grad = torch.randn(numel, generator=generator)
        # What a residual looks like after a while: larger than a gradient, its largest entries gone.
        self.start = torch.randn(numel, generator=generator).mul_(2).clamp_(-4, 4)
        self.residual = self.start.clone()

    def k(self, density: float) -> int:
        return max(1, round(density * self.grad.numel()))

    def select(self, density: float = DENSITY, kernels: Kernels | None = None) -> Callable[[], SparseVector]:
        """The whole local selection: check, accumulate, choose, and clear what was chosen from the residual."""
        kernels, k = kernels or self.kernels, self.k(density)

        def work() -> SparseVector:
            kernels.all_below([self.grad], inf)
            kernels.accumulate_(self.residual, self.grad, k)
            chosen, _ = kernels.select_topk(self.residual, k)
            kernels.retain_(self.residual, chosen)
            return chosen

        return work

    def synchronize(self) -> Callable[[], None]:
        """What a synchronisation of updates costs a rank: choose, code as int8, decode as much, move the weights."""
        kernels, k, wire = self.kernels, self.k(DENSITY), Wire("int8")
        own = tuple(part.clone() for part in self.start.split(max(1, self.start.numel() // PIECES)))
        difference = Difference(self.residual, own)

        def work() -> None:
            kernels.scan(difference, k)
            packed = wire.pack(kernels.select_topk(difference, k)[0])
            arrived = wire.unpack(packed.message)
            kernels.move_(difference, arrived.with_values(arrived.values / 2), arrived)

        return work

    def topk(self, density: float) -> Callable[[], tuple[Tensor, Tensor]]:
        """What one writes without kernels; it does not even accumulate."""

        def work() -> tuple[Tensor, Tensor]:
            indices = self.residual.abs().topk(self.k(density)).indices
            values = self.residual[indices]
            self.residual[indices] = 0.0
            return indices, values

        return work

    def _away(self, work: Callable[[], None]) -> Callable[[], None]:
        """Weights that have moved since the last time: shared ones are put back before each run, own ones are not."""
        self.residual.add_(self.grad, alpha=0.01)
        work()
        return work

    def add(self) -> None:
        self.residual.add_(self.grad)

    def ratios(self, repeats: int) -> list[Measurement]:
        ours = self._race({"add": self.add, **{str(d): self.select(d) for d in DENSITIES}}, repeats)
        moved = self._race({"add": self.add, "synchronize": self._away(self.synchronize())}, repeats)
        topk = self._race({str(d): self.topk(d) for d in DENSITIES}, 2)
        reference = self._race({"reference": self.select(kernels=ReferenceKernels())}, 1)["reference"]
        main = str(DENSITY)
        return [
            Measurement("selection_over_add", f"local selection at {main} / add_", ours[main] / ours["add"], 4.5, 2.5),
            *(
                Measurement(
                    f"speedup_over_topk_{d}", f"torch.topk / local selection at {d}", topk[d] / ours[d], 10, 25, True
                )
                for d in topk
            ),
            Measurement("speedup_over_reference", f"reference / local selection at {main}", reference / ours[main]),
            Measurement(
                "synchronisation_over_add",
                f"synchronisation of updates at {main}, int8 / add_",
                moved["synchronize"] / moved["add"],
            ),
            Measurement("add_seconds", "one add_, seconds", ours["add"]),
            Measurement("selection_seconds", f"local selection at {main}, seconds", ours[main]),
        ]

    def memory_and_count(self) -> list[Measurement]:
        self.residual.copy_(self.start)
        # Buffers grow to the largest k they ever served, so a fresh instance tells what this one needs.
        fresh = choose(torch.device("cpu")).kernels
        chosen, k = self.select(kernels=fresh)(), self.k(DENSITY)
        extra = getattr(fresh, "scratch_bytes", 0) + chosen.indices.nbytes + chosen.values.nbytes
        return [
            Measurement("extra_memory", f"scratch and choice at {DENSITY} / gradient", extra / self.grad.nbytes, 0.10),
            Measurement("selected_error", "|selected - k| / k", abs(chosen.nnz - k) / k, 0.02),
        ]

    def stages(self, repeats: int) -> list[StageRow]:
        k, kernels = self.k(DENSITY), self.kernels
        chosen, threshold = kernels.select_topk(self.residual, k)
        lists = _split(chosen, 8)
        works: dict[str, Callable[[], object]] = {
            "add_ (torch)": self.add,
            "all_below": lambda: kernels.all_below([self.grad], inf),
            "accumulate_": lambda: kernels.accumulate_(self.residual, self.grad),
            "accumulate_ and gather": lambda: kernels.accumulate_(self.residual, self.grad, k),
            "select_topk": lambda: kernels.select_topk(self.residual, k),
            "select_above": lambda: kernels.select_above(self.start, threshold),
            "count_above": lambda: kernels.count_above(self.start, threshold),
            "magnitude_histogram of k": lambda: kernels.magnitude_histogram(chosen.values, 16, 0, 1 << 15),
            "sum_sparse of 8 x k/8": lambda: kernels.sum_sparse(lists),
            "common of k and k": lambda: kernels.common(chosen, chosen.indices),
            "above of k": lambda: kernels.above(chosen, 0.0),
            "retain_": lambda: kernels.retain_(self.residual, chosen),
            "fill_": lambda: kernels.fill_([self.residual], chosen),
        }
        best = self._race(works, repeats)
        return [StageRow(name, seconds, seconds / best["add_ (torch)"]) for name, seconds in best.items()]

    def row(self, repeats: int) -> SizeRow:
        best = self._race({"add": self.add, "select": self.select()}, repeats)
        return SizeRow(self.grad.numel(), best["select"], best["add"])

    def _race(self, works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        return race(works, repeats, before=lambda: self.residual.copy_(self.start))


def _split(vector: SparseVector, parts: int) -> list[SparseVector]:
    """Every parts-th entry: lists that interleave."""
    return [
        SparseVector(vector.indices[i::parts].contiguous(), vector.values[i::parts].contiguous(), vector.numel)
        for i in range(parts)
    ]


def _first_step(cache: str) -> float:
    environment = os.environ | {"NUMBA_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, "-c", _FIRST_STEP], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UnsupportedError(f"a fresh process could not select:\n{done.stderr}")
    return float(json.loads(done.stdout))
