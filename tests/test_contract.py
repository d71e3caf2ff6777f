"""Every algorithm fulfils the contract, over threads and over real Gloo processes.

By pairs: every two of algorithm, ranks, wire, kernels, dtype and input meet in one row. The products are slow tests.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from contract import CASES, Case, check_all, observe
from inputs import gradient
from oktopk import ALGORITHMS, Reducer
from oktopk.config import WIRES
from oktopk.errors import NonFiniteError
from oktopk.transport import open_transport, run_world
from pairwise import pairwise
from worlds import run_processes

WORLDS = [1, 2, 3, 4, 5, 8]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# The literature's variants are options of an algorithm; they owe the same.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ALGORITHMS),
    ("topka", {"global_cut": True}),
    ("gaussiank", {"split_and_reduce": True}),
    ("randomk", {"order": "random", "block": 3, "draw_seed": 5}),
    ("oktopk", {"threshold": "reused", "reestimate_every": 2, "repartition_every": 2}),
    ("oktopk", {"balance_factor": 1.0, "in_flight": 1, "in_turn": 0.8}),
    ("oktopk", {"in_turn": 0.3}),
]


def _name(variant: Any) -> str:
    return "-".join([variant[0], *variant[1]])


def _row_name(row: dict[str, Any]) -> str:
    return "-".join(
        [_name(row["variant"]), *(str(row[name]) for name in ("ranks", "wire", "kernels", "case", "dtype"))]
    )


PAIRS = pairwise(
    {
        "case": CASES,
        "variant": VARIANTS,
        "ranks": WORLDS,
        "wire": WIRES,
        "dtype": DTYPES,
        "kernels": ["compiled", "reference"],
    }
)


@pytest.mark.parametrize("row", PAIRS, ids=_row_name)
def test_the_contract_holds_for_every_pair(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if row["kernels"] == "reference":
        monkeypatch.setenv("OKTOPK_KERNELS", "reference")
    check_over_threads(row["variant"], replace(row["case"], dtype=row["dtype"]), row["ranks"], row["wire"])


def check_over_threads(variant: Any, case: Case, world_size: int, wire: str) -> None:
    algorithm, options = variant
    ranks = run_world(world_size, lambda t: observe(t, t.rank, algorithm, case, wire=wire, **options))
    check_all(ranks, _cost_name(algorithm, options), wire)


WIRES_AND_WORLDS = [("float32", p) for p in WORLDS] + [(wire, p) for wire in WIRES[1:] for p in (2, 3, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(("wire", "world_size"), WIRES_AND_WORLDS)
@pytest.mark.parametrize("variant", VARIANTS, ids=_name)
def test_the_contract_holds_over_threads(variant: Any, world_size: int, wire: str) -> None:
    for case in CASES:
        check_over_threads(variant, case, world_size, wire)


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("variant", VARIANTS, ids=_name)
def test_the_contract_holds_with_the_reference_kernels(
    variant: Any, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OKTOPK_KERNELS", "reference")
    for case in CASES[:6]:
        check_over_threads(variant, case, 3, wire)


def _cost_name(algorithm: str, options: dict[str, Any]) -> str:
    return "topkdsa" if "split_and_reduce" in options else algorithm


GLOO_CASES = [*CASES[:3], Case("normal", 3, 0.5, steps=2), Case("zero", 500, 0.1, steps=2), Case("normal", 600, 1.0)]
GLOO_PAIRS = pairwise({"case": GLOO_CASES, "ranks": WORLDS, "algorithm": list(ALGORITHMS), "wire": WIRES})
Setting = tuple[str, str, Case]  # algorithm, wire, what is reduced


def _observe_all(settings: list[Setting]) -> list[list[Any]]:
    transport = open_transport(None)
    close, transport.close = transport.close, lambda: None  # to open one for each takes longer than all the rest
    seen = [observe(transport, transport.rank, name, case, wire=wire) for name, wire, case in settings]
    close()
    return seen


def check_over_gloo(world_size: int, settings: list[Setting]) -> None:
    everyone = run_processes(world_size, _observe_all, settings, timeout=240)
    for (name, wire, _), *ranks in zip(settings, *everyone, strict=True):
        check_all(ranks, name, wire)


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_contract_holds_over_real_gloo_processes_for_every_pair(world_size: int) -> None:
    rows = [row for row in GLOO_PAIRS if row["ranks"] == world_size]
    check_over_gloo(world_size, [(row["algorithm"], row["wire"], row["case"]) for row in rows])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_contract_holds_over_real_gloo_processes(world_size: int) -> None:
    check_over_gloo(world_size, list(itertools.product(ALGORITHMS, ("float32", "bfloat16"), GLOO_CASES)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_dtypes_conserve_too(algorithm: str, dtype: torch.dtype) -> None:
    case = Case("layers", 3000, 0.05, dtype=dtype)
    ranks = run_world(3, lambda t: observe(t, t.rank, algorithm, case))
    check_all(ranks, algorithm)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(seen.mean.dtype == dtype for seen in ranks[0])
    if algorithm != "dense":  # which owes nothing
        assert ranks[0][-1].owed_after.dtype == expected


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("variant", VARIANTS, ids=_name)
def test_density_one_gives_the_dense_mean(variant: Any, world_size: int) -> None:
    algorithm, options = variant
    case = Case("layers", 900, 1.0, steps=2)
    ranks = run_world(world_size, lambda t: observe(t, t.rank, algorithm, case, **options))
    if algorithm == "gaussiank":  # its threshold aims at k, and may miss it by a third
        check_all(ranks, _cost_name(algorithm, options))
        return
    for step in range(case.steps):
        dense = sum(gradient(case.kind, case.numel, rank, step).double() for rank in range(world_size)) / world_size
        torch.testing.assert_close(ranks[0][step].mean.double(), dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wire", ["float32", "float16", "int8", "codebook2"])
@pytest.mark.parametrize("variant", VARIANTS, ids=_name)
def test_save_load_continue_equals_continue(variant: Any, wire: str) -> None:
    algorithm, options = variant

    def straight(transport: Any) -> Any:
        with Reducer(algorithm, 0.05, group=transport, wire=wire, warmup_steps=1, **options) as reducer:
            means = [_step(reducer, transport.rank, step) for step in range(6)]
            return means[3:], reducer.residuals()

    def interrupted(transport: Any) -> Any:
        with Reducer(algorithm, 0.05, group=transport, wire=wire, warmup_steps=1, **options) as first:
            for step in range(3):
                _step(first, transport.rank, step)
            state = first.state_dict()
        with Reducer(algorithm, 0.05, group=transport, wire=wire, warmup_steps=1, **options) as second:
            second.load_state_dict(state)
            return [_step(second, transport.rank, step) for step in range(3, 6)], second.residuals()

    for (means, owed), (means_again, owed_again) in zip(run_world(3, straight), run_world(3, interrupted), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(means, means_again, strict=True))
        assert owed.keys() == owed_again.keys() and all(torch.equal(owed[name], owed_again[name]) for name in owed)


def _step(reducer: Reducer, rank: int, step: int) -> torch.Tensor:
    return reducer.reduce("w", gradient("layers", 4000, rank, step))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_nonfinite_gradient_is_known_to_all_and_leaves_residuals_alone(algorithm: str, bad: float) -> None:
    def work(transport: Any) -> None:
        with Reducer(algorithm, 0.05, group=transport) as reducer:
            _step(reducer, transport.rank, 0)
            before = reducer.residuals()
            grad = gradient("normal", 4000, transport.rank, 1)
            if transport.rank == 1:
                grad[17] = bad
            with pytest.raises(NonFiniteError, match="rank 1"):
                reducer.reduce("w", grad)
            after = reducer.residuals()
            assert all(torch.equal(before[name], after[name]) for name in before)
            assert torch.isfinite(_step(reducer, transport.rank, 1)).all()  # and the reducer goes on

    run_world(3, work)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_skip_returns_a_nonfinite_gradient_on_every_rank(algorithm: str) -> None:
    def work(transport: Any) -> None:
        with Reducer(algorithm, 0.05, group=transport, on_nonfinite="skip") as reducer:
            _step(reducer, transport.rank, 0)
            before = reducer.residuals()
            grad = torch.full((4000,), float("inf")) if transport.rank == 0 else torch.ones(4000)
            assert not torch.isfinite(reducer.reduce("w", grad)).any()
            assert reducer.last_step.skipped
            after = reducer.residuals()
            assert all(torch.equal(before[name], after[name]) for name in before)
            assert torch.isfinite(_step(reducer, transport.rank, 1)).all()

    run_world(2, work)
