"""Where words go: rich consoles, tables and numbers for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Standard output; plain and unwrapped when it is not a terminal."""
    return _unwrapped(Console(highlight=False))


def error_console() -> Console:
    """Standard error."""
    return _unwrapped(Console(stderr=True, highlight=False))


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table whose columns are the keys of the rows, in order of appearance; what a row lacks stays empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    built = Table(title=title, title_justify="left")
    for name in columns:
        numeric = all(isinstance(row.get(name, 0), (int, float)) for row in rows)
        built.add_column(name, justify="right" if numeric else "left")
    for row in rows:
        built.add_row(*(cell(row[name]) if name in row else "" for name in columns))
    return built


def facts(values: Mapping[str, Any], title: str | None = None) -> Table:
    """Names and values, one pair per line: fits any terminal."""
    built = Table(title=title, title_justify="left", show_header=False)
    for name, value in values.items():
        built.add_row(name, cell(value))
    return built


def cell(value: Any) -> str:
    """A value as a person writes it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def bytes_text(count: float) -> str:
    """1.9 MB, 193 MB, 27 kB: decimal units, two or three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 9.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration_text(seconds: float) -> str:
    """45s, 3m20s, 2h05m."""
    if seconds < 60:
        return f"{seconds:.0f}s" if seconds >= 9.95 else f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def _unwrapped(made: Console) -> Console:
    # A narrow default width would break lines that programs and tests read.
    return made if made.is_terminal else Console(file=made.file, highlight=False, width=200)
