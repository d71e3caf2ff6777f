"""Machine code is made once and linked everywhere without the compiler, and it stands alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oktopk
from oktopk.kernels import linking
from oktopk.kernels.linking import Library, MadeLoop, _find

KINDS = ("1i4", "1u4", "1i4", "1i4", "1u4")  # of `common`, the smallest loop


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of loops that were compiled, with an empty directory to keep them in."""
    from oktopk.kernels import compiling

    names, make = [], compiling.make
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "make", lambda *args: (names.append(args[1]), make(*args))[1])
    return names


@pytest.mark.processes
def test_a_process_that_reduces_does_not_load_the_compiler() -> None:
    """Half of what it cost with numba: 0.68 s of CPU and 137 MB."""
    with oktopk.Reducer(density=0.01, wire="int8") as reducer:  # makes what is missing on disk
        for _ in range(2):
            reducer.reduce("w", torch.randn(100_000))
    script = Path(__file__).parent / "first_use.py"
    ended = subprocess.run(
        [sys.executable, str(script), "int8"], capture_output=True, text=True, check=True, timeout=100
    )
    seconds, megabytes, numba = ended.stdout.replace(" s of CPU", "").replace(" MB", "").split(", ")
    assert numba.strip() == "numba False"
    assert float(megabytes) < 80
    assert float(seconds) < 0.68  # half of that on an idle machine


def common(library: Library) -> tuple[int, list[int]]:
    indices, others = np.array([1, 4, 9], np.int32), np.array([4, 5, 9], np.int32)
    kept, bits = np.zeros(4, np.int32), np.zeros(4, np.uint32)
    return library.common(indices, np.arange(3, dtype=np.uint32), others, kept, bits), kept[:2].tolist()


def test_a_loop_is_made_once_and_read_afterwards(made: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        loop = _find("oktopk.kernels.cpu_sparse", "common", KINDS)
    assert made == ["common"]
    assert [path.suffix for path in tmp_path.iterdir()] == [".loop"]
    assert MadeLoop.from_bytes(loop.to_bytes()) == loop


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"nonsense", lambda data: b"{}\n" + data])
def test_a_damaged_file_is_made_anew(made: list[str], tmp_path: Path, damage: Any) -> None:
    whole = _find("oktopk.kernels.cpu_sparse", "common", KINDS)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert _find("oktopk.kernels.cpu_sparse", "common", KINDS).symbol == whole.symbol
    assert made == ["common"] * 2
    assert MadeLoop.from_bytes(path.read_bytes()) is not None


def test_other_sources_make_other_machine_code(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _find("oktopk.kernels.cpu_sparse", "common", KINDS)
    monkeypatch.setattr(linking, "_sources", lambda module: "edited")
    _find("oktopk.kernels.cpu_sparse", "common", KINDS)
    assert made == ["common"] * 2


def test_nowhere_to_write_means_to_compile_for_oneself(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/nowhere")
    for _ in range(2):
        assert _find("oktopk.kernels.cpu_sparse", "common", KINDS).code
    assert made == ["common"] * 2


def test_threads_that_call_first_at_the_same_time_get_one_loop() -> None:
    library, results = Library("oktopk.kernels.cpu_sparse"), []
    threads = [threading.Thread(target=lambda: results.append(common(library))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(2, [4, 9])] * 8


def test_arrays_and_scalars_that_do_not_fit_are_refused() -> None:
    library, bits = Library("oktopk.kernels.cpu_loops"), np.arange(128, dtype=np.uint32)
    assert library.count_at_least(bits, np.uint64(100)) == 28
    assert library.count_at_least(bits.astype(np.uint64), np.uint64(100)) == 28, "another kind, another loop"
    assert library.any_at_least(bits, np.uint64(200)) is False
    with pytest.raises(ValueError, match="contiguous"):
        library.count_at_least(bits[::2], np.uint64(100))
    with pytest.raises(TypeError):
        library.count_at_least(bits, "100")
    with pytest.raises(AttributeError):
        library.no_such_loop(bits)


def test_references_are_neither_lost_nor_kept() -> None:
    library, bits = Library("oktopk.kernels.cpu_loops"), np.zeros(64, np.uint32)
    library.any_at_least(bits, np.uint64(1))
    before = sys.getrefcount(bits), sys.getrefcount(False), sys.getrefcount(NotImplemented)
    for _ in range(1000):
        library.any_at_least(bits, np.uint64(1))
    after = sys.getrefcount(bits), sys.getrefcount(False), sys.getrefcount(NotImplemented)
    assert all(abs(one - other) < 500 for one, other in zip(before, after, strict=True))


def test_a_loop_that_allocates_does_not_stand_alone() -> None:
    with pytest.raises(RuntimeError, match="may neither allocate nor raise"):
        Library("allocating_loops").allocate(np.zeros(4))


def test_loops_need_their_compiler_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ImportError, match="numba"):
        Library("oktopk.kernels.cpu_loops")
