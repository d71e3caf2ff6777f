"""What users import, and nothing that is not meant for them."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import oktopk

PROMISED = {
    "ALGORITHMS", "PAPER_BERT", "PAPER_LSTM", "PAPER_VGG", "OkTopkError", "Reduced", "Reducer", "SparseVector",
    "StepRecord", "exponential_warmup", "sparse_allreduce",
}  # fmt: skip


def test_all_names_exist_and_the_promised_ones_are_there() -> None:
    assert set(oktopk.__all__) >= PROMISED
    assert oktopk.__all__ == sorted(oktopk.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    for name in oktopk.__all__:
        assert getattr(oktopk, name) is not None


def test_public_callables_are_documented_and_typed() -> None:
    for name in oktopk.__all__:
        thing = getattr(oktopk, name)
        if callable(thing):
            assert inspect.getdoc(thing), f"{name} has no docstring"
        if inspect.isfunction(thing):
            annotated = thing.__annotations__
            assert set(inspect.signature(thing).parameters) | {"return"} <= set(annotated), f"{name} is not typed"


def test_algorithms_map_names_to_config_and_class() -> None:
    assert list(oktopk.ALGORITHMS) == ["dense", "topka", "topkdsa", "gtopk", "gaussiank", "randomk", "oktopk"]
    for config, algorithm in oktopk.ALGORITHMS.values():
        assert inspect.isclass(config) and hasattr(algorithm, "reduce")


@pytest.mark.parametrize("module", ["oktopk", "oktopk.reducer", "oktopk.schedule"])
def test_examples_in_docstrings_run(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted and not failed


def loaded(code: str, modules: str) -> list[str]:
    """Which modules are there after a program has run."""
    program = f"import sys; {code}; print([m for m in {modules.split()!r} if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return list(ast.literal_eval(ended.stdout.splitlines()[-1]))


@pytest.mark.processes
def test_importing_the_library_is_light() -> None:
    """Training, reports and their dependencies must not be paid by `import oktopk`."""
    heavy = "rich tyro tensorboard transformers lightning accelerate soundfile numba"
    heavy += " oktopk.cli oktopk.training oktopk.workloads"
    assert loaded("import oktopk, oktopk.integrations; oktopk.Reducer, oktopk.register", heavy) == []


@pytest.mark.processes
def test_the_list_of_commands_waits_for_nothing() -> None:
    heavy = "torch numpy numba rich tyro oktopk.reducer"
    assert loaded("from oktopk.cli import main; main(['--help'])", heavy) == []


def test_every_name_says_where_it_lives_to_type_checkers_and_at_run_time() -> None:
    tree = ast.parse(Path(oktopk.__file__).read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("oktopk.")
        for alias in node.names
    }
    assert seen == oktopk._HOMES and list(oktopk._HOMES) == oktopk.__all__
    assert set(oktopk.__all__) <= set(dir(oktopk))


def test_rooms_can_be_reached_as_attributes_and_other_names_cannot() -> None:
    assert oktopk.errors.OkTopkError is oktopk.OkTopkError
    with pytest.raises(AttributeError, match="no attribute 'Reducr'"):
        _ = oktopk.Reducr
