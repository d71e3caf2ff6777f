"""A run on disk: its configuration, one line per step and per epoch, a summary, checkpoints.

    config.json  summary.json  steps.jsonl  steps.csv  epochs.jsonl  analysis.jsonl  checkpoints/  tensorboard/

A number that does not exist (no sparse step yet, no validation in this epoch) is absent, never NaN.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oktopk.checkpoint import write_whole
from oktopk.errors import CheckpointError, ConfigError

STEPS, STEPS_CSV, EPOCHS, ANALYSIS = "steps.jsonl", "steps.csv", "epochs.jsonl", "analysis.jsonl"
_NOT_IN_CSV = ("message_sizes",)


class RunDirectory:
    """Reads and writes one run. Only rank 0 writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"

    @staticmethod
    def create(path: Path, config: Mapping[str, Any]) -> RunDirectory:
        """A new run; a folder that holds one already is left alone."""
        if (path / "config.json").exists():
            raise ConfigError(f"{path} holds a run already: give another --name, or continue it with --resume {path}.")
        path.mkdir(parents=True, exist_ok=True)
        run = RunDirectory(path)
        write_json(path / "config.json", config)
        return run

    @staticmethod
    def open(path: Path) -> RunDirectory:
        """A run that exists."""
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} is not a run: it has no config.json. Give a folder that oktopk train made.")
        return RunDirectory(path)

    @property
    def config(self) -> dict[str, Any]:
        return dict(read_json(self.path / "config.json"))

    @property
    def summary(self) -> dict[str, Any]:
        """The final numbers; empty while the run has not ended."""
        path = self.path / "summary.json"
        return dict(read_json(path)) if path.exists() else {}

    def rows(self, name: str) -> list[dict[str, Any]]:
        """All rows of one of the JSONL files; a last line that was cut off by a crash is left out."""
        path = self.path / name
        return read_jsonl(path) if path.exists() else []

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(finite(row), allow_nan=False) + "\n" for row in rows)

    def append_steps(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.append(STEPS, rows)
        _append_csv(self.path / STEPS_CSV, [flat(finite(row)) for row in rows])

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", finite(summary))

    def rewind(self, step: int, epoch: int) -> None:
        """Forget what was logged from `step` and `epoch` on: the resumed run will log it again."""
        steps = [row for row in self.rows(STEPS) if row["step"] < step]
        _rewrite(self.path / STEPS, steps)
        _rewrite(self.path / EPOCHS, [row for row in self.rows(EPOCHS) if row["epoch"] < epoch])
        _rewrite(self.path / ANALYSIS, [row for row in self.rows(ANALYSIS) if row["step"] < step])
        (self.path / STEPS_CSV).unlink(missing_ok=True)
        _append_csv(self.path / STEPS_CSV, [flat(row) for row in steps])
        (self.path / "summary.json").unlink(missing_ok=True)


def finite(value: Any) -> Any:
    """The same values without those that are not finite numbers."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items() if not _is_nonfinite(item)}
    return value


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as columns: {"seconds": {"data": 1}} becomes {"seconds_data": 1}."""
    columns: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping) and name not in _NOT_IN_CSV:
            columns |= flat(value, f"{prefix}{name}_")
        elif not isinstance(value, Mapping):
            columns[prefix + name] = value
    return columns


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file as a whole: a reader sees the old one or the new one."""
    write_whole(path, json.dumps(value, indent=2, allow_nan=False).encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _rewrite(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    if path.exists():
        write_whole(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _append_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    header = _csv_header(path) or list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, header, extrasaction="ignore", restval="")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def _csv_header(path: Path) -> list[str]:
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])
