"""What a run directory holds, as records. A value that was not recorded is None or absent, never NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from oktopk.errors import DataError, nearest
from oktopk.metrics import StepRecord

GPU_MEMORY = ("gpu_allocated_bytes", "gpu_peak_bytes", "gpu_reserved_bytes")


@dataclass(frozen=True)
class StepLine:
    """One line of steps.jsonl: an optimizer step as rank 0 saw it."""

    step: int
    epoch: int = 0
    loss: float | None = None
    lr: float | None = None
    wall_seconds: float | None = None
    memory_bytes: float | None = None
    gpu_allocated_bytes: float | None = None  # these three only where a GPU was used
    gpu_peak_bytes: float | None = None
    gpu_reserved_bytes: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    reduce: StepRecord | None = None


@dataclass(frozen=True)
class EpochLine:
    """One line of epochs.jsonl."""

    epoch: int
    train_loss: float | None = None
    dense_steps: int = 0
    sparse_steps: int = 0
    sparsity: float | None = None
    compression_ratio: float | None = None
    bytes_per_step: float | None = None
    dense_bytes_per_step: float | None = None
    seconds: float | None = None
    wall_seconds: float | None = None
    validation: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Histogram:
    """Counts between edges."""

    edges: Sequence[float]
    counts: Sequence[float]


@dataclass(frozen=True)
class Analysis:
    """What `--analyze-every` looked at on one step."""

    step: int
    before: Histogram | None = None
    after: Histogram | None = None
    density_by_parameter: Mapping[str, float] = field(default_factory=dict)
    overlap_count: float | None = None
    overlap_energy: float | None = None
    xi: float | None = None


@dataclass(frozen=True)
class Run:
    """A run directory, read."""

    name: str
    path: Path
    config: Mapping[str, Any]  # flattened: "train.lr" -> 0.01
    summary: Mapping[str, Any]
    steps: Sequence[StepLine]
    epochs: Sequence[EpochLine]
    analyses: Sequence[Analysis]

    def setting(self, *names: str) -> Any:
        """The first configured value whose key ends in one of the names, or None."""
        for name in names:
            for key, value in self.config.items():
                if key.rsplit(".", 1)[-1] == name and value is not None:
                    return value
        return None


def read_run(path: str | Path) -> Run:
    """The run in a directory; a directory without any of a run's files is an error."""
    path = Path(path)
    if not any((path / name).is_file() for name in ("config.json", "steps.jsonl", "epochs.jsonl")):
        raise DataError(
            f"{path} is not a run directory: expected config.json, steps.jsonl or epochs.jsonl in it. {_advice(path)}"
        )
    return Run(
        name=path.resolve().name,
        path=path,
        config=flatten(_read_json(path / "config.json")),
        summary=flatten(_read_json(path / "summary.json")),
        steps=_latest(map(_step, _read_lines(path / "steps.jsonl")), lambda step: step.step),
        epochs=_latest(map(_epoch, _read_lines(path / "epochs.jsonl")), lambda epoch: epoch.epoch),
        analyses=_latest(map(_analysis, _read_lines(path / "analysis.jsonl")), lambda analysis: analysis.step),
    )


def latest_run(parent: str | Path) -> Path:
    """The run under `parent` that was written to most recently."""
    runs = [path for path in Path(parent).glob("*") if (path / "config.json").is_file()]
    if not runs:
        raise DataError(f"no run in {parent}/: train first, e.g. `oktopk train speech`, or name a run directory.")
    return max(runs, key=_written_at)


def _written_at(run: Path) -> float:
    """When training last wrote; a report made later does not count."""
    written = [run / name for name in ("config.json", "steps.jsonl", "epochs.jsonl")]
    return max(path.stat().st_mtime for path in written if path.is_file())


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _advice(path: Path) -> str:
    siblings = [sibling.name for sibling in path.parent.glob("*") if (sibling / "config.json").is_file()]
    return nearest(path.name, siblings) if siblings else "Train first, e.g. `oktopk train speech`."


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}): the run is damaged; train it again or delete it.") from error
    return value if isinstance(value, dict) else {}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file. A last line cut short by a kill is left out."""
    if not path.is_file():
        return []
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line, parse_constant=_no_number))
        except ValueError as error:
            if number < len(lines):
                raise DataError(f"{path} line {number} is not JSON ({error}): the run is damaged.") from error
    return [record for record in records if isinstance(record, dict)]


def _no_number(_: str) -> None:
    return None


Record = TypeVar("Record")


def _latest(records: Iterable[Record], key: Callable[[Record], int]) -> list[Record]:
    """One record per key, the last written (a resumed run repeats steps), in order of the key."""
    by_key = {key(record): record for record in records}
    return [by_key[k] for k in sorted(by_key)]


def _step(record: Mapping[str, Any]) -> StepLine:
    return StepLine(
        step=int(record.get("step", 0)),
        epoch=int(record.get("epoch", 0)),
        seconds=_numbers(record.get("seconds")),
        reduce=StepRecord.from_json(record["reduce"]) if record.get("reduce") else None,
        **{name: number(record.get(name)) for name in ("loss", "lr", "wall_seconds", "memory_bytes", *GPU_MEMORY)},
    )


def _epoch(record: Mapping[str, Any]) -> EpochLine:
    optional = ("train_loss", "sparsity", "compression_ratio", "bytes_per_step", "dense_bytes_per_step", "seconds")
    return EpochLine(
        epoch=int(record.get("epoch", 0)),
        dense_steps=int(record.get("dense_steps", 0)),
        sparse_steps=int(record.get("sparse_steps", 0)),
        wall_seconds=number(record.get("wall_seconds")),
        validation=_numbers(record.get("validation")),
        **{name: number(record.get(name)) for name in optional},
    )


def _analysis(record: Mapping[str, Any]) -> Analysis:
    return Analysis(
        step=int(record.get("step", 0)),
        before=_histogram(record.get("histogram_before")),
        after=_histogram(record.get("histogram_after")),
        density_by_parameter=_numbers(record.get("density_by_parameter")),
        **{name: number(record.get(name)) for name in ("overlap_count", "overlap_energy", "xi")},
    )


def _histogram(record: Mapping[str, Any] | None) -> Histogram | None:
    if not record or len(record.get("edges", [])) != len(record.get("counts", [])) + 1 or not record["counts"]:
        return None
    return Histogram(tuple(map(float, record["edges"])), tuple(map(float, record["counts"])))


def _numbers(mapping: Mapping[str, Any] | None) -> dict[str, float]:
    """The finite numbers of a mapping."""
    found = {name: number(value) for name, value in (mapping or {}).items()}
    return {name: value for name, value in found.items() if value is not None}


def number(value: Any) -> float | None:
    """A finite float, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
