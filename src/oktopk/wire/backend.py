"""Whether codecs are compiled here."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Literal


@cache
def compiled_codecs(of: Literal["indices", "values"]) -> ModuleType | None:
    """The module with the compiled loops; None when numba is missing: others give the same bytes, slower."""
    try:
        return import_module(f"oktopk.wire.compiled_{of}")
    except ImportError:
        return None
