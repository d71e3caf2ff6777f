"""Between synchronisations not one byte moves, by the counter of the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "quiet_script.py"
SLOW = ["plain", "static", "unused", "ddp compiled", "accelerate", "transformers", "lightning"]


def _obstacle() -> str:
    if os.geteuid() != 0:
        return "a network of its own needs root"
    probe = subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, text=True)
    return probe.stderr.strip() if probe.returncode else ""


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.skipif(bool(_obstacle()), reason=_obstacle() or "-")
@pytest.mark.parametrize("kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_between_synchronisations_not_one_byte_moves(kind: str) -> None:
    ran = subprocess.run(
        ["unshare", "--net", sys.executable, str(SCRIPT), kind], capture_output=True, text=True, timeout=170
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    # Lightning asks at every step whether a rank was told to end.
    assert max(found["quiet"]) <= (500 if kind == "lightning" else 0)
    assert all(found["loud"]), "and at a synchronisation some do"
    assert found["copied"], "a copy of the module is plain DDP, which reduces gradients"
    assert found["equal"], "weights and buffers end the same"
