"""Every command and program in README and docs is executed, so that they cannot rot. CONTRIBUTING.md has the rules."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from oktopk.cli import main
from oktopk.reducer import Reducer
from oktopk.transport import run_world
from oktopk.transport.base import Transport
from worlds import run_program

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
SEEN_BY_BLOCKS = (
    "configs", "examples", "docs", "src", "tests", "README.md", "LICENSE", "Makefile", "pyproject.toml",
    "constraints.txt",
)  # fmt: skip
SHELL = re.compile(r"[|&;<>$*]")  # what only a shell understands
RUN_LANGUAGES = ("bash", "console", "python")
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<language>[\w-]*)(?P<attributes>.*)$")
MARKER = re.compile(r"^\s*<!--\s*(?P<word>slow|continues|exit|not run)(?P<rest>[^>]*?)\s*-->\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block and what its markers say."""

    page: Path
    line: int
    language: str
    text: str
    slow: bool = False
    continues: bool = False
    exit_code: int = 0
    not_run: str | None = None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page that claim to be runnable, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found, number = [], 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        end = _closing(lines, number, opening)
        if opening["language"] in RUN_LANGUAGES:
            body = textwrap.dedent("\n".join(lines[number + 1 : end])) + "\n"
            found.append(Block(page, number + 1, opening["language"], body, **_markers(page, lines, number)))
        number = end + 1
    return found


def _closing(lines: list[str], start: int, opening: re.Match[str]) -> int:
    for number in range(start + 1, len(lines)):
        if lines[number].strip() == opening["fence"]:
            return number
    raise AssertionError(f"the block opened on line {start + 1} is never closed")


def _markers(page: Path, lines: list[str], fence: int) -> dict[str, object]:
    found: dict[str, object] = {}
    number = fence - 1
    while number >= 0 and (not lines[number].strip() or MARKER.match(lines[number])):
        marker = MARKER.match(lines[number])
        if marker is not None:
            found |= _meaning(f"{page.name}:{number + 1}", marker["word"], marker["rest"].strip(" :"))
        number -= 1
    return found


def _meaning(place: str, word: str, rest: str) -> dict[str, object]:
    if word == "exit":
        return {"exit_code": int(rest)}
    if word == "not run":
        assert rest, f"{place}: 'not run' needs a reason"
        return {"not_run": rest}
    return {word: True}


BLOCKS = {page: blocks_of(page) for page in PAGES}


def _ids(pages: list[Path]) -> list[str]:
    return [page.stem.lower() for page in pages]


WITH_QUICK = [page for page, blocks in BLOCKS.items() if any(not b.slow and b.not_run is None for b in blocks)]
WITH_RUN = [page for page, blocks in BLOCKS.items() if any(b.not_run is None for b in blocks)]
WITH_UNRUN = [page for page, blocks in BLOCKS.items() if any(b.slow or b.not_run is not None for b in blocks)]


@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", WITH_QUICK, ids=_ids(WITH_QUICK))
def test_quick_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run_all([block for block in BLOCKS[page] if not block.slow and block.not_run is None], tmp_path, fork)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", WITH_RUN, ids=_ids(WITH_RUN))
def test_all_blocks_of_a_page_run_in_order_as_pasted(page: Path, tmp_path: Path) -> None:
    run_all([block for block in BLOCKS[page] if block.not_run is None], tmp_path, paste)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", WITH_UNRUN, ids=_ids(WITH_UNRUN))
def test_commands_that_are_not_run_now_at_least_exist(page: Path) -> None:
    for block in BLOCKS[page]:
        if (block.slow or block.not_run is not None) and block.language != "python":
            for command in _commands(block):
                _check_exists(block, command)


@pytest.mark.parametrize("page", PAGES, ids=_ids(PAGES))
def test_python_blocks_compile_and_links_lead_somewhere(page: Path) -> None:
    for block in BLOCKS[page]:
        if block.language == "python":
            compile(block.text, block.place, "exec")
    for target in _relative_links(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_the_first_paste_of_the_readme_prints_what_stands_below_it() -> None:
    def work(transport: Transport) -> tuple[int, int, int]:
        gradient = torch.randn(1_000_000, generator=torch.Generator().manual_seed(transport.rank))
        with Reducer(algorithm="oktopk", density=0.01, group=transport) as reducer:
            reducer.reduce("weight", gradient)
            step = reducer.last_step
        assert step is not None
        return step.selected_global, step.bytes_sent, step.dense_bytes

    told = re.search(
        r"^([\d,]+) of 1,000,000 entries; sent ([\d,]+) bytes, dense ([\d,]+)$", (ROOT / "README.md").read_text(), re.M
    )
    assert told is not None
    said = [int(number.replace(",", "")) for number in told.groups()]
    assert said == pytest.approx(run_world(4, work)[0], rel=0.02), "another torch may draw other numbers"


def _relative_links(text: str) -> list[str]:
    prose = re.sub(r"^ *(```+|~~~+).*?^ *\1", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", prose)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def show_project(directory: Path) -> None:
    """Make a directory look like a checkout whose environment is set up."""
    for name in SEEN_BY_BLOCKS:
        if (ROOT / name).exists():
            (directory / name).symlink_to(ROOT / name)
    (directory / ".venv").symlink_to(sys.prefix)  # `make setup` finds that everything is there


def run_all(blocks: list[Block], directory: Path, run: Callable[[Block, Path | None, Path], None]) -> None:
    show_project(directory)
    before = ""  # the python blocks that the next one may continue
    for number, block in enumerate(blocks):
        script = None
        if block.language == "python":
            before = before + "\n" + block.text if block.continues else block.text
            script = directory / f"block_{number}.py"
            script.write_text(before, encoding="utf-8")
        run(block, script, directory)


def paste(block: Block, script: Path | None, directory: Path) -> None:
    """As a reader would: a Python process, or a shell."""
    shell = ["bash", "-euo", "pipefail", "-c", "\n".join(_shell_lines(block))]
    done = subprocess.run(
        shell if script is None else [sys.executable, script.name],
        cwd=directory,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    _check_code(block, done.returncode, done.stdout[-4000:] + done.stderr[-4000:])


def fork(block: Block, script: Path | None, directory: Path) -> None:
    """Python and plain `oktopk` lines in processes that need not import torch first; anything else is pasted."""
    commands = [] if block.language == "python" else _commands(block)
    if script is None and not all(words[0] == "oktopk" and not SHELL.search(" ".join(words)) for words in commands):
        return paste(block, script, directory)
    for words in commands if script is None else [[script.name]]:
        program = ["-m", "oktopk.cli", *words[1:]] if script is None else words
        ended = run_program(program, directory, environment(), timeout=300)
        if ended.code:  # where a shell would stop
            break
    return _check_code(block, ended.code, ended.output[-8000:])


def _check_code(block: Block, code: int | None, output: str) -> None:
    assert code == block.exit_code, f"{block.place} ended with {code}\n{block.text}\n{output}"


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "PYTEST_"))}
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"}


def _shell_lines(block: Block) -> list[str]:
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "bash":
        return block.text.splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def _commands(block: Block) -> list[list[str]]:
    """The words of each line, with continuation lines joined, comments and here-documents left out."""
    joined = "\n".join(_shell_lines(block)).replace("\\\n", " ")
    joined = re.sub(r"<<-? *'?(\w+)'?\n.*?^\1$", "", joined, flags=re.MULTILINE | re.DOTALL)
    commands = []
    for line in joined.splitlines():
        words = shlex.split(line, comments=True)
        if words:
            commands.append(words)
    return commands


def _check_exists(block: Block, words: list[str]) -> None:
    stops = [n for n, word in enumerate(words) if word in ("|", "&&", "||", ";", ">", "2>&1", "&")]
    words = words[: min(stops, default=len(words))]
    if words[0] == "make":
        known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        assert set(targets) <= set(known), f"{block.place}: no such target in {words}"
    for position, word in enumerate(words):
        if Path(word).name == "oktopk" and position + 1 < len(words):
            _check_flags(block, words[position + 1 :])
            return


def _check_flags(block: Block, arguments: list[str]) -> None:
    flags = [word.split("=")[0] for word in arguments if word.startswith("--")]
    command = _sub_command(arguments)
    help_text = _help(tuple(command))
    assert help_text, f"{block.place}: no command `oktopk {' '.join(command)}`"
    if any(re.fullmatch(r"[\w.]+:[A-Z]\w+", word) for word in arguments):
        return  # a workload of the reader's own brings flags of its own
    for flag in flags:
        known = re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_text.replace("_", "-"))
        assert known, f"{block.place}: `oktopk {' '.join(command)}` has no flag {flag}"


def _sub_command(arguments: list[str]) -> list[str]:
    """The longest run of leading words that `--help` accepts as a command."""
    leading = []
    for word in arguments:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", word):
            break
        leading.append(word)
    while len(leading) > 1 and not _help(tuple(leading)):
        leading.pop()
    return leading


_HELP: dict[tuple[str, ...], str] = {}


def _help(command: tuple[str, ...]) -> str:
    """What `--help` says, or nothing if there is no such command. Asked in this process: a new one costs seconds."""
    if command not in _HELP:
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
            patch.setenv("COLUMNS", "400")
            code = main([*command, "--help"])
        _HELP[command] = said.getvalue() if code == 0 else ""
    return _HELP[command]


SAMPLE = """
```bash
echo quick
```

<!-- slow -->
<!-- exit 3 -->
```bash title="two"
exit 3
```

<!-- not run: a cluster -->

    ```console
    $ oktopk train --workers 8 \\
        --density 0.02
    some output
    ```

```text
$ never
```
"""


def test_markers_say_what_becomes_of_a_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(SAMPLE)
    quick, slow, listed = blocks_of(page)
    assert (quick.text, quick.slow, quick.exit_code, quick.not_run) == ("echo quick\n", False, 0, None)
    assert (slow.slow, slow.exit_code) == (True, 3)
    assert (listed.language, listed.not_run) == ("console", "a cluster")
    assert _commands(listed) == [["oktopk", "train", "--workers", "8", "--density", "0.02"]]
    page.write_text("<!-- not run -->\n```bash\nx\n```\n")
    with pytest.raises(AssertionError, match="needs a reason"):
        blocks_of(page)
