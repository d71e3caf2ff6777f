"""Draws docs/img/hosts.svg: one reduction on two hosts of two ranks, computed, not invented.

python docs/figures/hosts.py
"""

from __future__ import annotations

import random
from pathlib import Path

from how_it_works import COLORS, GAP, INK, LINE, NUMEL, PALE, SOFT, WIDTH, at, bar, cell, head, line, top

RANKS, PER_HOST, K = 4, 2, 3  # K: entries of each part
PART = NUMEL // PER_HOST
HEIGHT = 300
HOST_TOPS = (76, 186)


def main() -> None:
    chance = random.Random(7)
    gradients = [[chance.gauss(0, 1) for _ in range(NUMEL)] for _ in range(RANKS)]
    sums = [[a + b for a, b in zip(*gradients[h : h + PER_HOST], strict=True)] for h in range(0, RANKS, PER_HOST)]
    chosen = [[top_of_part(host, part) for part in range(PER_HOST)] for host in sums]
    totals = [sum(s[i] for s, c in zip(sums, chosen, strict=True) if i in c[i // PART]) for i in range(NUMEL)]
    winners = set().union(*(top_of_part(totals, part) for part in range(PER_HOST)))
    panels = [scatter(sums), reduce(sums, chosen), gather(winners)]
    target = Path(__file__).parent.parent / "img" / "hosts.svg"
    target.write_text(assemble(panels), encoding="utf-8")


def top_of_part(values: list[float], part: int) -> set[int]:
    start = part * PART
    return {start + i for i in top(values[start : start + PART], K)}


def scatter(sums: list[list[float]]) -> str:
    parts = [head(1, "Sum inside the host", "Each rank adds up one part of its host's gradients, in memory.")]
    most = max(abs(v) for host in sums for v in host)
    for host, values in enumerate(sums):
        parts += [frame(host), *(owner(host, part) for part in range(PER_HOST))]
        base = HOST_TOPS[host] + 62
        parts.append(line(base))
        parts += [bar(i, base, 26 * v / most, COLORS[i // PART]) for i, v in enumerate(values)]
    return "".join(parts)


def reduce(sums: list[list[float]], chosen: list[list[set[int]]]) -> str:
    text = f"Ranks with the same part reduce it: {K} of {PART} entries cross the link."
    parts = [head(2, "Reduce between hosts", text)]
    for host in range(len(sums)):
        parts += [frame(host), *(owner(host, part) for part in range(PER_HOST))]
        for i in range(NUMEL):
            part = i // PART
            is_chosen = i in chosen[host][part]
            parts.append(cell(i, HOST_TOPS[host] + 48, COLORS[part] if is_chosen else "#ffffff", COLORS[part]))
    for part in range(PER_HOST):
        x = at((part + 0.17) * PART)
        parts.append(f'<path d="M{x:.1f} 146V230" stroke="{COLORS[part]}" stroke-width="3" stroke-dasharray="5 3"/>')
    return "".join(parts)


def gather(winners: set[int]) -> str:
    parts = [head(3, "Tell the host", "Ranks of a host exchange what their parts won, as sparse messages.")]
    for rank in range(RANKS):
        host, place = divmod(rank, PER_HOST)
        if place == 0:
            parts.append(frame(host))
        y = HOST_TOPS[host] + 32 + 30 * place
        parts.append(f'<text x="18" y="{y + 12}" class="r" fill="{INK}">rank {rank}</text>')
        for i in range(NUMEL):
            color = COLORS[i // PART]
            parts.append(cell(i, y, color if i in winners else "#ffffff", color if i in winners else LINE))
    return "".join(parts)


def frame(host: int) -> str:
    y = HOST_TOPS[host]
    box = f'<rect x="10" y="{y}" width="{WIDTH - 20}" height="96" rx="8" fill="#fafbfd" stroke="{LINE}"/>'
    return box + f'<text x="18" y="{y + 20}" class="s">host {host}</text>'


def owner(host: int, part: int) -> str:
    """Whose part of the gradient a region is."""
    y, x = HOST_TOPS[host], at(part * PART)
    size = f'width="{at((part + 1) * PART) - x:.1f}" height="66"'
    region = f'<rect x="{x:.1f}" y="{y + 26}" {size} fill="{PALE[part]}" opacity="0.5"/>'
    name = f'<text x="{at((part + 0.5) * PART):.1f}" y="{y + 19}" class="o" fill="{COLORS[part]}">'
    return region + f"{name}rank {host * PER_HOST + part}: part {part}</text>"


def assemble(panels: list[str]) -> str:
    width, height = WIDTH + 2 * GAP, len(panels) * (HEIGHT + GAP) + GAP
    placed = []
    for n, panel in enumerate(panels):
        box = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#ffffff" stroke="{LINE}"/>'
        placed.append(f'<g transform="translate({GAP} {GAP + n * (HEIGHT + GAP)})">{box}{panel}</g>')
    style = (
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
        f".t{{font-size:19px;font-weight:650;fill:{INK}}}.s{{font-size:13px;fill:{SOFT}}}"
        ".n{font-size:14px;font-weight:700;fill:#fff;text-anchor:middle}.r{font-size:12px;font-weight:600}"
        ".o{font-size:12px;font-weight:600;text-anchor:middle}"
    )
    described = (
        "Two hosts of two ranks: each rank sums one part of its host's gradients; ranks with the same part reduce it "
        "sparsely between hosts; ranks of a host tell each other what their parts won."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="t d">'
        f'<title id="t">Dense inside, sparse between</title><desc id="d">{described}</desc><style>{style}</style>'
        f'<rect width="{width}" height="{height}" rx="16" fill="#f6f7f9"/>{"".join(placed)}</svg>\n'
    )


if __name__ == "__main__":
    main()
