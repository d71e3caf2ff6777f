"""Where prepared data lives: built once, in one step, and shared by all ranks of a machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from oktopk.errors import DataError


def cache_root() -> Path:
    """`OKTOPK_CACHE`, or `~/.cache/oktopk`."""
    return Path(os.environ.get("OKTOPK_CACHE") or Path.home() / ".cache" / "oktopk")


def cached_folder(name: str, key: Iterable[object], fill: Callable[[Path], None]) -> Path:
    """The folder `fill` has filled for this key, filling it first if need be.

    Of several processes one fills, and the others wait for it. A second user needs the right to read, nothing else.
    """
    digest = hashlib.sha256(repr(tuple(key)).encode()).hexdigest()[:16]
    folder = cache_root() / f"{name}-{digest}"
    if not folder.exists():
        with _locked(folder.with_name(f".{folder.name}.lock")):
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
            # Inside, because mkdtemp locks other users out; mkdir asks the umask.
            filled = temporary / folder.name
            filled.mkdir()
            fill(filled)
            _let_read(filled)
            filled.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if not folder.exists():
            raise DataError(
                f"cannot prepare {folder} ({error}): make room and rights there, or set OKTOPK_CACHE to another folder."
            ) from error


def _let_read(folder: Path) -> None:
    """Whoever may read the folder may read what is in it: archives bring rights of their own."""
    rights = stat.S_IMODE(folder.stat().st_mode)
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) | rights & (0o555 if path.is_dir() else 0o444))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; it falls with the process, so a crash leaves nothing to wait for."""
    with ExitStack() as stack:
        # Where there are no locks, or the cache is another user's, processes race: the first rename wins.
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
