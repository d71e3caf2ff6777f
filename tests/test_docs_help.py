"""Every command explains itself with an example, and the example works as pasted."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oktopk.cli.main import COMMANDS, resolve
from test_docs import ROOT, environment, show_project


def commands() -> Iterator[tuple[str, str]]:
    """Every command that does something: its words, and where it is. Nothing is imported but the groups."""
    for name, (target, _) in COMMANDS.items():
        if target.endswith(":COMMANDS"):
            yield from ((f"{name} {word}", path) for word, path in resolve(target).items())
        else:
            yield name, target


EVERY = dict(commands())


def examples(words: str) -> list[str]:
    """The command lines under the word Example in a command's help."""
    text = resolve(EVERY[words]).__doc__ or ""
    _, _, block = text.partition("Example:")
    lines = [line.strip() for line in re.split(r"\n\s*\n", block.strip("\n"))[0].splitlines()]
    found: list[str] = []
    for line in lines:
        if line.startswith("oktopk ") or not found:
            found.append(line)
        else:
            found[-1] = found[-1].rstrip("\\") + " " + line
    return found


@pytest.mark.parametrize("words", sorted(EVERY))
def test_every_command_has_an_example_of_itself(words: str) -> None:
    found = examples(words)
    assert found
    assert all(line.startswith("oktopk ") for line in found), found
    assert any(line.startswith(f"oktopk {words}") for line in found), found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("words", sorted(EVERY))
def test_the_example_works_as_pasted(words: str, tmp_path: Path) -> None:
    show_project(tmp_path)
    _prepare(words, tmp_path)
    for line in examples(words):
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def _prepare(words: str, directory: Path) -> None:
    """What an example speaks of must be there: a run, when it reads one."""
    if not any(re.search(r"--latest|\bruns/|\bRUN\b|\bmanifests?\b", line) for line in examples(words)):
        return
    wanted = [match for line in examples(words) for match in re.findall(r"\bruns/([\w.-]+)", line)]
    train = ["train", "speech", "--epochs", "1", "--max-steps", "2", "--name", wanted[0] if wanted else "demo"]
    for arguments in (train, ["data", "an4", "synth-an4:40", "--out", "manifests"]):
        code = f"import sys, oktopk.cli; sys.exit(oktopk.cli.main({arguments!r}))"
        subprocess.run([sys.executable, "-c", code], cwd=directory, env=environment(), check=True, capture_output=True)


def test_commands_in_help_and_docs_have_a_home() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8") + "".join(
        page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")
    )
    for name in COMMANDS:
        assert f"oktopk {name}" in text, f"no page mentions `oktopk {name}`"
    for line in [line for words in EVERY for line in examples(words)]:
        assert shlex.split(line)[1] in COMMANDS
