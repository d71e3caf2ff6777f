"""Reductions of updates that travel while training goes on: bad steps, and what ranks learn when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk.errors import NonFiniteError
from oktopk.transport import ThreadTransport, run_world
from test_local_steps import model_of, push, sgd, weights_of


@pytest.mark.parametrize(
    ("overlap", "told", "moved"),
    [(False, [0, 15, 15, 15], [None, 1, None, 3]), (True, [0, 0, 0, 15], [None, None, None, 1])],
)
def test_what_ranks_learn_of_a_reduction_they_learn_in_the_same_step(
    overlap: bool, told: list[int], moved: list[int | None]
) -> None:
    """With overlap in the step that applies it, however early it has arrived on some."""

    def work(transport: ThreadTransport) -> tuple[list[int], list[int | None]]:
        model = model_of()
        optimizer, options = sgd(model), {"every": 2, "overlap": overlap, "group": transport, "min_numel": 0}
        with oktopk.local_steps(model, optimizer, **options) as handle:  # type: ignore[arg-type]
            notified, completed = [], []
            for step in range(4):
                handle.reducer.notify(15 if transport.rank == 1 and step > 0 else 0)
                push(model, optimizer, transport.rank, step)
                if transport.rank == 0:
                    handle.wait()
                notified.append(handle.notified)
                completed.append(handle.completed.step if handle.completed is not None else None)
        return notified, completed

    assert run_world(2, work) == [(told, moved)] * 2


def spoil(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """A step on finite gradients, after which half of the weights of rank 1 are not."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
            parameter.grad.view(-1)[::2] = torch.finfo(parameter.dtype).max if rank == 1 else 0.01
    optimizer.param_groups[0]["lr"], rate = 100.0, optimizer.param_groups[0]["lr"]
    optimizer.step()
    optimizer.param_groups[0]["lr"] = rate


KINDS = [(torch.float32, 0), (torch.float32, 10**6), (torch.float16, 0)]


@pytest.mark.parametrize(("dtype", "min_numel"), KINDS, ids=["sparse", "dense", "16 bits"])
@pytest.mark.parametrize("arrives", ["before the next step", "whenever"])
def test_a_rank_whose_step_was_bad_rests_though_a_reduction_travels(
    dtype: torch.dtype, min_numel: int, arrives: str
) -> None:
    def work(transport: ThreadTransport) -> Tensor:
        model = model_of(dtype=dtype)
        optimizer = sgd(model)
        options: Any = {"min_numel": min_numel, "group": transport, "on_nonfinite": "skip", "overlap": True}
        with oktopk.local_steps(model, optimizer, **options) as handle:
            for step in range(8):
                if step == 3:
                    spoil(model, optimizer, transport.rank)
                else:
                    push(model, optimizer, transport.rank, step)
                if arrives != "whenever":
                    handle.wait()
                assert weights_of(model).isfinite().all()
            handle.finish()
            assert not any(part.any() for part in handle.owed().values())
            return weights_of(model)

    one, other = run_world(2, work)
    assert torch.equal(one, other) and one.isfinite().all()


@pytest.mark.parametrize(("dtype", "min_numel"), KINDS, ids=["sparse", "dense", "16 bits"])
def test_a_bad_step_is_everyones_error_though_a_reduction_travels(dtype: torch.dtype, min_numel: int) -> None:
    def work(transport: ThreadTransport) -> str:
        model = model_of(dtype=dtype)
        optimizer = sgd(model)
        options: Any = {"min_numel": min_numel, "group": transport, "overlap": True}
        with oktopk.local_steps(model, optimizer, **options) as handle, pytest.raises(NonFiniteError) as caught:
            push(model, optimizer, transport.rank, 0)
            spoil(model, optimizer, transport.rank)
            handle.finish()
        return str(caught.value)

    assert all("rank 1" in message for message in run_world(2, work))


@pytest.mark.parametrize(("overlap", "keep_owed"), [(False, 1.0), (False, 0.25), (True, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_end_with_the_same_weights_though_the_last_step_was_bad(
    dtype: torch.dtype, overlap: bool, keep_owed: float
) -> None:
    """Nobody has synchronised since."""

    def work(transport: ThreadTransport) -> Tensor:
        model = model_of(dtype=dtype)
        optimizer = sgd(model)
        options: Any = {"every": 4, "min_numel": 0, "group": transport, "on_nonfinite": "skip"}
        with oktopk.local_steps(model, optimizer, overlap=overlap, keep_owed=keep_owed, **options) as handle:
            for step in range(5):
                push(model, optimizer, transport.rank, step)
            spoil(model, optimizer, transport.rank)
            handle.finish()
            return weights_of(model)

    one, other = run_world(2, work)
    assert torch.equal(one, other) and one.isfinite().all()
