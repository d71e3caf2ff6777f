"""The palette: every colour by its name, for light and for dark."""

from __future__ import annotations

# Charts name colours; the page or file that holds them says what a name looks like, so one drawing serves both.
PALETTE: dict[str, tuple[str, str]] = {
    # page
    "paper": ("#f6f7f9", "#10141c"), "card": ("#ffffff", "#181e29"), "best": ("#e7f3ec", "#16332a"),
    "accent": ("#2459d6", "#7ea6ff"), "line": ("#e3e7ee", "#2a3241"), "grid": ("#edf0f5", "#232b39"),
    # text, from strong to faint
    "ink": ("#1a2230", "#e8ecf4"), "soft": ("#55607a", "#a7b1c4"), "muted": ("#7b859b", "#8590a6"),
    "faint-ink": ("#a3abbd", "#5d687e"),
    # series
    "c0": ("#2459d6", "#7ea6ff"), "c1": ("#d9540b", "#ff9a5c"), "c2": ("#0a7d57", "#4fd0a0"),
    "c3": ("#9b2fae", "#dd8fea"), "c4": ("#a67c00", "#e3c04b"), "c5": ("#0b86a8", "#56cbe4"),
    "c6": ("#c2255c", "#ff86ae"), "c7": ("#5f6b80", "#a7b1c4"),
    # phases of a step, which stand next to each other
    "p0": ("#b9c2d3", "#566178"), "p1": ("#8fa8dd", "#4f6aa6"), "p2": ("#5179cf", "#6f96ea"),
    "p3": ("#e8833a", "#ff9a5c"), "p4": ("#f2b166", "#b9733d"), "p5": ("#9b2fae", "#dd8fea"),
    "p6": ("#2f9e77", "#4fd0a0"), "p7": ("#c77dd3", "#93569e"), "p8": ("#f6d09c", "#80572f"),
    "p9": ("#5f6b80", "#8590a6"),
}  # fmt: skip
SERIES = 8  # colours c0 to c7


def variables() -> str:
    """CSS that gives every name its colour: as the system asks, or as `data-theme` on the root says."""
    light, dark = (_declared(side) for side in (0, 1))
    return (
        f":root{{{light}}}@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}"
    )


def _declared(side: int) -> str:
    return "".join(f"--{name}:{shades[side]};" for name, shades in PALETTE.items())
