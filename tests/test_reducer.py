"""The pipeline around the algorithms: phases, buckets, shapes, records, one-shot use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oktopk
from inputs import gradient
from oktopk import PAPER_BERT, PAPER_LSTM, PAPER_VGG, Reducer
from oktopk.metrics import PHASES, MemorySink
from oktopk.primitives.partition import told_words
from oktopk.reduction.agreement import agreement_words
from oktopk.transport import run_world


def test_warmup_is_dense_and_recorded_as_such() -> None:
    def work(transport: Any) -> None:
        with Reducer("oktopk", 0.01, group=transport, warmup_steps=2) as reducer:
            for step in range(4):
                grads = [gradient("normal", 5000, rank, step) for rank in range(2)]
                mean = reducer.reduce("w", grads[transport.rank])
                record = reducer.last_step
                assert record.step == step
                if step < 2:
                    torch.testing.assert_close(mean, sum(grads) / 2, rtol=1e-6, atol=1e-7)
                    assert (record.phase, record.sparsity, record.compression_ratio) == ("dense", 0.0, 1.0)
                    assert (
                        record.dense_bytes
                        <= record.bytes_sent
                        <= record.dense_bytes + 8 * agreement_words(told_words(2))
                    )
                    assert record.k == record.selected_global == 5000
                else:
                    assert record.phase == "sparse" and record.sparsity == pytest.approx(0.99, abs=0.01)
                    assert record.bytes_sent < record.dense_bytes

    run_world(2, work)


def test_small_tensors_go_dense() -> None:
    with Reducer(density=0.01) as reducer:
        reducer.reduce("bias", torch.randn(100))
        assert reducer.last_step.phase == "dense" and reducer.residuals() == {}
    with Reducer(density=0.01, min_numel=100) as reducer:
        reducer.reduce("bias", torch.randn(100))
        assert reducer.last_step.phase == "sparse"


@pytest.mark.parametrize("shape", [(), (1,), (30, 50), (4, 5, 6, 7), (0, 3)])
def test_shapes_survive(shape: tuple[int, ...]) -> None:
    with Reducer(density=0.5, min_numel=0) as reducer:
        grad = torch.randn(shape)
        kept = grad.clone()
        assert reducer.reduce("w", grad).shape == shape
        assert torch.equal(grad, kept), "the argument was changed"
        assert all(residual.shape == shape for residual in reducer.residuals().values())


def test_a_transposed_gradient_keeps_its_places() -> None:
    with Reducer(density=1.0, min_numel=0) as reducer:
        grad = torch.randn(40, 60).t()
        torch.testing.assert_close(reducer.reduce("w", grad), grad)


def test_residuals_follow_their_names_into_other_buckets() -> None:
    """DDP re-arranges its buckets after the first step."""

    def work(transport: Any) -> None:
        def grads(step: int) -> dict[str, torch.Tensor]:
            return {name: gradient("layers", 2000, transport.rank, 10 * step + i) for i, name in enumerate("abc")}

        with Reducer("oktopk", 0.02, group=transport) as reducer:
            put_in = {name: torch.zeros(2000) for name in "abc"}
            came_out = {name: torch.zeros(2000) for name in "abc"}
            for step, buckets in enumerate([["abc"], ["c", "ab"], ["ba", "c"], ["b", "c", "a"]]):
                grad = grads(step)
                for names in buckets:
                    flat = torch.cat([grad[name] for name in names])
                    reduced = reducer.submit([(name, 2000) for name in names], flat).wait()
                    assert reduced is flat or torch.equal(reduced, flat)
                    for name, part in zip(names, flat.split(2000), strict=True):
                        came_out[name] += part
                        put_in[name] += grad[name]
                assert reducer.last_step.numel == 6000 and reducer.step == step + 1
            owed = reducer.residuals()
            for name in "abc":
                balance = transport.all_reduce_(put_in[name] - owed[name]) / 2
                torch.testing.assert_close(balance, came_out[name], rtol=1e-4, atol=1e-4)

    run_world(2, work)


def test_records_reach_the_sink_and_merge_over_buckets() -> None:
    sink = MemorySink()
    with Reducer(density=0.1, metrics=sink) as reducer:
        for _ in range(2):
            reducer.reduce("a", torch.randn(3000))
            reducer.reduce("b", torch.randn(1000))
        merged = reducer.last_step
    records = sink.drain()
    assert [(r.step, r.bucket) for r in records] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert merged.numel == 4000 and merged.step == 1
    assert merged.selected_global == sum(r.selected_global for r in records[2:])
    assert set(merged.seconds) == set(PHASES) and all(s >= 0 for s in merged.seconds.values())
    assert sink.drain() == []


def test_state_is_plain_and_loads_without_pickle(tmp_path: Any) -> None:
    with Reducer(density=0.1) as reducer:
        reducer.reduce("a", torch.randn(3000))
        torch.save(reducer.state_dict(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        reducer.load_state_dict(state)
        assert torch.equal(reducer.residuals()["a"].flatten(), state["residuals"]["a"])


@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
def test_one_shot_returns_mean_and_sent(algorithm: str) -> None:
    def work(transport: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tensor = gradient("normal", 4000, transport.rank, 0).view(40, 100)
        reduced = oktopk.sparse_allreduce(tensor, density=0.05, algorithm=algorithm, group=transport)
        assert isinstance(reduced.mean, torch.Tensor) and reduced.mean.shape == (40, 100)
        return reduced.mean, tensor.flatten() - reduced.sent.to_dense()

    ranks = run_world(3, work)
    total = sum(gradient("normal", 4000, rank, 0) for rank in range(3))
    out = 3 * ranks[0][0].flatten() + sum(owed for _, owed in ranks)
    torch.testing.assert_close(out, total, rtol=1e-5, atol=1e-5)


def test_scaled_residuals_follow_the_unit_of_the_gradient() -> None:
    with Reducer(density=0.1) as reducer:
        reducer.reduce("a", torch.randn(3000))
        before = reducer.residuals()["a"]
        reducer._pipeline.feedback.scale_(0.5)
        torch.testing.assert_close(reducer.residuals()["a"], before * 0.5)


def test_presets_name_the_constants_of_the_paper() -> None:
    assert PAPER_LSTM["warmup_steps"] == 128 and PAPER_VGG["warmup_steps"] == 512 and PAPER_BERT["warmup_steps"] == 0
    assert (PAPER_LSTM["density"], PAPER_VGG["density"], PAPER_BERT["density"]) == (0.02, 0.02, 0.01)
    assert PAPER_BERT["reestimate_every"] == 128 and PAPER_LSTM["repartition_every"] == 64
    for preset in (PAPER_LSTM, PAPER_VGG, PAPER_BERT):
        with Reducer("oktopk", **preset) as reducer:
            reducer.reduce("w", torch.randn(2000))
