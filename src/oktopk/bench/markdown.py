"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def markdown_table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines of a table whose columns are the keys of the first row."""
    rows = list(rows)
    columns = list(rows[0]) if rows else []
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(str(row.get(name, "")) for name in columns) + " |" for row in rows]
