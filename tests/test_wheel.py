"""The wheel: what `pip install` gives somebody who has no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that had nothing in it, and got the wheel with what that says it needs."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("oktopk-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "environment")
    interpreter = folder / "environment" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-compile"]
    pinned = ["--constraint", ROOT / "constraints.txt"]
    run(*install, *pinned, f"torch=={torch.__version__.partition('+')[0]}")
    run(*install, *pinned, f"{wheel}[trainer]")
    return interpreter


def run(*command: object, folder: Path = Path("/")) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_an_environment_with_the_wheel_is_ready(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import oktopk; print(oktopk.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parent.parent), "that is another installation"
    assert run(python.with_name("oktopk"), "doctor", folder=tmp_path).strip().splitlines()[-1] == "ready"


def test_a_reducer_works_there(python: Path, tmp_path: Path) -> None:
    code = "import torch, oktopk; print(oktopk.Reducer(density=0.1).reduce('w', torch.ones(5000)).sum().item())"
    assert float(run(python, "-c", code, folder=tmp_path)) == 5000.0 * 0.1
