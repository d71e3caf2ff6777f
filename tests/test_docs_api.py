"""Examples in docstrings run, and everything public is in the API reference."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import oktopk

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
WITH_DOCTESTS = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", WITH_DOCTESTS)
def test_examples_in_docstrings_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), verbose=False)
    assert result.failed == 0


def test_everything_public_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in oktopk.__all__ if not re.search(rf"oktopk\.(\w+\.)*{name}\b", text)]
    assert missing == []
