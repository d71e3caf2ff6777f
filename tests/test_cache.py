"""The cache of prepared data: filled once, whole, and for everyone who may read it."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oktopk.errors import DataError
from oktopk.workloads.cache import cached_folder

NOBODY = 65534


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A shared cache, in a place that other users can reach."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        monkeypatch.setenv("OKTOPK_CACHE", f"{place}/cache")
        yield Path(place) / "cache"


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def another_user() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def fill(folder: Path) -> None:
    """As archives are unpacked: one member is its owner's alone."""
    (folder / "part").mkdir()
    (folder / "part" / "open.txt").write_text("open")
    (folder / "part" / "closed.txt").write_text("closed")
    (folder / "part" / "closed.txt").chmod(0o600)


def refuse(folder: Path) -> None:
    raise AssertionError("it is there already")


@pytest.mark.parametrize(("mask", "files", "folders"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_what_is_prepared_has_the_rights_that_the_umask_gives(mask: int, files: int, folders: int, cache: Path) -> None:
    with umask(mask):
        made = cached_folder("made", ["key"], fill)
    rights = {path: path.stat().st_mode & 0o777 for path in (made, *made.rglob("*"))}
    assert all(right == (folders if path.is_dir() else files) for path, right in rights.items())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_second_user_reads_what_the_first_prepared(cache: Path) -> None:
    with umask(0o022):
        cached_folder("made", ["key"], fill)
    with another_user():
        found = cached_folder("made", ["key"], refuse)
        assert (found / "part" / "closed.txt").read_text() == "closed"
        with pytest.raises(DataError, match=r"cannot prepare .*set OKTOPK_CACHE"):
            cached_folder("made", ["another key"], fill)


def test_a_failure_leaves_no_folder_and_the_next_one_fills_it(cache: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise OSError("No space left on device")

    with pytest.raises(DataError, match="No space left"):
        cached_folder("made", ["key"], fail)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    assert (cached_folder("made", ["key"], fill) / "part" / "open.txt").read_text() == "open"


def test_where_there_are_no_locks_the_first_of_two_wins(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def slower(folder: Path) -> None:
        cached_folder("made", ["key"], lambda other: (other / "first").touch())
        (folder / "second").touch()

    monkeypatch.setattr(fcntl, "flock", no_locks)
    found = cached_folder("made", ["key"], slower)
    assert [path.name for path in found.iterdir()] == ["first"]
    assert [path for path in cache.iterdir() if path.is_dir()] == [found]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot prepare .*set OKTOPK_CACHE"):
        cached_folder("some", ["key"], fill)
