"""The file of a benchmark's results: JSON lines, the first of which says what was measured, where and how."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oktopk.bench.cluster import Cluster
from oktopk.bench.host import describe_machine
from oktopk.errors import DataError


@dataclass(frozen=True)
class Header:
    """What every number of a run must be read with."""

    kind: str  # step, allreduce, scaling, overlap
    command: str
    world_size: int
    hosts: int
    per_host: int
    network: str
    bits_per_second: float | None
    latency: float
    emulated: bool
    notes: tuple[str, ...]
    machine: Mapping[str, Any]  # processor, cores, memory, kernel, versions
    costs: Mapping[str, Any]  # what the planner needs of this machine, measured with the run; empty if it was not


def header(
    kind: str, command: str, cluster: Cluster, costs: Mapping[str, Any] | None = None, notes: Sequence[str] = ()
) -> Header:
    network = cluster.network
    return Header(
        kind, command, cluster.world_size, cluster.hosts, cluster.per_host, network.label, network.bits_per_second,
        network.latency, cluster.emulated, (*cluster.notes, *_oversubscribed(cluster), *notes), describe_machine(),
        costs or {},
    )  # fmt: skip


def write_results(path: Path, header: Header, rows: Iterable[Any]) -> None:
    """Replace the file by these results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(header), allow_nan=False)]
    lines += [json.dumps(asdict(row), allow_nan=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_results(path: Path) -> tuple[Header, list[dict[str, Any]]]:
    """The header and the rows of a file."""
    if not path.is_file():
        raise DataError(f"there is no benchmark run {path}: write one with `oktopk bench step --json {path}`.")
    try:
        first, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return Header(**{**first, "notes": tuple(first["notes"])}), rows
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is not a benchmark run ({error}): write one with `oktopk bench step`.") from error


def _oversubscribed(cluster: Cluster) -> tuple[str, ...]:
    cores = os.cpu_count() or 1
    if cluster.world_size <= cores:
        return ()
    return (f"{cluster.world_size} ranks share {cores} cores: times are oversubscribed, volumes and rounds are exact",)
