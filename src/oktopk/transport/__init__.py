"""How bytes move between ranks."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from oktopk.errors import ConfigError
from oktopk.transport.base import Transport
from oktopk.transport.links import is_process_group
from oktopk.transport.metered import MeteredTransport
from oktopk.transport.threads import ThreadTransport, ThreadWorld, run_world
from oktopk.transport.torch_dist import TorchTransport

__all__ = [
    "MeteredTransport",
    "ThreadTransport",
    "ThreadWorld",
    "TorchTransport",
    "Transport",
    "open_transport",
    "run_world",
]

log = logging.getLogger("oktopk")


def open_transport(group: Any = None, timeout: timedelta | float | None = None) -> Transport:
    """A transport over `group`: a ProcessGroup, a Transport as it is, or None for every rank there is."""
    if hasattr(group, "all_to_all") and hasattr(group, "agree"):
        return cast(Transport, group)
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    if is_process_group(group) or (dist.is_available() and dist.is_initialized()):
        return cast(Transport, TorchTransport(group, timeout))
    if group is not None:
        raise ConfigError(f"group must be a ProcessGroup, a Transport or None, got {group!r}.")
    log.warning("torch.distributed is not initialised: this process reduces alone, and nothing is sent.")
    return cast(Transport, ThreadWorld(1).transports()[0])
