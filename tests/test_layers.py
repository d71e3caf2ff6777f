"""A module imports only from rows below its own (docs/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(path: Path) -> set[str]:
    parts = [name.split(".") for name in imports(path)]
    return {words[1] for words in parts if words[0] == "oktopk" and len(words) > 1} & ROW_OF.keys()


def test_imports_point_downwards() -> None:
    for path in MODULES:
        room = room_of(path)
        for other in rooms_imported(path) - {room} if room != "__init__" else ():
            assert (room, other) in SIBLINGS or ROW_OF[other] < ROW_OF[room], f"{path}: {room} may not import {other}"


def test_every_room_has_a_row() -> None:
    for path in MODULES:
        assert room_of(path) in {*ROW_OF, "__init__"}, f"{path} stands in no row of the architecture"


def test_outside_libraries_stay_in_their_rooms() -> None:
    for path in MODULES:
        room, names = room_of(path), list(imports(path))
        libraries = {name.split(".")[0] for name in names}
        if any(name.startswith("torch.distributed") for name in names):
            assert room in DISTRIBUTED, f"{path}: torch.distributed has no place in {room}"
        if libraries & {"numba", "llvmlite"}:
            assert room in ("kernels", "wire") and path.name != "reference.py", f"{path}: numba has no place there"
        if "triton" in libraries:
            assert room == "kernels" and path.name == "triton_loops.py", f"{path}: triton has no place there"


def test_only_the_command_line_prints_and_nobody_sleeps() -> None:
    for path in MODULES:
        for call in (node for node in nodes(path) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            assert called != "time.sleep", f"{path}:{call.lineno} sleeps"
            assert called != "print" or room_of(path) == "cli", f"{path}:{call.lineno} prints"


def test_algorithms_do_not_import_each_other() -> None:
    siblings = {p.stem for p in (PACKAGE / "algorithms").glob("*.py")} - {"__init__", "base"}
    for path in (PACKAGE / "algorithms").glob("*.py"):
        if path.stem == "__init__":
            continue
        used = {name.split(".")[2] for name in imports(path) if name.startswith("oktopk.algorithms.")}
        assert not used & siblings, f"{path.name} imports {used & siblings}"
