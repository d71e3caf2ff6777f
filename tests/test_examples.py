"""Every example runs on two processes, is short, and ends sparse; those that need a framework are slow."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from devices import fake_gpu
from worlds import free_port, run_script

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
NEEDS = {"accelerate_example": "accelerate", "trainer_example": "transformers", "lightning_example": "lightning"}

pytestmark = pytest.mark.timeout(600)


def _name(path: Path) -> str:
    return path.stem


@pytest.mark.processes
@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem not in NEEDS], ids=_name)
def test_an_example_runs_on_two_processes_and_ends_sparse(path: Path, tmp_path: Path) -> None:
    first, second = run_script(2, path, folder=tmp_path, timeout=200)
    assert first.code == second.code == 0, first.output + second.output
    assert "sparse" in first.output.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=_name)
def test_torchrun_starts_an_example_that_ends_sparse(path: Path, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(path.stem, "torch"))
    assert "sparse" in launch(path, 2, tmp_path).splitlines()[-1]


@pytest.mark.parametrize("path", EXAMPLES, ids=_name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80


@pytest.mark.parametrize("path", EXAMPLES, ids=_name)
def test_an_example_picks_its_device_by_itself(path: Path) -> None:
    assert "torch.cuda.is_available()" in path.read_text()


def test_an_example_computes_on_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    path = next(path for path in EXAMPLES if path.stem == "optimizer")
    world = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "OKTOPK_KERNELS": "reference",
    }
    for variable, value in (world | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "argv", [str(path)])
    with fake_gpu() as gpu:  # which refuses to mix its tensors with those of the host
        runpy.run_path(str(path), run_name="__main__")
    assert gpu.waits


@pytest.mark.slow
def test_the_ddp_example_resumes(tmp_path: Path) -> None:
    example = next(path for path in EXAMPLES if path.stem == "ddp")
    launch(example, 2, tmp_path, "run", "20")
    assert "step 40 " in launch(example, 2, tmp_path, "run", "20")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "again", "step"),
    [
        ("accelerate_example", (), "step 96 "),
        ("trainer_example", ("60",), "step 60 "),
        ("lightning_example", ("4",), "step 64 "),
    ],
)
def test_an_example_of_a_framework_resumes(name: str, again: tuple[str, ...], step: str, tmp_path: Path) -> None:
    """The reducer counts its own steps: those of both runs, without a second warm-up."""
    pytest.importorskip(NEEDS[name])
    example = next(path for path in EXAMPLES if path.stem == name)
    launch(example, 2, tmp_path)
    assert step in launch(example, 2, tmp_path, *again).splitlines()[-1]


@pytest.mark.slow
def test_fsdp2_shards_and_replicates_on_four_processes(tmp_path: Path) -> None:
    example = next(path for path in EXAMPLES if path.stem == "fsdp2")
    assert "sparse" in launch(example, 4, tmp_path)


def launch(path: Path, processes: int, folder: Path, *args: str) -> str:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes),
        "--master-port", str(free_port()), str(path), *args,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout.strip()
