"""Local steps in scripts of all kinds: what people do with models, optimizers and handles."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oktopk
from oktopk.errors import CheckpointError, MismatchError, OkTopkError, UnsupportedError
from oktopk.transport import ThreadTransport, run_world
from test_local_steps import model_of, push, sgd, shared_of, weights_of

pytestmark = pytest.mark.timeout(60)
QUICK: dict[str, Any] = {"density": 0.2, "min_numel": 0}


class _Messy(nn.Module):
    """Tied weights, a frozen layer, a parameter that no forward uses, and tables that nobody writes."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.second, self.idle = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(3, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.second.weight = self.first.weight
        self.register_buffer("mask", torch.full((40, 40), -math.inf).triu(1))
        self.register_buffer("scale", torch.ones(5))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.frozen(self.first(x)).tanh())
        return out


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def test_dense_local_steps_are_averaged_gradients_with_accumulation_scheduler_tied_and_frozen_weights() -> None:
    """Plain SGD is linear in its gradients, so one process with the mean of all losses must end at the same weights."""

    def train(model: _Messy, ranks: list[int], transport: ThreadTransport | None) -> Tensor:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        handle = oktopk.local_steps(model, optimizer, algorithm="dense", group=transport) if transport else None
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(2):
                losses = [model(_batch(rank, 10 * step + micro)).square().mean() for rank in ranks]
                (sum(losses, torch.zeros(())) / len(ranks)).backward()
            optimizer.step()
            scheduler.step()
        if handle is not None:
            handle.close()
        return weights_of(model)

    world = run_world(2, lambda t: train(_Messy(), [t.rank], t))
    torch.testing.assert_close(world[0], train(_Messy(), [0, 1], None), rtol=0, atol=1e-6)
    assert torch.equal(world[0], world[1])


def test_tables_and_masks_never_travel_and_a_buffer_that_begins_to_move_is_averaged_in_the_end() -> None:
    def work(transport: ThreadTransport) -> tuple[list[int], Tensor, Tensor]:
        model = _Messy()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        sizes: list[int] = []
        with oktopk.local_steps(
            model, optimizer, group=transport, metrics=lambda r: sizes.append(r.numel), **QUICK
        ) as handle:
            for step in range(3):
                push_trained(model, optimizer, step)
            before = list(sizes)
            if transport.rank == 1:
                model.scale = model.scale * 3  # another tensor in its place, on one rank
            handle.finish()
            return before, model.scale.clone(), model.get_buffer("mask").clone()

    for sizes, scale, mask in run_world(2, work):
        assert set(sizes) == {sum(p.numel() for p in _Messy().parameters() if p.requires_grad)}
        assert torch.equal(scale, torch.full((5,), 2.0)), "the mean of 1 and 3"
        assert torch.equal(mask, _Messy().get_buffer("mask"))


def push_trained(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(_batch(0, step)).square().mean().backward()
    optimizer.step()


def test_a_buffer_that_grows_is_refused_by_name() -> None:
    def work(transport: ThreadTransport) -> str:
        model = _Messy()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        with oktopk.local_steps(model, optimizer, group=transport, **QUICK):
            model.scale = torch.ones(7)
            with pytest.raises(UnsupportedError) as caught:
                push_trained(model, optimizer, 0)
            return str(caught.value)

    assert all("buffer scale" in said and "[7]" in said for said in run_world(2, work))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_may_look_at_the_shared_weights_by_itself(dtype: torch.dtype) -> None:
    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor]:
        model = model_of(0, dtype)
        optimizer = sgd(model)
        with oktopk.local_steps(model, optimizer, group=transport, **QUICK) as handle:
            for step in range(4):
                push(model, optimizer, transport.rank, step)
                if transport.rank == 0:
                    own = weights_of(model)
                    with pytest.raises(KeyError), handle.shared():
                        assert torch.equal(weights_of(model), shared_of(handle).to(dtype)) or dtype == torch.float32
                        raise KeyError("of an evaluation")
                    assert torch.equal(own, weights_of(model))
            return shared_of(handle).clone(), weights_of(model)

    (one, _), (other, _) = run_world(2, work)
    assert torch.equal(one, other)


def test_a_handle_saved_while_the_shared_weights_are_lent_is_the_same_handle(tmp_path: Path) -> None:
    def work(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = sgd(model)
        with oktopk.local_steps(model, optimizer, group=transport, **QUICK) as handle:
            push(model, optimizer, transport.rank, 0)
            own, owed = weights_of(model), handle.owed()
            with handle.shared():
                oktopk.save(handle, tmp_path)
                assert all(torch.equal(part, owed[name]) for name, part in handle.owed().items())
                for refused in (handle.finish, handle.restart, handle.synchronize, lambda: oktopk.load(handle, "x")):
                    with pytest.raises((OkTopkError, CheckpointError)):
                        refused()
            push(model, optimizer, transport.rank, 1)
            oktopk.load(handle, tmp_path)
            assert torch.equal(weights_of(model), own)

    run_world(2, work)


@pytest.mark.parametrize("overlap", [False, True])
def test_after_a_restart_everyone_has_what_rank_0_loaded_and_nothing_else(overlap: bool) -> None:
    loaded = _Messy()
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(1.0)

    def work(transport: ThreadTransport) -> Tensor:
        model = _Messy()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        with oktopk.local_steps(model, optimizer, group=transport, overlap=overlap, **QUICK) as handle:
            for step in range(3):
                push_trained(model, optimizer, step)
            if transport.rank == 0:
                model.load_state_dict(loaded.state_dict())
            handle.restart()
            assert not any(part.any() for part in handle.owed().values())
            ended = weights_of(model)
            push_trained(model, optimizer, 3)  # and it goes on
            handle.finish()
            return ended

    assert all(torch.equal(weights, weights_of(loaded)) for weights in run_world(2, work))


class _Both:
    """A model whose halves have optimizers of their own."""

    def __init__(self, transport: ThreadTransport, **options: Any) -> None:
        self.model = model_of()
        first, second = self.model[0], self.model[2]  # type: ignore[index]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(second.parameters(), lr=0.01),
        ]  # fmt: skip
        self.handle = oktopk.local_steps(self.model, self.optimizers, group=transport, **QUICK | options)

    def train(self, rank: int, steps: range) -> Tensor:
        for step in steps:
            generator = torch.Generator().manual_seed(1000 * rank + step)
            for parameter in self.model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            for optimizer in self.optimizers:
                optimizer.step()
        return weights_of(self.model)


def test_two_optimizers_of_one_model_count_one_step_and_resume_exactly(tmp_path: Path) -> None:
    def straight(transport: ThreadTransport) -> tuple[int, Tensor, Tensor]:
        both = _Both(transport, every=2)
        both.train(transport.rank, range(3))
        oktopk.save(both.handle, tmp_path)
        weights, steps = both.train(transport.rank, range(3, 6)), both.handle.step
        both.handle.finish()
        both.handle.close()
        return steps, weights, weights_of(both.model)

    def resumed(transport: ThreadTransport) -> Tensor:
        both = _Both(transport, every=2)
        oktopk.load(both.handle, tmp_path)
        with both.handle:
            return both.train(transport.rank, range(3, 6))

    world = run_world(2, straight)
    assert [steps for steps, *_ in world] == [6, 6]
    assert torch.equal(world[0][2], world[1][2])
    for (_, weights, _), again in zip(world, run_world(2, resumed), strict=True):
        assert torch.equal(weights, again)


def test_layers_may_be_frozen_on_the_way_but_not_unfrozen() -> None:
    model = model_of()
    optimizer = sgd(model)
    model[0].requires_grad_(False)  # type: ignore[index]
    with oktopk.local_steps(model, optimizer):
        model[2].bias.requires_grad_(False)  # type: ignore[index]
        push(model, optimizer, 0, 0)
        model[0].requires_grad_(True)  # type: ignore[index]
        with pytest.raises(OkTopkError, match=r"unfrozen.*handle\.finish"):
            push(model, optimizer, 0, 1)


def test_what_cannot_be_shared_is_refused_with_what_to_do() -> None:
    model = model_of()
    optimizer = sgd(model)
    with oktopk.local_steps(model, optimizer):
        with pytest.raises(UnsupportedError, match="reduced already"):
            oktopk.local_steps(model, optimizer)
        model.bfloat16()
        with pytest.raises(OkTopkError, match=r"were torch\.float32"):
            push(model, optimizer, 0, 0)
    lazy = nn.LazyLinear(3)
    with pytest.raises(UnsupportedError, match="one batch"):
        oktopk.local_steps(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))
    sharded = nn.Linear(2, 2)
    sharded.weight.device_mesh = "of DTensor"  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="register_fsdp"):
        oktopk.local_steps(sharded, sgd(sharded))


def test_settings_that_have_no_common_text_are_compared_by_their_kind() -> None:
    def work(transport: ThreadTransport, rate: float) -> None:
        model = model_of()
        extra = {"decays": lambda name: True, "weights": torch.ones(3), "lr": torch.tensor(rate), "foreach": False}
        optimizer = torch.optim.SGD([{"params": list(model.parameters()), **extra}])
        with oktopk.local_steps(model, optimizer, group=transport, **QUICK):
            push(model, optimizer, transport.rank, 0)

    run_world(2, lambda t: work(t, 0.1))
    with pytest.raises(MismatchError, match="configuration"):
        run_world(2, lambda t: work(t, 0.1 * (1 + t.rank)))


def test_ranks_that_would_synchronise_at_different_steps_hear_so() -> None:
    def work(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = sgd(model)
        handle = oktopk.local_steps(model, optimizer, every=lambda _: 2 + transport.rank, group=transport, **QUICK)
        with handle, pytest.raises(MismatchError, match="step"):
            for step in range(3):
                push(model, optimizer, transport.rank, step)

    run_world(2, work)


def test_a_gradient_scaler_that_overflows_on_one_rank_keeps_nobody_waiting() -> None:
    def work(transport: ThreadTransport) -> tuple[int, Tensor, float]:
        model = model_of()
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0)
        with oktopk.local_steps(model, optimizer, group=transport, scaler=scaler, **QUICK) as handle:
            for step in range(4):
                optimizer.zero_grad()
                loss = model(torch.ones(2, 30)).square().mean()
                scaler.scale(loss * (math.inf if (transport.rank, step) == (1, 2) else 1.0)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            handle.finish()
            return handle.step, weights_of(model), scaler.get_scale()

    world = run_world(2, work)
    assert [steps for steps, *_ in world] == [4, 4] and [scale for *_, scale in world] == [8.0, 4.0]
    assert torch.equal(world[0][1], world[1][1]) and world[0][1].isfinite().all()


def test_copies_of_model_and_optimizer_do_not_synchronise() -> None:
    def work(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = sgd(model)
        with oktopk.local_steps(model, optimizer, group=transport, **QUICK) as handle:
            push(model, optimizer, transport.rank, 0)
            if transport.rank == 0:  # nobody else takes part
                saved = io.BytesIO()
                torch.save((model, optimizer), saved)
                saved.seek(0)
                for other, steps in (copy.deepcopy((model, optimizer)), torch.load(saved, weights_only=False)):
                    push(other, steps, 0, 1)
            assert handle.step == 1

    run_world(2, work)


def test_twenty_models_in_one_process_each_end_equal_on_all_ranks() -> None:
    def work(transport: ThreadTransport) -> list[Tensor]:
        models = [model_of(seed) for seed in range(20)]
        pairs = [(model, sgd(model)) for model in models]
        handles = [oktopk.local_steps(*pair, group=transport, **QUICK) for pair in pairs]
        for step in range(2):
            for model, optimizer in pairs:
                push(model, optimizer, transport.rank, step)
        for handle in handles:
            handle.finish()
            handle.close()
        return [weights_of(model) for model in models]

    world = run_world(2, work)
    assert all(torch.equal(one, other) for one, other in zip(*world, strict=True))
    assert not torch.equal(world[0][0], world[0][1])


def test_each_rank_of_a_distributed_checkpoint_resumes_its_own_state() -> None:
    def work(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with oktopk.local_steps(model, optimizer, every=2, group=transport, **QUICK) as handle:
            for step in range(3):
                push(model, optimizer, transport.rank, step)
            target = oktopk.RankState(handle)
            saved = target.state_dict()
            push(model, optimizer, transport.rank, 3)
            after = weights_of(model)
            push(model, optimizer, transport.rank, 4)
            target.load_state_dict(saved)
            push(model, optimizer, transport.rank, 3)
            assert torch.equal(weights_of(model), after)

    run_world(2, work)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3)])
def test_another_world_loads_a_distributed_checkpoint_as_it_loads_ours(before: int, after: int, tmp_path: Path) -> None:
    def save(transport: ThreadTransport) -> dict[str, Any]:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with oktopk.local_steps(model, optimizer, group=transport, **QUICK) as handle:
            for step in range(3):
                push(model, optimizer, transport.rank, step)
            oktopk.save(handle, tmp_path)
            return oktopk.RankState(handle).state_dict()

    saved: dict[str, Any] = {}
    for state in run_world(before, save):
        saved |= state

    def load(transport: ThreadTransport, distributed: bool) -> tuple[Tensor, Tensor]:
        model = model_of(7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with oktopk.local_steps(model, optimizer, group=transport, **QUICK) as handle:
            if distributed:
                target = oktopk.RankState(handle, saved_by=before)
                assert target.state_dict().keys() == saved.keys(), "DCP loads what it is asked for"
                target.load_state_dict(saved)
            else:
                oktopk.load(handle, tmp_path)
            push(model, optimizer, transport.rank, 3)
            return weights_of(model), shared_of(handle).clone()

    ours, theirs = (run_world(after, lambda t, d=way: load(t, d)) for way in (False, True))
    for (own, shared), (own_of_dcp, shared_of_dcp) in zip(ours, theirs, strict=True):
        assert torch.equal(own, own_of_dcp) and torch.equal(shared, shared_of_dcp)


def test_an_unchanged_default_of_each_algorithm_is_what_is_sent() -> None:
    for algorithm, density, wire in (
        ("randomk", 0.3, "codebook2"), ("oktopk", 0.05, "int8"), ("dense", 1.0, "float32"),
    ):  # fmt: skip
        model = model_of()
        with oktopk.local_steps(model, sgd(model), algorithm=algorithm) as handle:
            assert (handle.reducer.config.density, handle.reducer.config.wire) == (density, wire)
