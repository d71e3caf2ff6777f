"""Updates instead of gradients: conservation, equal bits, exact resume, and what is refused."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oktopk
from oktopk.algorithms import ALGORITHMS
from oktopk.config import WIRES
from oktopk.errors import ConfigError, MismatchError, NonFiniteError, OkTopkError, UnsupportedError
from oktopk.front_ends.advice import advise_at_first_step
from oktopk.front_ends.every import Measured
from oktopk.transport import ThreadTransport, run_world

RATE = 0.1


_one_at_a_time = threading.Lock()  # ranks are threads, and torch has one generator


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    with _one_at_a_time:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 7)).to(dtype)


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def shared_of(handle: oktopk.LocalSteps) -> Tensor:
    """The shared weights themselves, in their own precision."""
    weights = handle._weights
    return weights.updates.shared(weights.trained[0].own().layout)


def push(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, scale: float = 1.0) -> Tensor:
    """One step on gradients that are made up; returns them. With plain SGD the change is the rate times them."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    grads = []
    for parameter in model.parameters():
        grad = scale * torch.randn(parameter.shape, generator=generator)
        parameter.grad = grad.to(parameter.dtype)
        grads.append(grad.flatten())
    optimizer.step()
    return torch.cat(grads)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def run(
    transport: ThreadTransport, steps: int = 5, finish: bool = False, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shared weights at the start and at the end, what is owed, and the sum of own changes."""
    model = model_of(transport.rank, dtype)  # different on every rank: rank 0's are taken
    optimizer = sgd(model)
    options = {"density": 0.1, "min_numel": 0, "wire": "float32", **options}
    with oktopk.local_steps(model, optimizer, group=transport, **options) as handle:
        start = weights_of(model).double()
        changes = torch.zeros_like(start)
        for step in range(steps):
            changes += RATE * push(model, optimizer, transport.rank, step)
        if finish:
            handle.finish()
        with handle.shared():
            shared = weights_of(model).double()
        owed = torch.cat([part.double() for part in handle.owed().values()])
        return start, shared, owed, changes


PAIRS = [
    *((algorithm, "float32") for algorithm in ALGORITHMS),
    *(("oktopk", wire) for wire in WIRES),
    ("randomk", "int4"),
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("algorithm", "wire"), PAIRS)
def test_what_ranks_changed_is_in_the_shared_weights_or_still_owed(algorithm: str, wire: str, overlap: bool) -> None:
    for world_size in (2, 3):
        # With overlap the last reduction is still under way: what it sent is in neither until it is finished.
        world = run_world(world_size, lambda t: run(t, 5, overlap, algorithm=algorithm, wire=wire, overlap=overlap))
        accounted = world_size * (world[0][0] - world[0][1]) + sum(owed for _, _, owed, _ in world)
        # Weights of a size of 0.2 in float32, moved five times.
        changed = sum(changes for *_, changes in world)
        torch.testing.assert_close(accounted, changed, rtol=0, atol=2e-6 * world_size)
        assert all(torch.equal(shared, world[0][1]) for _, shared, _, _ in world), "equal bits on all ranks"


@pytest.mark.parametrize("wire", WIRES)
def test_every_algorithm_conserves_over_every_wire(wire: str) -> None:
    for algorithm in (name for name in ALGORITHMS if (name, wire) not in PAIRS):
        world = run_world(2, lambda t, name=algorithm: run(t, 3, algorithm=name, wire=wire))  # type: ignore[misc]
        accounted = 2 * (world[0][0] - world[0][1]) + world[0][2] + world[1][2]
        torch.testing.assert_close(accounted, world[0][3] + world[1][3], rtol=0, atol=4e-6)
        assert torch.equal(world[0][1], world[1][1]), algorithm


@pytest.mark.parametrize("every", [1, 3, lambda step: 2 if step < 4 else 1])
def test_finishing_leaves_everyone_with_the_mean_of_all_changes(every: Any) -> None:
    world = run_world(3, lambda t: run(t, steps=7, finish=True, every=every, wire="int8"))
    expected = world[0][0] - sum(changes for *_, changes in world) / 3
    for _, shared, owed, _ in world:
        torch.testing.assert_close(shared, expected, rtol=0, atol=2e-6)
        assert torch.equal(shared, world[0][1]) and not owed.any()


@pytest.mark.parametrize("algorithm", ["topka", "randomk", "oktopk"])
def test_ranks_that_rest_pay_what_they_owe_and_meet_in_the_shared_weights(algorithm: str) -> None:
    """What a rank sent has left it: nothing is sent twice, and what the others sent is in its own weights."""

    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor]:
        model = model_of()
        optimizer = sgd(model)
        options: Any = {"algorithm": algorithm, "density": 0.2, "min_numel": 0, "wire": "float32", "group": transport}
        with oktopk.local_steps(model, optimizer, **options) as handle:
            for step in range(43):
                optimizer.param_groups[0]["lr"] = RATE if step < 3 else 0.0
                push(model, optimizer, transport.rank, step)
            own = weights_of(model)
            with handle.shared():
                return own, weights_of(model)

    world = run_world(3, work)
    for own, shared in world:
        torch.testing.assert_close(own, shared, rtol=0, atol=1e-6)  # weights of 0.2, moved a few times
        assert torch.equal(shared, world[0][1])


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("make", [sgd, _adam])
def test_alone_training_is_bit_for_bit_what_it_was(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    plain, ours = model_of(), model_of()
    with oktopk.local_steps(ours, optimizer := make(ours), density=0.1, min_numel=0) as handle:
        reference = make(plain)
        for step in range(5):
            push(plain, reference, 0, step)
            push(ours, optimizer, 0, step)
        assert torch.equal(weights_of(plain), weights_of(ours))
        with handle.shared():
            assert torch.equal(weights_of(plain), weights_of(ours))


def test_dense_at_every_step_with_plain_sgd_is_averaging_gradients() -> None:
    world = run_world(2, lambda t: run(t, algorithm="dense"))
    expected = world[0][0] - (world[0][3] + world[1][3]) / 2
    torch.testing.assert_close(world[0][1], expected, rtol=0, atol=1e-6)
    assert not world[0][2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overlap", [False, True])
def test_short_weights_keep_what_is_owed_in_float32(dtype: torch.dtype, overlap: bool) -> None:
    """The change of a rank is what its own short weights moved by, which is known exactly."""

    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor, Tensor]:
        model = model_of(0, dtype)
        optimizer = sgd(model)
        options: Any = {"density": 0.1, "min_numel": 0, "group": transport, "overlap": overlap}
        with oktopk.local_steps(model, optimizer, **options) as handle:
            start = weights_of(model).double()
            own = _OwnChanges(handle, optimizer, model)
            for step in range(6):
                push(model, optimizer, transport.rank, step)
            moved = own.total
            handle.finish()
            return start, shared_of(handle).double(), moved

    world = run_world(2, work)
    expected = world[0][0] - (world[0][2] + world[1][2]) / 2
    torch.testing.assert_close(world[0][1], expected, rtol=0, atol=2e-6)
    assert torch.equal(world[0][1], world[1][1])


class _OwnChanges:
    """What an optimizer itself changes, before the synchronisation that follows in the same call."""

    def __init__(self, handle: oktopk.LocalSteps, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.total, synchronize = torch.zeros(1527).double(), handle._synchronize
        optimizer.register_step_pre_hook(lambda *_: self.remember(model))

        def watched() -> None:
            self.total += self.before - weights_of(model).double()
            synchronize()

        handle._synchronize = watched  # type: ignore[method-assign]

    def remember(self, model: nn.Module) -> None:
        self.before = weights_of(model).double()


class _WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.parametrize("overlap", [False, True])
def test_buffers_are_averaged_at_synchronisation(overlap: bool) -> None:
    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor]:
        model = _WithNorm()
        optimizer = sgd(model)
        options: Any = {"density": 0.5, "min_numel": 0, "group": transport, "overlap": overlap}
        with oktopk.local_steps(model, optimizer, **options) as handle:
            torch.manual_seed(transport.rank)
            model(torch.randn(8, 6) + transport.rank).sum().backward()
            mine = model.layers[1].running_mean.clone()
            optimizer.step()
            handle.finish()
            return mine, model.layers[1].running_mean.clone()

    world = run_world(2, work)
    mean = (world[0][0] + world[1][0]) / 2
    assert not torch.equal(world[0][0], world[1][0])
    for _, shared in world:
        torch.testing.assert_close(shared, mean)
    assert torch.equal(world[0][1], world[1][1])


def test_a_forward_in_training_mode_leaves_the_shared_buffers_alone_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(transport: ThreadTransport) -> Tensor:
        model = _WithNorm()
        optimizer = sgd(model)
        with oktopk.local_steps(model, optimizer, density=0.5, min_numel=0, group=transport) as handle:
            for _ in range(2):
                model(torch.ones(8, 6) * torch.arange(8)[:, None] * (1 + transport.rank)).sum().backward()
                optimizer.step()
                with handle.shared():
                    before = model.layers[1].running_mean.clone()
                    model(torch.arange(48.0).view(8, 6) + transport.rank)
                with handle.shared():
                    assert torch.equal(model.layers[1].running_mean, before)
            handle.finish()
            return model.layers[1].running_mean.clone()

    one, other = run_world(2, work)
    assert torch.equal(one, other)
    assert "written inside handle.shared()" in caplog.text and "model.eval()" in caplog.text


def test_ranks_that_step_differently_are_refused_before_data_moves() -> None:
    def work(transport: ThreadTransport) -> str:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + transport.rank))
        with oktopk.local_steps(model, optimizer, group=transport) as handle:
            before = shared_of(handle).clone()
            with pytest.raises(MismatchError) as caught:
                push(model, optimizer, transport.rank, 0)
            assert torch.equal(before, shared_of(handle))
            return str(caught.value)

    assert all("configuration" in message for message in run_world(2, work))


def test_a_bad_step_is_everyones_error_or_this_ranks_rest() -> None:
    def work(transport: ThreadTransport, policy: str) -> tuple[str, Tensor]:
        model = model_of()
        optimizer = sgd(model)
        options: Any = {"on_nonfinite": policy, "group": transport, "min_numel": 0}
        with oktopk.local_steps(model, optimizer, **options) as handle:
            push(model, optimizer, transport.rank, 0)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, math.nan if transport.rank == 1 else 1.0)
            try:
                optimizer.step()
                message = ""
            except NonFiniteError as error:
                message = str(error)
            if policy == "skip":
                push(model, optimizer, transport.rank, 1)
                handle.finish()
            return message, weights_of(model)

    assert all("rank 1" in message for message, _ in run_world(2, lambda t: work(t, "raise")))
    world = run_world(2, lambda t: work(t, "skip"))
    assert torch.equal(world[0][1], world[1][1]) and world[0][1].isfinite().all()


class _Scaler:
    """As GradScaler steps: not at all when this rank's gradients overflowed."""

    def __init__(self, skips: bool) -> None:
        self.skips = skips

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.skips:
            optimizer.step()


@pytest.mark.timeout(30)
def test_a_scaler_that_skips_on_one_rank_keeps_nobody_waiting() -> None:
    def work(transport: ThreadTransport) -> tuple[int, Tensor]:
        model = model_of()
        optimizer, scaler = sgd(model), _Scaler(False)
        with oktopk.local_steps(model, optimizer, group=transport, scaler=scaler, min_numel=0) as handle:
            push(model, optimizer, transport.rank, 0)
            scaler.skips = transport.rank == 1
            scaler.step(optimizer)
            scaler.skips = False
            scaler.step(optimizer)
            handle.finish()
            return handle.step, weights_of(model)

    world = run_world(2, work)
    assert [step for step, _ in world] == [3, 3]
    assert torch.equal(world[0][1], world[1][1])


def test_what_cannot_work_is_refused_with_what_to_do() -> None:
    model, other = model_of(), model_of(1)
    with pytest.raises(ConfigError, match="not the model's"):
        oktopk.local_steps(model, sgd(other))
    with pytest.raises(ConfigError, match=r"does not have '0\.weight'"):
        oktopk.local_steps(model, torch.optim.SGD(model[2].parameters(), lr=0.1))  # type: ignore[index]
    with pytest.raises(ConfigError, match="every must be"):
        oktopk.local_steps(model, sgd(model), every="often")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="every must be 1 or more"):
        oktopk.local_steps(model, sgd(model), every=0)
    with pytest.raises(UnsupportedError, match="complex64"):
        complex_model = nn.Linear(2, 2, dtype=torch.complex64)
        oktopk.local_steps(complex_model, sgd(complex_model))
    with pytest.raises(UnsupportedError, match="the optimizer it wraps"):
        wrapped = oktopk.DistributedOptimizer(sgd(model), model)
        try:
            oktopk.local_steps(model, wrapped)
        finally:
            wrapped.reducer.close()


def test_weights_that_somebody_else_changed_are_noticed() -> None:
    model = model_of()
    with oktopk.local_steps(model, optimizer := sgd(model)) as handle:
        push(model, optimizer, 0, 0)
        model.load_state_dict(model_of(5).state_dict())
        with pytest.raises(OkTopkError, match=r"handle\.restart"):
            push(model, optimizer, 0, 1)
        handle.restart()
        push(model, optimizer, 0, 1)
        with handle.shared(), pytest.raises(OkTopkError, match=r"inside handle\.shared"):
            push(model, optimizer, 0, 2)
        extra = nn.Parameter(torch.zeros(3))
        optimizer.add_param_group({"params": [extra]})
        with pytest.raises(OkTopkError, match="parameter group was added"):
            push(model, optimizer, 0, 2)


def _load(model: nn.Module, handle: oktopk.LocalSteps) -> None:
    model.load_state_dict(model_of(5).state_dict())


def _load_inside(model: nn.Module, handle: oktopk.LocalSteps) -> None:
    """Over the shared weights, which lie in the model there."""
    with handle.shared():
        _load(model, handle)


def _put_elsewhere(model: nn.Module, handle: oktopk.LocalSteps) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _turn_round(model: nn.Module, handle: oktopk.LocalSteps) -> None:
    """Another memory format: the same entries in another order."""
    first = next(model.parameters())
    first.data = first.data.t().contiguous().t()


@pytest.mark.parametrize("change", [_load, _load_inside, _put_elsewhere, _turn_round])
@pytest.mark.parametrize("then", ["step", "synchronize", "finish", "shared"])
def test_whoever_changes_weights_is_noticed_before_they_are_used(change: Any, then: str) -> None:
    def work(transport: ThreadTransport) -> Tensor:
        model = model_of()
        optimizer = sgd(model)
        with oktopk.local_steps(model, optimizer, every=4, min_numel=0, group=transport) as handle:
            push(model, optimizer, transport.rank, 0)
            with handle.shared():
                weights_of(model)  # who only looks changes nothing
            change(model, handle)
            with pytest.raises(OkTopkError, match=r"handle\.restart"):
                if then == "step":
                    push(model, optimizer, transport.rank, 1)
                elif then == "shared":
                    with handle.shared():
                        pass
                else:
                    getattr(handle, then)()
            handle.restart()
            push(model, optimizer, transport.rank, 2)
            handle.finish()
            return weights_of(model)

    first, second = run_world(2, work)
    assert torch.equal(first, second)


def test_after_close_the_optimizer_steps_alone() -> None:
    def work(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = sgd(model)
        handle = oktopk.local_steps(model, optimizer, group=transport)
        push(model, optimizer, transport.rank, 0)
        handle.close()
        handle.close()
        if transport.rank == 0:  # nobody else takes part
            push(model, optimizer, 0, 1)

    run_world(2, work)


def test_auto_synchronises_as_rarely_as_a_tenth_of_the_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(transport: ThreadTransport) -> list[int]:
        with oktopk.Reducer(group=transport) as reducer:
            every = Measured(reducer)
            chosen = []
            for _ in range(8):
                chosen.append(every.steps(0))
                every.observe(0.05 * (1 + transport.rank), 0.02)
            return chosen

    world = run_world(2, work)
    assert world[0] == world[1] and world[0][0] == 1
    assert world[0][-1] == 50, "0.1 s of the slower rank are a tenth of 50 steps of 20 ms"


def test_auto_times_as_many_synchronisations_each_time_and_anew_when_resumed() -> None:
    with oktopk.Reducer() as reducer:
        every = Measured(reducer)
        for _ in range(3):
            every.observe(0.1, 0.02)
        resumed = Measured(reducer)
        resumed.load_state_dict(every.state_dict())
        for one, more in ((every, 3), (resumed, 6)):
            for _ in range(more):
                assert one.now == 1
                one.observe(0.1, 0.02)
            assert (one.now, one.synchronisations, one._seconds) == (50, 6, [])
        for _ in range(100):  # the first of a round warms up
            every.observe(9.0 if every.synchronisations == 100 else 0.2, 0.02)
        assert (every.now, every.synchronisations, every._seconds) == (64, 106, [])


def test_auto_waits_until_a_reduction_beside_training_has_arrived() -> None:
    def work(transport: ThreadTransport) -> int:
        with oktopk.Reducer(group=transport) as reducer:
            every = Measured(reducer)
            for _ in range(8):
                every.observe(0.001, 0.02, 0.05 * (1 + transport.rank))
            return every.steps(0)

    assert run_world(2, work) == [5, 5], "100 ms of the slower rank hide behind 5 steps of 20 ms"


def test_with_overlap_auto_counts_what_training_does_not_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduction that takes 60 ms beside steps of next to nothing: its time is seen, though not as synchronising."""
    seen: list[tuple[float, float]] = []
    monkeypatch.setattr(Measured, "observe", lambda _, cost, computing, travel=0.0: seen.append((cost, travel)))

    def work(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = sgd(model)
        options: Any = {"every": "auto", "overlap": True, "group": transport, "min_numel": 0}
        with oktopk.local_steps(model, optimizer, **options) as handle:
            pipeline = handle.reducer._pipeline
            reduce_ = pipeline.reduce_
            pipeline.reduce_ = lambda *args: (time.sleep(0.06), reduce_(*args))[1]  # type: ignore[method-assign]
            for step in range(4):
                push(model, optimizer, transport.rank, step)
            handle.finish()

    run_world(2, work)
    assert sorted(travel > 0.05 for _, travel in seen) == [False] * 2 + [True] * 6, "nothing travels before the first"
    assert sorted(cost for cost, _ in seen)[3] < 0.05


def _trained(transport: ThreadTransport, folder: Any, save_at: int, steps: int, load: bool, **options: Any) -> Any:
    """Train, saving at a step; or load and train the rest. Own and shared weights and the optimizer's state."""
    model = model_of()
    optimizer = _adam(model)
    options = {"density": 0.1, "min_numel": 0, "group": transport, "every": 3, **options}
    with oktopk.local_steps(model, optimizer, **options) as handle:
        if load:
            oktopk.load(handle, folder)
        for step in range(handle.step, steps):
            push(model, optimizer, transport.rank, step)
            if step + 1 == save_at and not load:
                oktopk.save(handle, folder)
        own = weights_of(model)
        with handle.shared():
            shared = weights_of(model)
        moments = [entry["exp_avg_sq"].clone() for entry in optimizer.state.values()]
        return own, shared, moments


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("save_at", [4, 6])
def test_a_resumed_training_equals_one_that_was_not_interrupted(tmp_path: Any, overlap: bool, save_at: int) -> None:
    """Also in the middle of an interval, and with a reduction under way."""
    straight = run_world(2, lambda t: _trained(t, tmp_path, save_at, 11, False, overlap=overlap))
    resumed = run_world(2, lambda t: _trained(t, tmp_path, save_at, 11, True, overlap=overlap))
    for (own, shared, moments), (own_again, shared_again, moments_again) in zip(straight, resumed, strict=True):
        assert torch.equal(own, own_again) and torch.equal(shared, shared_again)
        assert all(torch.equal(a, b) for a, b in zip(moments, moments_again, strict=True))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3)])
def test_another_world_owes_what_is_left_to_owe(tmp_path: Any, before: int, after: int, overlap: bool) -> None:
    """All weights end where they would have: at the shared weights minus the mean of what was owed."""

    def save(transport: ThreadTransport) -> Tensor:
        model = model_of()
        optimizer = _adam(model)
        options: Any = {"density": 0.1, "min_numel": 0, "group": transport, "overlap": overlap}
        with oktopk.local_steps(model, optimizer, **options) as handle:
            for step in range(5):
                push(model, optimizer, transport.rank, step)
            oktopk.save(handle, tmp_path)
            handle.finish()
            return weights_of(model)

    def load(transport: ThreadTransport) -> tuple[Tensor, int]:
        model = model_of(7)
        optimizer = _adam(model)
        options: Any = {"density": 0.1, "min_numel": 0, "group": transport, "overlap": overlap}
        with oktopk.local_steps(model, optimizer, **options) as handle:
            oktopk.load(handle, tmp_path)
            handle.finish()
            return weights_of(model), len(optimizer.state)

    expected = run_world(before, save)[0]
    for weights, states in run_world(after, load):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
        assert states == 4, "every rank has an optimizer state"


def test_the_shared_weights_are_saved_once(tmp_path: Any) -> None:
    run_world(2, lambda t: _trained(t, tmp_path, 4, 4, False))
    sizes = sorted(path.stat().st_size for path in tmp_path.glob("rank-*"))
    assert sizes[1] - sizes[0] > 0.8 * 4 * 1527


@pytest.mark.parametrize(("algorithm", "said"), [("oktopk", 1), ("dense", 0)])
def test_sparse_gradients_under_adam_are_advised_against_once(
    algorithm: str, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of()
    with oktopk.DistributedOptimizer(_adam(model), model, algorithm):
        pass
    with oktopk.DistributedOptimizer(sgd(model), model, algorithm):
        pass
    assert caplog.text.count("oktopk.local_steps") == said


def test_the_advice_waits_for_the_optimizer_that_steps_the_model(caplog: pytest.LogCaptureFixture) -> None:
    model, other = model_of(), model_of(1)
    handle = advise_at_first_step(model.parameters())
    push(other, _adam(other), 0, 0)
    assert not caplog.text
    optimizer = _adam(model)
    for step in range(3):
        push(model, optimizer, 0, step)
    handle.remove()
    assert caplog.text.count("oktopk.local_steps") == 1


def test_two_models_that_wait_for_advice_are_both_stepped(caplog: pytest.LogCaptureFixture) -> None:
    """torch walks through all such hooks at every step: one that removed itself would end the walk with an error."""
    models = model_of(), model_of(1)
    handles = [advise_at_first_step(model.parameters()) for model in models]
    for model in models:
        push(model, _adam(model), 0, 0)
    for handle in handles:
        handle.remove()
    assert caplog.text.count("oktopk.local_steps") == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_weights_do_not_drift_over_ten_thousand_steps(dtype: torch.dtype) -> None:
    """Shared weights are what the exact sum of all changes makes them, however often own weights were rounded."""

    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor, Tensor]:
        model = model_of(0, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        options: Any = {"density": 0.05, "min_numel": 0, "group": transport}
        with oktopk.local_steps(model, optimizer, **options) as handle:
            start, own = weights_of(model).double(), _OwnChanges(handle, optimizer, model)
            for step in range(10_000):
                push(model, optimizer, transport.rank, step)
            moved = own.total
            handle.finish()
            return start, shared_of(handle).double(), moved

    world = run_world(2, work)
    expected = world[0][0] - (world[0][2] + world[1][2]) / 2
    # float32 shared weights of a size of 1, moved about 500 times each: errors of 6e-8 add up like a random walk.
    torch.testing.assert_close(world[0][1], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("odd", [{"overlap": True}, {"every": "auto"}])
def test_ranks_that_synchronise_in_another_way_are_refused_before_data_moves(odd: dict[str, Any]) -> None:
    def work(transport: ThreadTransport) -> bool:
        model = model_of()
        optimizer = sgd(model)
        options: Any = odd if transport.rank else {}
        with oktopk.local_steps(model, optimizer, 0.1, group=transport, hosts=None, **options) as handle:
            before = shared_of(handle).clone()
            with pytest.raises(MismatchError, match="configuration"):
                for step in range(2):  # with overlap the next step has the error
                    push(model, optimizer, transport.rank, step)
            return torch.equal(shared_of(handle), before)

    assert all(run_world(2, work))
