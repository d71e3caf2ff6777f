"""Hypothesis looks for sizes, densities, worlds and wires that break conservation or bitwise equality."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract import Case, check_all, observe
from inputs import KINDS
from oktopk import ALGORITHMS
from oktopk.config import WIRES
from oktopk.transport import run_world

cases = st.builds(
    Case,
    kind=st.sampled_from(sorted(KINDS)),
    numel=st.integers(0, 3000),
    density=st.floats(0.0005, 1.0) | st.sampled_from([1.0, 0.1, 0.01, 0.001]),
    steps=st.integers(1, 3),
)


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases, algorithm=st.sampled_from(sorted(ALGORITHMS)), world=st.integers(1, 9), wire=st.sampled_from(WIRES))
def test_nothing_is_lost_and_all_ranks_agree(case: Case, algorithm: str, world: int, wire: str) -> None:
    check_all(run_world(world, lambda t: observe(t, t.rank, algorithm, case, wire=wire)), algorithm, wire)
