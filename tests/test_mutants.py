"""The tests notice when a promise is broken: faults on purpose, which `make test` must kill."""

from __future__ import annotations

import pytest

from mutants import MUTANTS, Mutant


def _promise(mutant: Mutant) -> str:
    return mutant.promise.replace(" ", "-")


@pytest.mark.parametrize("mutant", MUTANTS, ids=_promise)
def test_a_mutant_still_fits_the_library(mutant: Mutant) -> None:
    compile(mutant.source(), mutant.path, "exec")


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("mutant", MUTANTS, ids=_promise)
def test_a_mutant_is_killed(mutant: Mutant) -> None:
    assert mutant.is_killed(), f"no test of {mutant.tests} noticed: {mutant.promise}"
