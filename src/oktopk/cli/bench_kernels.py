"""`oktopk bench kernels`: what a local selection costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from oktopk.cli.console import console, table

if TYPE_CHECKING:
    from oktopk.bench.kernels_device import DeviceResult
    from oktopk.bench.measurement import Measurement


@dataclass(frozen=True)
class BenchKernels:
    """Time the local selection against torch's add_ and topk and the reference kernels, in one run, on one thread.

    At the default size figures have targets: exits with 1 when one misses what it must reach. With --device cuda:
    bytes per second on a GPU, against a copy there.

    Example:
      oktopk bench kernels --numel 1000000 --sizes 100000
    """

    numel: int = 27_569_568
    """Entries of the gradient; the default is the LSTM of the Ok-Topk paper."""
    repeats: int = 10
    """Runs of each, of which the best counts."""
    sizes: tuple[int, ...] = (100_000, 1_000_000, 100_000_000)
    """Entries of the second table; 100 million need 2 GB of memory."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where tensors are."""
    json: Path | None = None
    """Write all numbers to this file."""

    def __call__(self) -> int:
        return self._on_gpu() if self.device == "cuda" else self._on_cpu()

    def _on_gpu(self) -> int:
        from oktopk.bench.kernels_device import measure_on
        from oktopk.training.devices import find_place

        result = measure_on(find_place(self.device, 0), self.numel, self.repeats)
        show_traffic(result)
        write_json(self.json, result.to_json())
        return 0

    def _on_cpu(self) -> int:
        from oktopk.bench.kernels import measure_kernels

        result = measure_kernels(self.numel, self.repeats, self.sizes)
        out = console()
        out.print(
            measurement_table(f"{result.kernels} kernels, {self.numel:,} float32 entries, one thread", result.figures)
        )
        out.print(table("each kernel", [_stage(row) for row in result.stages]))
        out.print(table("how it grows", [_size(row) for row in result.sizes]))
        title = "whole synchronisation of updates, of two ranks on one core: processor time of one"
        out.print(table(title, [_synchronisation(row) for row in result.synchronisations]))
        out.print(f"first selection of a process: {result.warm_up.cold:.1f} s of CPU with nothing compiled, ", end="")
        out.print(f"{result.warm_up.warm:.2f} s with the cache on disk. Kernels: {result.reason}.")
        write_json(self.json, result.to_json())
        return 0 if result.ok else 1


def show_traffic(result: DeviceResult) -> None:
    """What a device does with its memory."""
    from oktopk.bench.kernels_device import traffic_rows

    title = f"{result.kernels} kernels on {result.device}, {result.numel:,} float32 entries, density {result.density:g}"
    console().print(table(title, traffic_rows(result)))
    extra = "" if result.extra_memory is None else f"A selection takes {result.extra_memory:.1%} of the gradient more. "
    console().print(f"{extra}Kernels: {result.reason}.", markup=False, soft_wrap=True)


def measurement_table(title: str, measurements: Sequence[Measurement]) -> Any:
    """What was measured, must, aim, ok."""
    return table(title, [_measurement(one) for one in measurements])


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _measurement(one: Measurement) -> dict[str, Any]:
    row: dict[str, Any] = {"figure": one.text, "measured": one.measured}
    row["must"] = f"{one.sign} {one.must:.4g}" if one.must is not None else ""
    row["aim"] = f"{one.sign} {one.aim:.4g}" if one.aim is not None else ""
    row["ok"] = _verdict(one)
    return row


def _verdict(one: Measurement) -> str:
    if one.must is None:
        return ""
    return "no" if not one.ok else "yes, and the aim" if one.aim is not None and one.reaches_aim else "yes"


def _stage(row: Any) -> dict[str, Any]:
    return {"kernel": row.kernel, "ms": 1e3 * row.seconds, "/ add_": row.over_add}


def _synchronisation(row: Any) -> dict[str, Any]:
    return {
        "algorithm": row.algorithm, "density": row.density, "wire": row.wire,
        "ms": 1e3 * median(row.seconds), "/ add_": row.over_add, "least": min(row.ratios), "most": max(row.ratios),
    }  # fmt: skip


def _size(row: Any) -> dict[str, Any]:
    return {
        "entries": f"{row.numel:,}", "selection, ms": 1e3 * row.selection_seconds, "add_, ms": 1e3 * row.add_seconds,
        "ns per entry": row.nanoseconds_per_entry, "selection / add_": row.ratio,
    }  # fmt: skip
