"""What a machine offers to training, as facts with remedies."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import socket
import subprocess
import sys
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from oktopk.kernels import choose

_EXTRAS = {
    "trainer": ("rich", "tyro", "tensorboard", "safetensors", "psutil"),
    "speech": ("soundfile", "jiwer", "espeakng_loader"),
    "bert": ("transformers", "tokenizers"),
    "gpu": ("triton",),
}
_SELF_TEST_SECONDS = 120
_LEAST_MEMORY = 2 * 2**30


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    found: str
    fix: str | None = None  # what to do; None: nothing
    is_needed: bool = True  # training needs it; otherwise it is good to know


def examine() -> list[Check]:
    """Everything worth knowing, quick things first."""
    return [
        _python(), _torch(), _backends(), *_kernels(), _cores(), _memory(), _network(), *_extras(), _self_test(),
    ]  # fmt: skip


def _python() -> Check:
    wanted = None if sys.version_info >= (3, 11) else "install Python 3.11 or later"
    return Check("python", f"{platform.python_version()} ({sys.executable})", wanted)


def _torch() -> Check:
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return Check("torch", torch.__version__, None if release >= (2, 6) else "install torch 2.6 or later")


def _backends() -> Check:
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "cuda": torch.cuda.is_available(),
    }
    found = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in available.items())
    return Check("backends", found, None if available["gloo"] else "install a torch with Gloo")


def _kernels() -> list[Check]:
    """Which serve which device, and why."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    others = {"mps": torch.backends.mps.is_available(), "xpu": torch.xpu.is_available()}
    served = [torch.device("cpu"), *gpus, *(torch.device(name) for name, is_there in others.items() if is_there)]
    return [_kernels_for(device) for device in served] + ([] if len(served) > 1 else [_kernels_for_none()])


def _kernels_for(device: torch.device) -> Check:
    choice = choose(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    advice = None
    if device.type != "cpu" and choice.kernels.name != "triton":
        advice = "gradients are selected by plain torch, which is slower; please report the reason"
    return Check(f"kernels on {name}", f"{type(choice.kernels).__name__}: {choice.reason}", advice, is_needed=False)


def _kernels_for_none() -> Check:
    """What there would be for a GPU."""
    there = importlib.util.find_spec("triton") is not None
    known = f"triton {importlib.metadata.version('triton')} would compile them" if there else "and no triton for one"
    return Check("kernels on GPUs", f"no GPU here, {known}", is_needed=False)


def _cores() -> Check:
    mine, all_of_them = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return Check("cores", f"{mine} of {all_of_them} usable, load {os.getloadavg()[0]:.1f}")


def _memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f} GiB"
    advice = None if memory.available >= _LEAST_MEMORY else "free some memory, or train small presets only"
    return Check("memory", found, advice, is_needed=False)


def _network() -> Check:
    states = psutil.net_if_stats()
    addresses = psutil.net_if_addrs()
    found = [
        f"{name} {address.address}" + (f" {states[name].speed} Mbit/s" if states[name].speed else "")
        for name, known in addresses.items()
        for address in known
        if address.family == socket.AF_INET and name in states and states[name].isup
    ]
    return Check("network", ", ".join(found) or "no device is up", None if found else "bring up lo or another device")


def _extras() -> list[Check]:
    checks = []
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        advice = f"pip install 'oktopk[{extra}]' to use it" if missing else None
        found = f"missing {', '.join(missing)}" if missing else "installed"
        checks.append(Check(f"extra {extra}", found, advice, is_needed=False))
    return checks


def _self_test() -> Check:
    """A reduction by two real processes, as training does it."""
    name = "collectives on 2 processes"
    command = [sys.executable, "-m", "oktopk.training.self_test"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SELF_TEST_SECONDS)
    except subprocess.TimeoutExpired:
        return Check(name, f"no answer in {_SELF_TEST_SECONDS} s", "look for a firewall between local processes")
    if ended.returncode == 0:
        return Check(name, ended.stdout.strip() or "correct")
    said = (ended.stderr.strip() or ended.stdout.strip() or "no message").splitlines()[-1]
    return Check(name, f"failed: {said}", "try GLOO_SOCKET_IFNAME=lo, then oktopk doctor again")
