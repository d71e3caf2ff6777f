"""Rows of results that a file keeps, so that no training is made twice."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

_writing = Lock()  # several trainings may end at once


def read_rows(file: Path) -> list[dict[str, Any]]:
    with _writing:
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def add_row(file: Path, row: Mapping[str, Any]) -> None:
    with _writing, file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


def train(command: Sequence[str], summary: Path) -> dict[str, Any]:
    """Run a command, and read what it says of its training."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(summary.read_text())
    return found
