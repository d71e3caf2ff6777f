"""Where prepared data lives: built once, in one step, and shared by all ranks of a machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from oktopk.errors import DataError


def cache_root() -> Path:
    """`OKTOPK_CACHE`, or `~/.cache/oktopk`."""
    return Path(os.environ.get("OKTOPK_CACHE") or Path.home() / ".cache" / "oktopk")


def cached_folder(name: str, key: Iterable[object], fill: Callable[[Path], None]) -> Path:
    """The folder `fill` has filled for this key, filling it first if need be.

    Ranks may race: each fills its own temporary folder, and the first rename wins.
    """
    digest = hashlib.sha256(repr(tuple(key)).encode()).hexdigest()[:16]
    folder = cache_root() / f"{name}-{digest}"
    if not folder.exists():
        _fill_and_rename(folder, fill)
    return folder


def fingerprint(path: Path) -> tuple[str, int, int]:
    """Changes when the file does: absolute path, size, modification time."""
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns


def _fill_and_rename(folder: Path, fill: Callable[[Path], None]) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            fill(temporary)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if not folder.exists():
            raise DataError(
                f"cannot prepare {folder} ({error}): make room and rights there, or set OKTOPK_CACHE to another folder."
            ) from error
