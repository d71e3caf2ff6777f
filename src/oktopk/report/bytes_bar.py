"""Where the bytes of a run went, in one bar and one sentence: dense start, sparse steps, final mean.

HTML rather than SVG, so that the bar is as wide as the page and its words are as large as all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from oktopk.plotting.scales import say
from oktopk.report.numbers import Part, parts
from oktopk.report.runs import Run

_COLORS = {
    "dense start": "c1", "sparse steps": "c0", "final mean": "c3", "later dense steps": "c4", "dense steps": "c7",
}  # fmt: skip


def bytes_section(runs: Sequence[Run]) -> str:
    """One row per run, all on the scale of the one that sent most; empty when no run was sparse, or none sent."""
    found = [(run, parts(run)) for run in runs]
    most = max((_total(split) for _, split in found), default=0.0)
    if not most or not any(part.name == "sparse steps" for _, split in found for part in split):
        return ""
    rows = "".join(_row(run.name if len(runs) > 1 else "", split, most) for run, split in found if _total(split))
    names = dict.fromkeys(part.name for _, split in found for part in split)
    legend = "".join(
        f'<li><i class="key area" style="--key:var(--{_COLORS[name]})"></i>{escape(name)}</li>' for name in names
    )
    hint = _hint(found[0][1]) if len(runs) == 1 else ""
    return (
        '<section id="bytes"><h2>Where the bytes went</h2>'
        f'<div class="split"><ul class="legend">{legend}</ul>{rows}{hint}</div></section>'
    )


def _hint(split: Sequence[Part]) -> str:
    """What to do about a start that cost more than all the rest."""
    start = sum(part.sent for part in split if part.name == "dense start")
    if start <= _total(split) / 2:
        return ""
    return (
        '<p class="hint">Most bytes left before the first sparse step: a longer training or a shorter dense start '
        "(<code>--warmup-steps</code>) saves more.</p>"
    )


def in_words(split: Sequence[Part]) -> str:
    """The bar as a sentence, the largest part first."""
    total = _total(split)
    largest_first = sorted(split, key=lambda part: -part.sent)
    said = [f"{say(part.sent / total, 'share')} in {_part_words(part)}" for part in largest_first]
    return f"Of {say(total, 'bytes')} that rank 0 sent: {', '.join(said)}."


def _part_words(part: Part) -> str:
    if part.name == "dense start":
        return f"the dense start of {part.steps:,} step{'s' * (part.steps > 1)}"
    if part.name == "final mean":
        return "the final mean"
    return f"{part.steps:,} {part.name if part.steps > 1 else part.name.removesuffix('s')}"


def _row(name: str, split: Sequence[Part], most: float) -> str:
    words = escape(in_words(split))
    head = f"<b>{escape(name)}</b> " if name else ""
    cells = "".join(_cell(part, most) for part in split)
    return f'<p class="words">{head}{words}</p><div class="track" role="img" aria-label="{words}">{cells}</div>'


def _cell(part: Part, most: float) -> str:
    tip = f"{part.name}: {say(part.sent, 'bytes')} in {part.steps:,} steps"
    fill = f"width:{100 * part.sent / most:.2f}%;background:var(--{_COLORS[part.name]})"
    return f'<i data-tip="{tip}" style="{fill}"></i>'


def _total(split: Sequence[Part]) -> float:
    return sum(part.sent for part in split)
