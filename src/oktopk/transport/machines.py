"""Which machine this is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def own_machine() -> str:
    """What ranks of one machine have in common, and no others.

    Under torchrun: the agent that started them. Else the running system, and the network it is seen through: containers
    and emulated hosts have their own.
    """
    agent = os.environ.get("GROUP_RANK")
    if agent is not None and "LOCAL_WORLD_SIZE" in os.environ:
        return f"torchrun {agent}"
    network = str(_NETWORK.stat().st_ino) if _NETWORK.exists() else ""
    return f"{socket.gethostname()} {_boot()} {network}"


def own_kernel() -> str:
    """What ranks have in common that share processors, however many hosts they are seen as."""
    return _boot() or socket.gethostname()


def _boot() -> str:
    return _BOOT.read_text().strip() if _BOOT.exists() else ""
