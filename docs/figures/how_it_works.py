"""Draws docs/img/how-it-works.svg: one step of Ok-Topk on four ranks, computed, not invented.

python docs/figures/how_it_works.py
"""

from __future__ import annotations

import random
from pathlib import Path

RANKS, NUMEL, K = 4, 24, 5
SEED = 3588  # one of those whose regions are wide enough to be labelled
COLORS = ("#2459d6", "#d9540b", "#0a7d57", "#9b2fae")
PALE = ("#cfdcf8", "#fbdcc8", "#c9e9dd", "#ecd2f1")
INK, SOFT, LINE, OWED = "#1a2230", "#55607a", "#d5dbe6", "#c3cad8"
WIDTH, HEIGHT, GAP = 480, 300, 16
CELL = 15.5


def main() -> None:
    gradients = make_gradients()
    chosen = [top(gradient, K) for gradient in gradients]
    bounds = balanced(chosen)
    sums = [sum(g[i] for g, c in zip(gradients, chosen, strict=True) if i in c) for i in range(NUMEL)]
    winners = top(sums, K)
    panels = [
        choose(gradients, chosen),
        send(chosen, bounds),
        win(sums, winners, bounds),
        gather(sums, winners, bounds),
    ]
    target = Path(__file__).parent.parent / "img" / "how-it-works.svg"
    target.write_text(assemble(panels), encoding="utf-8")


def make_gradients() -> list[list[float]]:
    chance = random.Random(SEED)
    shared = [chance.gauss(0, 1) for _ in range(NUMEL)]
    return [[0.8 * s + 0.7 * chance.gauss(0, 1) for s in shared] for _ in range(RANKS)]


def top(values: list[float], k: int) -> set[int]:
    return set(sorted(range(len(values)), key=lambda i: -abs(values[i]))[:k])


def balanced(chosen: list[set[int]]) -> list[int]:
    """Borders that give every rank the same number of chosen entries, as nearly as it goes."""
    places = sorted(i for choice in chosen for i in choice)
    return [0, *(places[len(places) * r // RANKS] for r in range(1, RANKS)), NUMEL]


def owner(index: int, bounds: list[int]) -> int:
    return next(r for r in range(RANKS) if bounds[r] <= index < bounds[r + 1])


def choose(gradients: list[list[float]], chosen: list[set[int]]) -> str:
    most = max(abs(v) for g in gradients for v in g)
    parts = [head(1, "Choose", f"Every rank takes its {K} largest of {NUMEL} entries.")]
    for rank, gradient in enumerate(gradients):
        base = 100 + 54 * rank
        parts += [label(rank, base), line(base)]
        for i, value in enumerate(gradient):
            color = COLORS[rank] if i in chosen[rank] else OWED
            parts.append(bar(i, base, 21 * value / most, color))
    return "".join(parts)


def send(chosen: list[set[int]], bounds: list[int]) -> str:
    parts = [head(2, "Send to the owner", "Each region has one owner; borders even out the chosen entries.")]
    parts += [region(r, bounds, 76, 214) for r in range(RANKS)]
    for rank, choice in enumerate(chosen):
        y = 92 + 40 * rank
        parts.append(label(rank, y + 11))
        for i in range(NUMEL):
            fill = COLORS[rank] if i in choice else "#ffffff"
            stroke = COLORS[rank] if i in choice else LINE
            parts.append(cell(i, y, fill, stroke))
    parts.append('<text x="14" y="264" class="s">owner</text>')
    parts += [owner_name(r, bounds, 264) for r in range(RANKS)]
    parts += [arrow(r, bounds) for r in range(RANKS)]
    return "".join(parts)


def win(sums: list[float], winners: set[int], bounds: list[int]) -> str:
    most = max(map(abs, sums))
    cut = min(abs(sums[i]) for i in winners)
    parts = [head(3, "Sum, and keep the winners", f"Owners add up; the {K} largest sums of all regions survive.")]
    parts += [region(r, bounds, 76, 190) for r in range(RANKS)]
    base = 170
    for sign in (-1, 1):
        y = base + sign * 78 * cut / most
        parts.append(f'<path d="M{at(0):.1f} {y:.1f}H{at(NUMEL):.1f}" stroke="{SOFT}" stroke-dasharray="4 3"/>')
    parts.append(line(base))
    for i, value in enumerate(sums):
        if value:
            r = owner(i, bounds)
            parts.append(bar(i, base, 78 * value / most, COLORS[r] if i in winners else PALE[r], COLORS[r]))
    parts.append('<text x="14" y="286" class="s">owner</text>')
    parts += [owner_name(r, bounds, 286) for r in range(RANKS)]
    threshold = base - 78 * cut / most - 5
    parts.append(words(threshold, "agreed threshold", index=2.3))
    return "".join(parts)


def gather(sums: list[float], winners: set[int], bounds: list[int]) -> str:
    parts = [head(4, "Tell everyone", "All ranks hold the same update; the rest stays owed.")]
    for rank in range(RANKS):
        y = 92 + 40 * rank
        parts.append(label(rank, y + 11))
        for i in range(NUMEL):
            color = COLORS[owner(i, bounds)]
            parts.append(cell(i, y, color if i in winners else "#ffffff", color if i in winners else LINE))
    parts.append(words(272, "Received in all: about 2k values and 2k indices per rank,"))
    parts.append(words(288, "whether there are 4 ranks or 4,000."))
    return "".join(parts)


def at(index: float) -> float:
    return 66 + index * CELL


def words(y: float, text: str, index: float = 0) -> str:
    return f'<text x="{at(index):.1f}" y="{y:.1f}" class="s">{text}</text>'


def head(number: int, title: str, text: str) -> str:
    return (
        f'<circle cx="26" cy="28" r="13" fill="{INK}"/><text x="26" y="33" class="n">{number}</text>'
        f'<text x="48" y="34" class="t">{title}</text><text x="14" y="62" class="s">{text}</text>'
    )


def label(rank: int, y: float) -> str:
    return f'<text x="14" y="{y}" class="r" fill="{COLORS[rank]}">rank {rank}</text>'


def line(y: float) -> str:
    return f'<path d="M{at(0):.1f} {y}H{at(NUMEL):.1f}" stroke="{LINE}"/>'


def bar(index: int, base: float, height: float, fill: str, stroke: str | None = None) -> str:
    top_edge = base - height if height > 0 else base
    edge = f' stroke="{stroke}"' if stroke else ""
    return (
        f'<rect x="{at(index) + 2:.1f}" y="{top_edge:.1f}" width="{CELL - 4:.1f}" height="{abs(height):.1f}" '
        f'fill="{fill}"{edge}/>'
    )


def cell(index: int, y: float, fill: str, stroke: str) -> str:
    return (
        f'<rect x="{at(index) + 1.5:.1f}" y="{y}" width="{CELL - 3:.1f}" height="14" rx="2" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )


def region(rank: int, bounds: list[int], y: float, height: float) -> str:
    start, end = at(bounds[rank]), at(bounds[rank + 1])
    size = f'width="{end - start:.1f}" height="{height}"'
    return f'<rect x="{start:.1f}" y="{y}" {size} fill="{PALE[rank]}" opacity="0.5"/>'


def owner_name(rank: int, bounds: list[int], y: float) -> str:
    middle = (at(bounds[rank]) + at(bounds[rank + 1])) / 2
    return f'<text x="{middle:.1f}" y="{y}" class="o" fill="{COLORS[rank]}">rank {rank}</text>'


def arrow(rank: int, bounds: list[int]) -> str:
    middle = (at(bounds[rank]) + at(bounds[rank + 1])) / 2
    return (
        f'<path d="M{middle:.1f} 231V243" stroke="{COLORS[rank]}" stroke-width="2"/>'
        f'<path d="M{middle - 5:.1f} 241L{middle:.1f} 249L{middle + 5:.1f} 241Z" fill="{COLORS[rank]}"/>'
    )


def assemble(panels: list[str]) -> str:
    width, height = 2 * WIDTH + 3 * GAP, 2 * HEIGHT + 3 * GAP
    placed = []
    for n, panel in enumerate(panels):
        x, y = GAP + (n % 2) * (WIDTH + GAP), GAP + (n // 2) * (HEIGHT + GAP)
        frame = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#ffffff" stroke="{LINE}"/>'
        placed.append(f'<g transform="translate({x} {y})">{frame}{panel}</g>')
    style = (
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
        f".t{{font-size:19px;font-weight:650;fill:{INK}}}.s{{font-size:13.5px;fill:{SOFT}}}"
        ".n{font-size:14px;font-weight:700;fill:#fff;text-anchor:middle}.r{font-size:13px;font-weight:600}"
        ".o{font-size:12px;font-weight:600;text-anchor:middle}"
    )
    described = (
        "One step of Ok-Topk on four ranks: every rank chooses its largest entries, sends each to the rank that owns "
        "its region, owners add up and keep the largest sums, and all ranks receive them."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="t d">'
        f'<title id="t">How Ok-Topk works</title><desc id="d">{described}</desc><style>{style}</style>'
        f'<rect width="{width}" height="{height}" rx="16" fill="#f6f7f9"/>{"".join(placed)}</svg>\n'
    )


if __name__ == "__main__":
    main()
