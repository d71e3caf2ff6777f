"""What holds for every test."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# A shell that runs the tests in the background lets them ignore Ctrl-C, and every process they start inherits that:
# those that are to be interrupted would go on for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton's kernels run as numpy, on the CPU: whether they are right needs no card. It looks when they are imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

PROGRAMS = ("python", "bash", "chrom", "mpi")  # what takes seconds to start; `ip` and `git` do not
_started: list[str] = []


def _listen(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        executable, words = args[:2]
        names = [Path(str(word)).name for word in (executable, *([words] if isinstance(words, str) else words))]
        _started.extend(name for name in names if name.startswith(PROGRAMS))
    elif event in ("os.forkpty", "tests.fork"):
        _started.append(event)


sys.addaudithook(_listen)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with processes first: they take longest, and a long one at the end leaves the other workers idle."""
    long = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    yield from _unmarked_tests_start_nothing(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield from _unmarked_tests_start_nothing(item)


def _unmarked_tests_start_nothing(item: pytest.Item) -> Generator[None, None, None]:
    """`make test-fast` leaves out what is marked, and is fast only if everything is marked that has to be."""
    _started.clear()
    yield
    if _started and not any(item.get_closest_marker(name) for name in ("processes", "slow")):
        pytest.fail(f"this test starts {_started[0]}: give it @pytest.mark.processes", pytrace=False)
