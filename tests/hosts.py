"""Hosts unlike this one, for a process alone: other names in /etc/hosts, another host name (Linux namespaces)."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

_NEW_MOUNTS, _NEW_NAME = 0x00020000, 0x04000000  # CLONE_NEWNS, CLONE_NEWUTS of unshare(2)
_BIND, _PRIVATE_ALL = 4096, (1 << 18) | 16384  # MS_BIND, MS_PRIVATE | MS_REC of mount(2)


@dataclass(frozen=True)
class Host:
    """Calling it makes the calling process live there."""

    folder: Path  # for its files
    hosts: str  # /etc/hosts
    name: str
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.unshare(_NEW_MOUNTS | _NEW_NAME))
        _check(libc.mount(b"none", b"/", None, _PRIVATE_ALL, None))
        # Names that are in no file are nobody's: the only name server is a closed port.
        for path, text in (("/etc/hosts", self.hosts), ("/etc/resolv.conf", "nameserver 127.0.0.1\n")):
            file = self.folder / f"{Path(path).name}-{os.getpid()}"
            file.write_text(text)
            _check(libc.mount(str(file).encode(), path.encode(), None, _BIND, None))
        socket.sethostname(self.name)
        os.environ |= self.environment


def why_not() -> str | None:
    """Why this system lets nobody make hosts, if so."""
    try:
        tried = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True, text=True, timeout=20)
    except OSError as error:
        return f"unshare(1) is missing: {error}"
    return f"namespaces are not permitted: {tried.stderr.strip()}" if tried.returncode else None


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
