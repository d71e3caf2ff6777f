"""Several ranks per host: dense inside, sparse between. What holds for ranks holds for hosts of them."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oktopk
from contract import CASES, Case, Seen, check_conservation, check_record, check_same_bits
from inputs import gradient
from oktopk import ALGORITHMS, Reducer
from oktopk.bench.cost_model import predict
from oktopk.config import WIRES
from oktopk.errors import CheckpointError, ConfigError, MismatchError, NonFiniteError, PeerError
from oktopk.primitives.partition import told_words
from oktopk.reduction.agreement import agreement_words
from oktopk.reduction.parts import Part, join, merge
from oktopk.transport import run_world
from oktopk.transport.machines import own_machine
from oktopk.transport.sharing import share
from oktopk.types import SparseVector
from pairwise import pairwise

SHAPES = [(2, 2), (2, 4), (3, 2), (2, 3), (1, 4), (4, 1)]  # hosts, ranks per host
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ALGORITHMS),
    ("oktopk", {"threshold": "reused", "reestimate_every": 2, "repartition_every": 2}),
    ("oktopk", {"balance_factor": 1.0, "in_turn": 0.3}),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def layout_of(numel: int) -> list[tuple[str, int]]:
    """Three parameters, of which the first is small and the last may be empty."""
    first, second = min(5, numel), numel // 3
    second = min(second, numel - first)
    return [("bias", first), ("weight", second), ("head", numel - first - second)]


def owed(reducer: Reducer, layout: list[tuple[str, int]]) -> Tensor:
    residuals = reducer.residuals()
    return torch.cat([residuals.get(name, torch.zeros(numel)) for name, numel in layout])


def observe(transport: Any, hosts: int, algorithm: str, case: Case, in_pieces: bool, **options: Any) -> list[Seen]:
    layout, seen = layout_of(case.numel), []
    with Reducer(algorithm, case.density, group=transport, hosts=hosts, min_numel=0, **options) as reducer:
        for step in range(case.steps):
            grad = gradient(case.kind, case.numel, transport.rank, step).to(case.dtype)
            before = owed(reducer, layout)
            mean = grad.clone()
            pieces = mean.split([numel for _, numel in layout])
            reducer.submit(layout, pieces if in_pieces else mean).wait()
            after = owed(reducer, layout)
            seen.append(Seen(before, grad, mean, after, reducer.last_step))
    return seen


def check_volume(ranks: tuple[Seen, ...], shape: tuple[int, int], algorithm: str, wire: str) -> None:
    """Each rank receives from other hosts what is received for its part, and the words that all ranks agree on."""
    hosts, per_host = shape
    for rank, seen in enumerate(ranks):
        record, part = seen.record, Part(rank % per_host, per_host)
        numel = sum(end - start for start, end in [part._bounds(n) for _, n in layout_of(record.numel)])
        width = max(4, seen.grad.element_size())
        bound = predict(algorithm, numel, -(-record.k * numel // max(1, record.numel)) + 1, hosts, wire, width)
        agreed = 8 * agreement_words(told_words(hosts)) * (len(ranks) - 1)
        assert record.bytes_received <= bound.bytes_received + agreed, f"{record.bytes_received} > {bound}"


KINDS = [CASES[2], CASES[5], CASES[6], CASES[8], *CASES[-3:]]  # layers, one layer, zero, all, few, one and none
PAIRS = pairwise(
    {
        "case": KINDS,
        "variant": VARIANTS,
        "shape": SHAPES,
        "wire": WIRES,
        "dtype": DTYPES,
        "in_pieces": [False, True],
    }
)


def _name(row: dict[str, Any]) -> str:
    return "-".join(str(row[name]) for name in ("shape", "variant", "wire", "case"))


@pytest.mark.parametrize("row", PAIRS, ids=_name)
def test_the_contract_holds_over_hosts_for_every_pair(row: dict[str, Any]) -> None:
    (hosts, per_host), (algorithm, options) = row["shape"], row["variant"]
    case = replace(row["case"], dtype=row["dtype"])

    def work(transport: Any) -> list[Seen]:
        return observe(transport, per_host, algorithm, case, row["in_pieces"], wire=row["wire"], **options)

    for step in zip(*run_world(hosts * per_host, work), strict=True):
        check_same_bits(step)
        check_conservation(step)
        check_record(step)
        check_volume(step, row["shape"], algorithm, row["wire"])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_vectors_over_parts_merge_into_one_over_whole_parameters(count: int) -> None:
    layout, whole = (("a", 5), ("b", 0), ("c", 1), ("d", 12)), torch.arange(1.0, 19.0)
    vectors = []
    for index in range(count):
        part = Part(index, count)
        pieces = [part.of(piece) for piece in whole.split([numel for _, numel in layout])]
        slices = torch.cat(pieces)
        assert [numel for _, numel in part.layout(layout)] == [piece.numel() for piece in pieces]
        chosen = torch.arange(index % 2, slices.numel(), 2, dtype=torch.int32)
        vectors.append(SparseVector(chosen, slices[chosen.long()], slices.numel()))
    merged = merge(vectors, layout)
    assert (merged.indices.diff() > 0).all() and merged.nnz == sum(vector.nnz for vector in vectors)
    assert torch.equal(whole[merged.indices.long()], merged.values)


def test_parts_of_a_host_make_up_its_parameters() -> None:
    weight, bias = torch.randn(7), torch.randn(1)
    parts = [Part(index, 3) for index in range(3)]
    assert parts[1].name("weight") == "weight[1/3]"
    saved = [{part.name("weight"): part.of(weight), part.name("bias"): part.of(bias)} for part in parts]
    joined = join(saved)
    assert torch.equal(joined["weight"], weight) and torch.equal(joined["bias"], bias)


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_nan_in_one_slice_is_everyones(on_nonfinite: str) -> None:
    def work(transport: Any) -> None:
        with Reducer("oktopk", 0.1, group=transport, hosts=2, on_nonfinite=on_nonfinite) as reducer:
            reducer.reduce("w", gradient("normal", 4000, transport.rank, 0))
            before, grad = reducer.residuals(), gradient("normal", 4000, transport.rank, 1)
            grad[17] = float("nan") if transport.rank == 2 else grad[17]  # in the slice of ranks 0 and 2
            if on_nonfinite == "raise":
                with pytest.raises(NonFiniteError, match=r"rank 2 .* look at all ranks of its host"):
                    reducer.reduce("w", grad)
            else:
                assert reducer.reduce("w", grad).isnan().all() and reducer.last_step.skipped
            assert torch.equal(before["w"], reducer.residuals()["w"])
            assert reducer.reduce("w", gradient("normal", 4000, transport.rank, 1)).isfinite().all()

    run_world(4, work)


@pytest.mark.parametrize("odd", range(4))
def test_ranks_that_reduce_something_else_are_told_before_data_moves(odd: int) -> None:
    def work(transport: Any) -> None:
        with Reducer("oktopk", 0.1, group=transport, hosts=2) as reducer:
            mine = torch.ones(4000 + (transport.rank == odd))
            with pytest.raises(MismatchError, match="shapes"):
                reducer.reduce("w", mine)
            assert reducer.reduce("w", torch.ones(4000)).count_nonzero() == 400  # and goes on

    run_world(4, work)


@pytest.mark.parametrize("bad", range(4))
def test_a_rank_that_cannot_reduce_ends_it_everywhere_in_words(bad: int) -> None:
    def work(transport: Any) -> None:
        with Reducer("oktopk", 0.1, group=transport, hosts=2) as reducer:
            if transport.rank == bad:
                with pytest.raises(ValueError, match="broken batch"):
                    reducer.refuse(ValueError("broken batch"))
            else:
                with pytest.raises(PeerError, match=f"rank {bad}: ValueError: broken batch"):
                    reducer.reduce("w", torch.ones(4000))

    run_world(4, work)


@pytest.mark.parametrize(
    ("world_size", "hosts", "machines", "error"),
    [
        (4, 3, "aaaa", r"hosts=3 .* 4 ranks do not fill"),
        (4, 0, "aaaa", r"hosts=0 .* do not fill"),
        (4, "two", "aaaa", "hosts must be 'auto', None or a number"),
        (4, True, "aaaa", "hosts must be 'auto', None or a number"),
        (4, 2, "aaab", r"ranks 2 to 3, which are on several machines: these have 3, 1 ranks"),
    ],
)
def test_bad_hosts_are_an_error_on_every_rank(
    world_size: int, hosts: Any, machines: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machines(machines, monkeypatch)

    def work(transport: Any) -> None:
        with pytest.raises(ConfigError, match=error):
            Reducer("oktopk", 0.1, group=transport, hosts=hosts)

    run_world(world_size, work)


def test_ranks_that_disagree_about_hosts_are_told() -> None:
    def work(transport: Any) -> None:
        with pytest.raises(MismatchError, match="rank 1 differs from rank 0 in hosts: 2 there, None on rank 0"):
            Reducer("oktopk", 0.1, group=transport, hosts=2 if transport.rank == 1 else None)

    run_world(4, work)


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("aaaa", ((0,), (1,), (2,), (3,))),  # there is no link between hosts to save
        ("abcd", ((0,), (1,), (2,), (3,))),
        ("aaab", ((0,), (1,), (2,), (3,))),
    ],
)
def test_hosts_are_found_where_there_are_several_with_equally_many_ranks(
    machines: str, expected: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_machines(machines, monkeypatch)

    def work(transport: Any) -> Any:
        with Reducer("oktopk", 0.1, group=transport) as reducer:
            mean = reducer.reduce("w", torch.full((2000,), float(transport.rank)))
            assert torch.equal(mean, torch.full((2000,), 1.5)) or mean.count_nonzero() == reducer.last_step.k
            return reducer.hosts.ranks

    assert run_world(4, work) == [expected] * 4
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == (machines == "aaab") and all("between 1 and 3 ranks" in line for line in said)


def on_machines(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each thread-rank be on the machine of its letter."""
    monkeypatch.setattr("oktopk.reduction.hosts.share", lambda mine, world: _shared(mine, world, names))


def _shared(mine: dict[str, Any], world: Any, names: str) -> list[dict[str, Any]]:
    return share({**mine, "machine": names[world.rank]}, world)


@pytest.mark.parametrize("options", [{}, {"momentum_correction": 0.9, "factor_masking": True}, {"warmup_steps": 2}])
@pytest.mark.parametrize("algorithm", ["oktopk", "randomk", "dense"])
def test_a_saved_state_goes_on_as_if_nothing_had_happened(algorithm: str, options: dict[str, Any]) -> None:
    def reduce(reducer: Reducer, rank: int, steps: range) -> Tensor:
        means = [reducer.reduce("w", gradient("layers", 4000, rank, step)) for step in steps]
        return torch.cat([*means, *reducer.residuals().values()])

    def work(transport: Any) -> None:
        def reducer() -> Reducer:
            return Reducer(algorithm, 0.05, group=transport, hosts=2, wire="int8", **options)

        with reducer() as straight:
            reduce(straight, transport.rank, range(3))
            state, expected = straight.state_dict(), reduce(straight, transport.rank, range(3, 6))
        with reducer() as resumed:
            resumed.load_state_dict(state)
            assert torch.equal(reduce(resumed, transport.rank, range(3, 6)), expected)
        flat = Reducer(algorithm, 0.05, group=transport, hosts=None, wire="int8", **options)
        with flat, pytest.raises(CheckpointError, match="ranks_per_host 2, but this reducer has 1"):
            flat.load_state_dict(state)

    run_world(4, work)


CHANGES = [((2, 2), (4, 1)), ((4, 1), (2, 2)), ((2, 2), (1, 2)), ((2, 2), (3, 2)), ((2, 3), (2, 2)), ((2, 4), (1, 4))]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_what_is_owed_survives_a_change_of_hosts(before: Any, after: Any, tmp_path: Path) -> None:
    layout = [("bias", 3), ("weight", 2000)]

    def owed(reducer: Reducer) -> Tensor:
        residuals = reducer.residuals()
        return torch.cat([residuals.get(name, torch.zeros(numel)).double() for name, numel in layout])

    def save(transport: Any) -> Tensor:
        with Reducer("oktopk", 0.05, group=transport, hosts=before[1]) as reducer:
            for step in range(2):
                reducer.submit(layout, gradient("normal", 2003, transport.rank, step)).wait()
            oktopk.save(reducer, tmp_path)
            return owed(reducer)

    def load(transport: Any) -> Tensor:
        with Reducer("oktopk", 0.05, group=transport, hosts=after[1]) as reducer:
            oktopk.load(reducer, tmp_path)
            restored = owed(reducer)
            assert reducer.submit(layout, gradient("normal", 2003, transport.rank, 2)).wait().isfinite().all()
            return restored

    saved, loaded = (run_world(q * per_host, work) for (q, per_host), work in ((before, save), (after, load)))
    ratio = (after[0] * after[1]) / (before[0] * before[1])  # a mean over more ranks divides what each owes by more
    torch.testing.assert_close(sum(loaded), sum(saved) * ratio, rtol=1e-6, atol=2e-6)  # of float32 sums around 5


def test_a_rank_owes_one_part_and_no_more() -> None:
    numel, per_host = 40_000, 4

    def work(transport: Any) -> int:
        with Reducer("oktopk", 0.01, group=transport, hosts=per_host) as reducer:
            for step in range(2):
                reducer.reduce("w", gradient("normal", numel, transport.rank, step))
            state = reducer.state_dict()
            return sum(vector.numel() for vector in state["residuals"].values())

    assert max(run_world(8, work)) <= 1.1 * numel / per_host


def test_under_torchrun_a_machine_is_what_one_agent_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    alone = own_machine()
    assert alone == own_machine() and socket.gethostname() in alone
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert own_machine() == alone
    agents = []
    for rank in ("0", "1"):
        monkeypatch.setenv("GROUP_RANK", rank)
        agents.append(own_machine())
    assert len({alone, *agents}) == 3
