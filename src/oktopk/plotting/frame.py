"""The frame of a chart: axes with ticks and titles, and the way from values to places inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from oktopk.plotting.scales import Scale, Unit, plain, say, scale_for, unit_of


@dataclass(frozen=True)
class Axis:
    """What is measured along one side."""

    label: str
    unit: Unit = "number"
    log: bool = False
    zero: bool = False  # begin at zero
    include: tuple[float, ...] = ()  # values that the range must hold: keeps noise from filling the chart
    ticks: tuple[float, ...] = ()  # where to put ticks; default: at round numbers

    def scale(self, values: Sequence[float]) -> Scale:
        return scale_for([*values, *self.include], self.log, self.zero)


@dataclass(frozen=True)
class Marker:
    """A vertical line with a word."""

    x: float
    label: str
    color: str = "muted"


@dataclass(frozen=True)
class Frame:
    """The size of a drawing, and the margins around the rectangle that values are drawn into."""

    width: int = 420
    height: int = 262
    left: int = 54
    right: int = 12
    top: int = 14
    bottom: int = 42

    @property
    def end(self) -> int:
        """The right side of the rectangle."""
        return self.width - self.right

    @property
    def base(self) -> int:
        """The lower side of the rectangle."""
        return self.height - self.bottom

    def at_x(self, scale: Scale, value: float) -> float:
        return round(self.left + scale.fraction(value) * (self.end - self.left), 1)

    def at_y(self, scale: Scale, value: float) -> float:
        return round(self.base - scale.fraction(value) * (self.base - self.top), 1)

    def axes(self, x: Axis, y: Axis, x_scale: Scale, y_scale: Scale) -> list[str]:
        """Both axes with their grids; the title of y is the caller's to put above the drawing."""
        parts = self.x_axis(x, x_scale)
        for tick, label in _labels(y, y_scale):
            at = self.at_y(y_scale, tick)
            parts.append(f'<line class="gridline" x1="{self.left}" x2="{self.end}" y1="{at}" y2="{at}"/>')
            parts.append(f'<text class="tick y" x="{self.left - 6}" y="{at + 4}">{label}</text>')
        parts.append(f'<path class="axis" d="M{self.left} {self.top}V{self.base}H{self.end}"/>')
        return parts

    def x_axis(self, axis: Axis, scale: Scale) -> list[str]:
        parts = []
        for tick, label in _labels(axis, scale):
            x = self.at_x(scale, tick)
            parts.append(f'<line class="gridline" x1="{x}" x2="{x}" y1="{self.top}" y2="{self.base}"/>')
            parts.append(f'<text class="tick x" x="{x}" y="{self.base + 16}">{label}</text>')
        middle = (self.left + self.end) / 2
        parts.append(f'<text class="label" x="{middle}" y="{self.height - 6}">{escape(title_of(axis, scale))}</text>')
        return parts

    def marker_lines(self, markers: Sequence[Marker], scale: Scale) -> list[str]:
        return [
            f'<line class="mark" style="stroke:var(--{marker.color})" x1="{x}" x2="{x}" y1="{self.top}" '
            f'y2="{self.base}"/>'
            for marker in markers
            for x in [self.at_x(scale, marker.x)]
        ]

    def marker_words(self, markers: Sequence[Marker], scale: Scale) -> list[str]:
        return [self._marker_word(marker, self.at_x(scale, marker.x)) for marker in markers if marker.label]

    def _marker_word(self, marker: Marker, x: float) -> str:
        shift, anchor = (-4, "end") if x > self.width * 0.7 else (4, "start")
        return (
            f'<text class="mark" x="{x + shift}" y="{self.top - 4}" text-anchor="{anchor}">'
            f"{escape(marker.label)}</text>"
        )


def title_of(axis: Axis, scale: Scale) -> str:
    """The label of an axis with its unit; on logarithmic axes every tick has its own."""
    _, suffix = unit_of(axis.unit, max(abs(scale.low), abs(scale.high)))
    return f"{axis.label} ({suffix})" if suffix and not scale.log else axis.label


def _labels(axis: Axis, scale: Scale) -> list[tuple[float, str]]:
    ticks = axis.ticks or scale.ticks(axis.unit)
    if scale.log:
        return [(tick, say(tick, axis.unit)) for tick in ticks]
    divisor, _ = unit_of(axis.unit, max(abs(scale.low), abs(scale.high)))
    return [(tick, plain(tick / divisor)) for tick in ticks]
