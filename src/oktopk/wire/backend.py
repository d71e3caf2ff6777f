"""Whether codecs are compiled here."""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def compiled_codecs() -> ModuleType | None:
    """The module with the compiled loops; None when numba is missing: others give the same bytes, slower."""
    try:
        from oktopk.wire import compiled
    except ImportError:
        return None
    return compiled
