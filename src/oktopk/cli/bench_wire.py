"""`oktopk bench wire`: what messages weigh and cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oktopk.cli.bench_kernels import measurement_table, write_json
from oktopk.cli.console import console, table


@dataclass(frozen=True)
class BenchWire:
    """Weigh messages of uniformly placed entries and time packing and unpacking against torch's add_, on one thread.

    At the default size figures have targets: exits with 1 when one misses what it must reach.

    Example:
      oktopk bench wire --numel 1000000
    """

    numel: int = 27_569_568
    """Entries of the gradient; the default is the LSTM of the Ok-Topk paper."""
    repeats: int = 10
    """Runs of each, of which the best counts."""
    json: Path | None = None
    """Write all numbers to this file."""

    def __call__(self) -> int:
        from oktopk.bench.wire import measure_wire

        result = measure_wire(self.numel, self.repeats)
        out = console()
        out.print(measurement_table(f"wire, {self.numel:,} entries, one thread", result.figures))
        out.print(table("value formats", [_wire(row) for row in result.rows]))
        out.print(table("index codecs", [_index(row) for row in result.indices]))
        out.print(table("lost to rounding, of the sum of squares (it stays owed)", _errors(result.errors)))
        write_json(self.json, result.to_json())
        return 0 if result.ok else 1


def _wire(row: Any) -> dict[str, Any]:
    return {
        "wire": row.wire, "density": row.density, "pairs": f"{row.nnz:,}", "bits per pair": row.bits_per_pair,
        "pack, ms": 1e3 * row.pack_seconds, "unpack, ms": 1e3 * row.unpack_seconds,
    }  # fmt: skip


def _errors(rows: list[Any]) -> list[dict[str, Any]]:
    kinds = list(dict.fromkeys(row.values for row in rows))
    by = {(row.wire, row.values): row.error for row in rows}
    return [
        {"wire": wire, **{kind: f"{by[wire, kind]:.2%}" for kind in kinds}}
        for wire in dict.fromkeys(row.wire for row in rows)
    ]


def _index(row: Any) -> dict[str, Any]:
    return {
        "codec": row.codec, "density": row.density, "bits per index": row.bits_per_index, "entropy": row.entropy,
    }  # fmt: skip
