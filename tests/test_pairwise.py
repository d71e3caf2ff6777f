"""The rows that stand for a product hold every pair of it."""

from __future__ import annotations

import itertools

from pairwise import pairwise

FACTORS = {"case": range(13), "variant": "abcdefghij", "ranks": (1, 2, 3, 4, 5, 8), "wire": range(4), "kernels": (0, 1)}


def test_every_two_values_meet_in_a_row_and_no_row_has_others() -> None:
    rows = pairwise(FACTORS)
    for one, other in itertools.combinations(FACTORS, 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(FACTORS[one], FACTORS[other]))


def test_the_rows_are_few_and_always_the_same() -> None:
    rows = pairwise(FACTORS)
    assert 13 * 10 <= len(rows) <= 1.1 * 13 * 10, "the two largest factors alone need their product"
    assert rows == pairwise(FACTORS)


def test_one_factor_is_shown_with_each_of_its_values() -> None:
    assert pairwise({"only": "ab", "constant": "c"}) == [
        {"only": "a", "constant": "c"},
        {"only": "b", "constant": "c"},
    ]
