"""What a person at a terminal sees: a live bar, a resize that it survives, Ctrl-C that stops cleanly."""

from __future__ import annotations

import sys
from pathlib import Path

import pexpect
import pytest

from trainings import TOY
from trainings import plain_kernels as plain_kernels

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("plain_kernels"), pytest.mark.timeout(400)]
TESTS = Path(__file__).parent


def test_the_bar_lives_survives_a_resize_and_ctrl_c_stops_the_run(tmp_path: Path) -> None:
    words = ["-m", "oktopk.cli", "train", TOY, "--workers", "2", "--epochs", "100000", "--runs", str(tmp_path)]
    words += ["--name", "run", "--no-tensorboard", "--min-numel", "0"]
    terminal = pexpect.spawn(sys.executable, words, cwd=str(TESTS), dimensions=(40, 160), timeout=150, encoding="utf-8")
    terminal.expect(r"dense warm-up until step 3")
    terminal.expect(r"sparse from step 3 on")
    terminal.expect(r"epoch \d+/100000")
    terminal.expect(r"steps/s.*loss.*sparse.*saved.*ETA")
    terminal.setwinsize(30, 70)
    terminal.expect(r"epoch \d+ train loss")
    terminal.sendintr()
    terminal.expect(r"stopped by SIGINT after \d+ steps")
    terminal.expect(r"--resume")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130
    assert (tmp_path / "run" / "checkpoints" / "last.json").exists()
    assert (tmp_path / "run" / "summary.json").exists()
