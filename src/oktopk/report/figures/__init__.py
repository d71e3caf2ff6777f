"""The figures of a report: which lines, what they are called, and one sentence on how to read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oktopk.report.figures.base import Figure
from oktopk.report.figures.inside import inside
from oktopk.report.figures.learning import learning
from oktopk.report.figures.resources import resources
from oktopk.report.figures.selection import kind_of, last_density, selection
from oktopk.report.figures.traffic import traffic
from oktopk.report.runs import Run

__all__ = ["Figure", "Section", "kind_of", "last_density", "sections"]


@dataclass(frozen=True)
class Section:
    title: str
    intro: str
    figures: Sequence[Figure]


def sections(runs: Sequence[Run]) -> list[Section]:
    return [
        Section(
            "Learning", "Does it learn as well, and what does that cost in steps, time and traffic?", [*learning(runs)]
        ),
        Section("Selection", "Which part of the gradient was sent, and what is still owed.", [*selection(runs)]),
        Section("Traffic", "What went over the network, against what theory allows.", [*traffic(runs)]),
        Section("Time and memory", "Where a step spends its time on rank 0.", [*resources(runs)]),
        Section("Inside the gradient", "A closer look, taken on a few steps.", [*inside(runs)]),
    ]
