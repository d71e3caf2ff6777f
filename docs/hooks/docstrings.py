"""Griffe extension of the API reference: doctests become code blocks, and the comment of a field its description."""

from __future__ import annotations

import re
from typing import Any

import griffe

_COMMENT = re.compile(r"^\s*(\w+)\s*:.*?\s{2}#\s(?P<words>.+)$")


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.is_alias:
            return
        if obj.docstring is None and obj.is_attribute:
            words = field_comment(obj)
            obj.docstring = griffe.Docstring(words, parent=obj) if words else None
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def field_comment(obj: griffe.Object) -> str:
    """The comment behind a field of a dataclass."""
    if obj.lineno is None or obj.parent is None or not obj.parent.is_class:
        return ""
    found = _COMMENT.match(obj.lines_collection[obj.filepath][(obj.endlineno or obj.lineno) - 1])
    return found["words"].strip() if found else ""


def fenced(text: str) -> str:
    """Doctests inside code fences; they end at the first empty line."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if not inside and line.startswith(">>> "):
            lines.append("```pycon")
            inside = True
        if inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)
