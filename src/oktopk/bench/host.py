"""The machine that numbers were measured on, and whether it had other things to do."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch


def describe_machine() -> dict[str, Any]:
    """Processor, memory, kernel and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    } | _gpus()


def _gpus() -> dict[str, str]:
    """Their names, where there are any."""
    if not torch.cuda.is_available():
        return {}
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"gpus": ", ".join(names), "cuda": str(torch.version.cuda or torch.version.hip)}


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
