"""Whether codecs are compiled here."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

Loops = Any  # loops by name: compiled ones, or a module


@cache
def compiled_codecs(of: Literal["indices", "values", "narrow"]) -> Loops | None:
    """The compiled loops; None when numba is missing: others give the same bytes, slower."""
    try:
        from oktopk.kernels.linking import Library

        return Library(f"oktopk.wire.compiled_{of}")
    except ImportError:
        return None
