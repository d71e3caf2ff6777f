"""Rows that show every two values of different factors together, without the full product.

Most faults need one value, or two in the same run: a rounding wire and few ranks, ties and a tree. Rows that hold every
pair find those; the full product of the contract's factors finds little more, and takes a hundred times as long.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Level = tuple[str, int]  # a factor, and which of its values
Pair = frozenset[Level]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows of one value per factor; each pair of values is in one of them. The same call gives the same rows."""
    missing = dict.fromkeys(_all_pairs(factors))  # a set that keeps its order
    rows, used = [], Counter[Level]()
    while missing:
        row = dict(next(iter(missing)))
        for name in factors:
            if name not in row:
                row[name] = _best(name, len(factors[name]), row, missing, used)
        for pair in itertools.combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        used.update(row.items())
        rows.append({name: factors[name][row[name]] for name in factors})
    return rows


def _all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[Pair]:
    return [
        frozenset({(one, i), (other, j)})
        for one, other in itertools.combinations(factors, 2)
        for i in range(len(factors[one]))
        for j in range(len(factors[other]))
    ]


def _best(name: str, values: int, row: Mapping[str, int], missing: Mapping[Pair, None], used: Counter[Level]) -> int:
    """The value that brings the most missing pairs with it; of equals the one used least, so that all are used."""

    def gain(value: int) -> tuple[int, int]:
        found = sum(frozenset({(name, value), level}) in missing for level in row.items())
        return found, -used[name, value]

    return max(range(values), key=gain)
