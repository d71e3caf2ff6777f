"""A finished drawing: inside a page, or as a file of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from oktopk.plotting.colors import variables

PADDING = 16  # around a file's contents
LINE = 18  # height of a line of text
LETTER = 6.4  # mean width of one, at the size of labels; a little too wide rather than too narrow
KEY = 20  # width of a legend's sample


@dataclass(frozen=True)
class Legend:
    """One entry: what a colour and a style stand for."""

    name: str
    color: str
    style: str


@dataclass(frozen=True)
class Drawing:
    """Shapes as SVG text, what they say in words, and what stands beside them."""

    shapes: str
    width: int
    height: int
    description: str
    y_label: str = ""
    legend: Sequence[Legend] = ()
    hover: Mapping[str, Any] = field(default_factory=dict)  # for the script of a page

    def inline(self, label: str) -> str:
        """An element for a page that has the colours and the rules; `label` is the id of its name there."""
        words = f'<desc id="{label}-words">{escape(self.description)}</desc>'
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-labelledby="{label} {label}-words" tabindex="0">{words}{self.shapes}</svg>'
        )


def rules() -> str:
    """The CSS of shapes: strokes, fills and sizes of text."""
    return files("oktopk.plotting").joinpath("shapes.css").read_text(encoding="utf-8")


def text_width(text: str) -> float:
    return LETTER * len(text)


def write_svg(path: Path, title: str, drawing: Drawing) -> Path:
    """Write the drawing as a file with its title and legend, light or dark as the reader's system is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_standalone(title, drawing), encoding="utf-8")
    return path


def _standalone(title: str, drawing: Drawing) -> str:
    rows = [*_rows(drawing.legend, drawing.width)] if len(drawing.legend) > 1 else []
    top = PADDING + LINE * (1 + len(rows)) + (LINE if drawing.y_label else 0) + 4
    width, height = drawing.width + 2 * PADDING, drawing.height + top + PADDING
    head = [f'<text class="title" x="{PADDING}" y="{PADDING + 12}">{escape(title)}</text>']
    for n, row in enumerate(rows):
        head += [_entry(x, PADDING + 12 + LINE * (n + 1), entry) for x, entry in row]
    if drawing.y_label:
        head.append(f'<text class="ylabel" x="{PADDING}" y="{top - 4}">{escape(drawing.y_label)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img"><title>{escape(title)}</title><desc>{escape(drawing.description)}</desc>'
        f"<style>{variables()}\n{rules()}</style>\n"
        f'<rect class="card" width="{width}" height="{height}" rx="8"/>{"".join(head)}'
        f'<g transform="translate({PADDING} {top})">{drawing.shapes}</g></svg>\n'
    )


def _rows(legend: Sequence[Legend], width: int) -> Iterator[list[tuple[float, Legend]]]:
    """Entries with their place from the left, in as many lines as they need."""
    row: list[tuple[float, Legend]] = []
    at = 0.0
    for entry in legend:
        wide = KEY + text_width(entry.name) + 14
        if row and at + wide > width:
            yield row
            row, at = [], 0.0
        row.append((round(PADDING + at, 1), entry))
        at += wide
    yield row


def _entry(x: float, y: float, entry: Legend) -> str:
    if entry.style in ("area", "band"):
        fill = f"fill:var(--{entry.color})"
        sample = f'<rect class="{entry.style}" style="{fill}" x="{x}" y="{y - 9}" width="12" height="10"/>'
    elif entry.style == "dots":
        sample = f'<circle style="fill:var(--{entry.color})" cx="{x + 6}" cy="{y - 4}" r="3.2"/>'
    else:
        sample = f'<path class="{entry.style}" style="stroke:var(--{entry.color})" d="M{x} {y - 4}h14"/>'
    return f'{sample}<text class="key" x="{x + KEY}" y="{y}">{escape(entry.name)}</text>'
