"""One HTML page that needs no network: cards, comparison, figures, tables, configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from oktopk.plotting.colors import SERIES, variables
from oktopk.plotting.drawing import Legend, rules
from oktopk.plotting.scales import plain, say
from oktopk.report import figures
from oktopk.report.bytes_bar import bytes_section
from oktopk.report.figures import Figure, Section
from oktopk.report.numbers import Totals, totals, world_size
from oktopk.report.runs import Run

_USUAL = (None, "cpu", "float32")
# The page may run its own script and style and load nothing at all.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def render(runs: Sequence[Run]) -> str:
    """The page for one run, or for several side by side."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    body = [_header(title, runs), *_summary(runs)]
    body += [bytes_section(runs), *(_section(section) for section in figures.sections(runs))]
    body += [_densities(runs), *(_epochs(runs, run) for run in runs), _configuration(runs)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)} - oktopk report</title>\n<style>{_style()}</style>\n</head>\n<body>\n"
        f"{''.join(body)}\n<footer>Made by <code>oktopk report</code>. This page loads nothing from the network."
        f"</footer>\n<script>{_asset('script.js')}</script>\n</body>\n</html>\n"
    )


def _style() -> str:
    return "\n".join((variables(), rules(), _asset("style.css")))


def _asset(name: str) -> str:
    return files("oktopk.report").joinpath(name).read_text(encoding="utf-8")


def _header(title: str, runs: Sequence[Run]) -> str:
    chips = "".join(_chip(slot, run, len(runs) > 1) for slot, run in enumerate(runs))
    return (
        f'<header><div><p class="brand">oktopk report</p><h1>{escape(title)}</h1><ul class="chips">{chips}</ul></div>'
        '<button id="theme" type="button" aria-label="Colours: as the system has them">Auto</button></header>'
    )


def _chip(slot: int, run: Run, several: bool) -> str:
    """What a run is, in one line."""
    world = world_size(run)
    facts = [run.setting("workload"), run.setting("preset"), run.setting("algorithm")]
    words = [str(fact) for fact in facts if isinstance(fact, str)]
    density = run.setting("density")
    sparse = run.setting("algorithm") != "dense"
    words += [f"density {density}"] if isinstance(density, (int, float)) and sparse else []
    words += [f"wire {wire}"] if isinstance(wire := run.setting("wire"), str) and sparse else []
    words += [f"{world} workers"] if world else []
    words += [str(where) for where in (run.setting("computed_on"), run.setting("precision")) if where not in _USUAL]
    dot = f'<i class="dot" style="background:var(--c{slot % SERIES})"></i>' if several else ""
    name = f"<b>{escape(run.name)}</b> " if several else ""
    return f"<li>{dot}{name}{escape(' · '.join(words))}</li>" if words or several else ""


# --- cards and comparison


@dataclass(frozen=True)
class Card:
    name: str
    value: str
    note: str = ""


def _summary(runs: Sequence[Run]) -> Iterator[str]:
    found = [totals(run) for run in runs]
    if len(runs) > 1:
        yield _comparison(runs, found)
        return
    cards = "".join(
        f'<div class="card"><h2>{escape(card.name)}</h2><p class="value">{escape(card.value)}</p>'
        f'<p class="note">{escape(card.note)}</p></div>'
        for card in _cards(found[0])
    )
    yield f'<section class="cards" aria-label="Summary">{cards}</section>'
    yield from _notices(found[0])


def _notices(run: Totals) -> Iterator[str]:
    if run.steps and not run.sparse_steps:
        yield (
            f'<p class="notice">All {run.steps} steps were dense: the run was a dense one, or it ended inside its '
            "warm-up. Nothing below speaks of sparse steps.</p>"
        )
    if not run.steps:
        yield '<p class="notice">No steps were recorded yet: only the configuration can be shown.</p>'


def _cards(run: Totals) -> Iterator[Card]:
    yield Card("Steps", f"{run.steps:,}", f"{run.dense_steps:,} dense, {run.sparse_steps:,} sparse")
    if run.loss is not None:
        yield Card("Training loss", plain(run.loss), _note("first step {}", run.first_loss, plain))
    if run.metric is not None and run.best is not None and run.last is not None:
        better = "lower" if run.lower_is_better else "higher"
        note = f"epoch {run.best_epoch}; last {plain(run.last)}; {better} is better"
        yield Card(f"Best {run.metric}", plain(run.best), note)
    if run.sparsity is not None:
        yield Card("Sparsity", say(run.sparsity, "share"), _note("ratio {} on sparse steps", run.ratio, plain))
    if run.sparse_sent_per_step is not None:
        note = _note("dense: {}", run.dense_sent_per_step, lambda value: say(value, "bytes"))
        note += _note("; inside the host: {}", run.inside_per_step, lambda value: say(value, "bytes"))
        yield Card("Sent per sparse step", say(run.sparse_sent_per_step, "bytes"), note)
    if run.saving is not None and run.sent is not None and run.dense_bytes is not None:
        note = f"{say(run.sent, 'bytes')} instead of {say(run.dense_bytes, 'bytes')}, warm-up included"
        yield Card("Traffic saved", f"{plain(run.saving)}×", note)
    if run.wall is not None:
        note = _note("{} per step", run.step_seconds, lambda value: say(value, "seconds"))
        yield Card("Wall time", say(run.wall, "seconds"), note)
    if run.hidden is not None:
        note = _note("of {} per step", run.communication_seconds, lambda value: say(value, "seconds"))
        note += f"; {run.exposed_by}" if run.exposed_by else ""
        yield Card("Hidden communication", say(run.hidden, "share"), note)
    if run.memory is not None:
        yield Card("Peak memory", say(run.memory, "bytes"), "rank 0")
    if run.gpu_peak is not None:
        note = _note("rank 0; {} reserved", run.gpu_reserved, lambda value: say(value, "bytes"))
        yield Card("Peak GPU memory", say(run.gpu_peak, "bytes"), note)


def _note(words: str, value: float | None, said: Callable[[float], str]) -> str:
    return words.format(said(value)) if value is not None else ""


@dataclass(frozen=True)
class Column:
    """A column of the comparison: its words, its values, and which end of it is good."""

    name: str
    value: Callable[[Totals], float | None]
    said: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None = None


def _comparison(runs: Sequence[Run], found: Sequence[Totals]) -> str:
    judged = next((one for one in found if one.metric), None)
    dense = next((one for one in found if one.steps and not one.sparse_steps), None)
    columns = [*_columns(judged, dense, any(one.gpu_peak is not None for one in found))]
    head = "".join(f"<th>{escape(column.name)}</th>" for column in columns)
    rows = "".join(
        f'<tr><th scope="row"><i class="dot" style="background:var(--c{slot % SERIES})"></i>'
        f"{escape(run.name)}</th>{''.join(_cell(column, one, found) for column in columns)}</tr>"
        for slot, (run, one) in enumerate(zip(runs, found, strict=True))
    )
    return (
        '<section aria-label="Comparison"><h2>Comparison</h2><div class="scroll"><table class="numbers">'
        f"<thead><tr><th>run</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        '<p class="hint">Bold: the best of its column. Speed-up and traffic are against the dense run where there is '
        "one, else traffic is against what plain all-reduce would have sent.</p></section>"
    )


def _columns(judged: Totals | None, dense: Totals | None, with_gpu: bool) -> Iterator[Column]:
    yield Column("steps", lambda run: run.steps or None, plain)
    yield Column("final loss", lambda run: run.loss, plain, min)
    if judged:
        better = min if judged.lower_is_better else max
        yield Column(f"best {judged.metric}", lambda run: run.best, plain, better)
        yield Column(f"last {judged.metric}", lambda run: run.last, plain, better)
    yield Column("sparsity", lambda run: run.sparsity, lambda value: say(value, "share"))
    yield Column("sent", lambda run: run.sent, lambda value: say(value, "bytes"), min)
    yield Column("times less traffic", lambda run: run.saving, _times, max)
    yield Column("per step", lambda run: run.step_seconds, lambda value: say(value, "seconds"), min)
    yield Column("hidden", lambda run: run.hidden, lambda value: say(value, "share"), max)
    yield Column("wall time", lambda run: run.wall, lambda value: say(value, "seconds"), min)
    if dense is not None and dense.wall and dense.steps:
        pace = dense.wall / dense.steps
        yield Column("speed-up", lambda run: pace * run.steps / run.wall if run.wall else None, _times, max)
    if with_gpu:
        yield Column("peak GPU memory", lambda run: run.gpu_peak, lambda value: say(value, "bytes"), min)


def _times(value: float) -> str:
    return f"{plain(value)}×"


def _cell(column: Column, one: Totals, found: Sequence[Totals]) -> str:
    value = column.value(one)
    if value is None:
        return '<td class="blank">–</td>'
    values = [other for run in found if (other := column.value(run)) is not None]
    best = column.best is not None and len(set(values)) > 1 and value == column.best(values)
    return f'<td class="best">{column.said(value)}</td>' if best else f"<td>{column.said(value)}</td>"


# --- figures


def _section(section: Section) -> str:
    return (
        f'<section><h2>{escape(section.title)}</h2><p class="hint">{escape(section.intro)}</p>'
        f'<div class="grid">{"".join(map(_figure, section.figures))}</div></section>'
    )


def _figure(figure: Figure) -> str:
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else ""
    head = f'<h3 id="{figure.id}-name">{escape(figure.title)}</h3>'
    if figure.drawing is None:
        return f'<figure id="{figure.id}" class="absent">{head}<p class="absent">{escape(figure.missing)}</p></figure>'
    drawing = figure.drawing
    svg = drawing.inline(f"{figure.id}-name")
    script = f'<script type="application/json">{_to_script(drawing.hover)}</script>' if drawing.hover else ""
    label = f'<p class="ylabel">{escape(drawing.y_label)}</p>' if drawing.y_label else ""
    return f'<figure id="{figure.id}">{head}{_legend(drawing.legend)}{label}{svg}{script}{caption}</figure>'


def _to_script(hover: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(hover, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _legend(entries: Sequence[Legend]) -> str:
    if len(entries) < 2:
        return ""
    items = "".join(
        f'<li><i class="key {one.style}" style="--key:var(--{one.color})"></i>{escape(one.name)}</li>'
        for one in entries
    )
    return f'<ul class="legend">{items}</ul>'


# --- tables


def _densities(runs: Sequence[Run]) -> str:
    """A bar for every parameter: HTML rather than SVG, so that long names and phones get along."""
    found = [(slot, run, figures.last_density(run)) for slot, run in enumerate(runs)]
    names = list(dict.fromkeys(name for _, _, density in found for name in density))
    if not names:
        return ""
    most = max((value for _, _, density in found for value in density.values()), default=0.0) or 1.0
    rows = "".join(_density_row(name, found, most) for name in names)
    return (
        f'<section><details {"open" if len(names) <= 48 else ""} id="density"><summary><h2>Density by parameter</h2>'
        '</summary><p class="hint">Fraction of each tensor that was sent on the last step analysed, in model order.</p>'
        f'<div class="bars">{rows}</div></details></section>'
    )


def _density_row(name: str, found: Sequence[tuple[int, Run, Mapping[str, float]]], most: float) -> str:
    bars = "".join(
        f'<span class="track"><i style="width:{100 * density[name] / most:.1f}%;'
        f'background:var(--c{slot % SERIES})"></i></span>'
        f'<span class="amount">{100 * density[name]:.2f} %</span>'
        for slot, _, density in found
        if name in density
    )
    return f'<div class="bar"><span class="name">{escape(name)}</span>{bars}</div>'


def _epochs(runs: Sequence[Run], run: Run) -> str:
    if not run.epochs:
        return ""
    names = list(dict.fromkeys(name for epoch in run.epochs for name in epoch.validation))
    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("epoch", lambda epoch: str(epoch.epoch)),
        ("train loss", lambda epoch: _said(epoch.train_loss, plain)),
        *((f"validation {name}", _validation_cell(name)) for name in names),
        ("dense steps", lambda epoch: str(epoch.dense_steps)),
        ("sparse steps", lambda epoch: str(epoch.sparse_steps)),
        ("sparsity", lambda epoch: _said(epoch.sparsity, lambda value: f"{value:.3f}")),
        ("ratio", lambda epoch: _said(epoch.compression_ratio, plain)),
        ("sent per step", lambda epoch: _said(epoch.bytes_per_step, lambda value: say(value, "bytes"))),
        ("dense would send", lambda epoch: _said(epoch.dense_bytes_per_step, lambda value: say(value, "bytes"))),
        ("seconds", lambda epoch: _said(epoch.seconds, lambda value: f"{value:.1f}")),
    ]
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in columns)
    rows = "".join("<tr>" + "".join(f"<td>{said(epoch)}</td>" for _, said in columns) + "</tr>" for epoch in run.epochs)
    title = "Epochs" if len(runs) == 1 else f"Epochs of {run.name}"
    return (
        f"<section><details {'open' if len(runs) == 1 else ''}><summary><h2>{escape(title)}</h2></summary>"
        f'<div class="scroll"><table class="numbers"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        "</details></section>"
    )


def _validation_cell(name: str) -> Callable[[Any], str]:
    return lambda epoch: _said(epoch.validation.get(name), plain)


def _said(value: float | None, said: Callable[[float], str]) -> str:
    return said(value) if value is not None else "–"


def _configuration(runs: Sequence[Run]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if not keys:
        return ""
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    rows = "".join(_setting_row(key, runs) for key in keys)
    hint = '<p class="hint">Settings that differ are marked.</p>' if len(runs) > 1 else ""
    return (
        f'<section><details id="configuration" {"open" if len(keys) <= 60 else ""}>'
        f"<summary><h2>Configuration</h2></summary>{hint}"
        f'<div class="scroll"><table class="settings"><thead><tr><th>setting</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details></section>"
    )


def _setting_row(key: str, runs: Sequence[Run]) -> str:
    values = [_setting(run.config.get(key)) for run in runs]
    mark = ' class="differs"' if len(set(values)) > 1 else ""
    cells = "".join(f"<td>{escape(value)}</td>" for value in values)
    return f'<tr{mark}><th scope="row">{escape(key)}</th>{cells}</tr>'


def _setting(value: Any) -> str:
    return "–" if value is None else str(value)
