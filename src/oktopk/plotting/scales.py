"""Axes: units people read, ticks at round numbers, and the way from a value to a place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["number", "bytes", "seconds", "share"]

_SCALES: dict[str, list[tuple[float, str]]] = {
    "bytes": [(1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")],
    "seconds": [(1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h")],
    "share": [(0.01, "%")],
    "number": [(1.0, "")],
}


@dataclass(frozen=True)
class Scale:
    """A range of values along an axis."""

    low: float
    high: float
    log: bool = False

    def fraction(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high end, held inside."""
        if self.log:
            value, low, high = (math.log10(max(v, 1e-300)) for v in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self, unit: Unit) -> list[float]:
        if self.log:
            return _log_ticks(self.low, self.high)
        divisor, _ = unit_of(unit, max(abs(self.low), abs(self.high)))
        return [tick * divisor for tick in _linear_ticks(self.low / divisor, self.high / divisor)]


def scale_for(values: Iterable[float], log: bool = False, zero: bool = False) -> Scale:
    """A range that holds the values with a little air, `zero` included if asked."""
    known = [value for value in values if not log or value > 0]
    if not known:
        return Scale(0.1, 1.0, True) if log else Scale(0.0, 1.0)
    low, high = min(known), max(known)
    if log:
        air = (high / low) ** 0.06 if high > low else 3.0
        return Scale(low / air, high * air, True)
    air = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(min(0.0, low) if zero else low - air, max(high + air, 0.0) if zero else high + air)


def tight(values: Sequence[float]) -> Scale:
    """A range from the first value (or zero, when it is near) to the last: for steps, time and bytes spent."""
    if not values:
        return Scale(0.0, 1.0)
    low, high = min(values), max(values)
    if 0.0 < low < 0.05 * high:
        low = 0.0
    return Scale(low, high) if high > low else Scale(low - 0.5, high + 0.5)


def unit_of(unit: Unit, largest: float) -> tuple[float, str]:
    """The multiple of a unit in which the largest value reads well."""
    chosen = _SCALES[unit][0]
    for divisor, suffix in _SCALES[unit]:
        reach = 2.0 if suffix in ("min", "h") else 1.0
        if largest >= divisor * reach:
            chosen = (divisor, suffix)
    return chosen


def say(value: float, unit: Unit = "number") -> str:
    """A value with its unit, for people: 1.93 MB, 41 ms, 98.0 %."""
    divisor, suffix = unit_of(unit, abs(value))
    return f"{plain(value / divisor)} {suffix}".strip()


def plain(value: float) -> str:
    """Three significant digits without an exponent where that is readable."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e7 or size < 1e-4:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    if size >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(size)))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    span = math.log10(high / low)
    multiples = (1, 2, 5) if span < 2 else (1,)
    every = max(1, math.ceil(span / 6))
    ticks = [m * 10.0**d for d in decades if d % every == 0 for m in multiples]
    inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    return inside if len(inside) > 1 else [tick for tick in _linear_ticks(low, high, 3) if tick > 0]
