"""The file of a benchmark's results: JSON lines, the first of which says what was measured, where and how."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from oktopk.bench.cluster import Cluster
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


def describe_machine() -> dict[str, Any]:
    """Processor, memory, kernel and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def busy_notes() -> tuple[str, ...]:
    """What a reader must know when other programs compute on this machine. Ask before the ranks start."""
    busy = psutil.cpu_percent(interval=0.5)  # not the load average: it remembers the benchmark before this one
    if busy < 10.0:
        return ()
    return (f"the machine was not idle: {busy:.0f}% of its cores were busy before the ranks started",)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _oversubscribed(cluster: Cluster) -> tuple[str, ...]:
    cores = os.cpu_count() or 1
    if cluster.world_size <= cores:
        return ()
    return (f"{cluster.world_size} ranks share {cores} cores: times are oversubscribed, volumes and rounds are exact",)
