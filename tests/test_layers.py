"""A module imports only from rows below its own (docs/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "oktopk"

# From the bottom up; a module may import from its own room and from rows below.
ROWS = [
    ["types", "errors", "config", "schedule"],
    ["kernels", "wire", "transport", "metrics"],
    ["primitives"],
    ["algorithms"],
    ["reduction"],
    ["reducer", "checkpoint"],
    ["front_ends", "integrations", "workloads"],
    ["training", "plotting"],
    ["report", "bench"],
    ["cli"],
]
# Rooms of one row that lean on each other: metered transport counts into metrics' clock; coded messages are compiled
# as kernels are; a checkpoint is of a reducer; integrations call a front end where a framework lets them.
SIBLINGS = {
    ("config", "errors"),
    ("schedule", "config"),
    ("transport", "metrics"),
    ("wire", "kernels"),
    ("checkpoint", "reducer"),
    ("integrations", "front_ends"),
}
ROW_OF = {room: row for row, rooms in enumerate(ROWS) for room in rooms}

DISTRIBUTED = {"transport", "front_ends", "training", "bench", "checkpoint"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _label(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=_label)
def test_imports_point_downwards(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "oktopk" or len(parts) < 2:
            continue
        other = parts[1]
        if other == room or other not in ROW_OF or (room, other) in SIBLINGS:
            continue
        assert ROW_OF[other] < ROW_OF[room], f"{room} may not import {other}"


@pytest.mark.parametrize("path", MODULES, ids=_label)
def test_every_room_has_a_row(path: Path) -> None:
    assert room_of(path) in {*ROW_OF, "__init__"}, f"{path.name} stands in no row of the architecture"


@pytest.mark.parametrize("path", MODULES, ids=_label)
def test_outside_libraries_stay_in_their_rooms(path: Path) -> None:
    room, names = room_of(path), list(imports(path))
    if any(name.startswith("torch.distributed") for name in names):
        assert room in DISTRIBUTED, f"torch.distributed has no place in {room}"
    if any(name.split(".")[0] in ("numba", "llvmlite") for name in names):
        assert room in ("kernels", "wire") and path.name != "reference.py"
    if any(name.split(".")[0] == "triton" for name in names):
        assert room == "kernels" and path.name == "triton_loops.py"


@pytest.mark.parametrize("path", MODULES, ids=_label)
def test_only_the_command_line_prints_and_nobody_sleeps(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called != "time.sleep", f"{path}:{node.lineno} sleeps"
            assert called != "print" or room_of(path) == "cli", f"{path}:{node.lineno} prints"


def test_algorithms_do_not_import_each_other() -> None:
    siblings = {p.stem for p in (PACKAGE / "algorithms").glob("*.py")} - {"__init__", "base"}
    for path in (PACKAGE / "algorithms").glob("*.py"):
        if path.stem == "__init__":
            continue
        used = {name.split(".")[2] for name in imports(path) if name.startswith("oktopk.algorithms.")}
        assert not used & siblings, f"{path.name} imports {used & siblings}"
