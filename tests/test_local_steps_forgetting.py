"""Own weights that forget what is owed, or most of it: nothing is lost, and resuming is exact."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oktopk
from oktopk.algorithms import ALGORITHMS
from oktopk.bench.rivals import Ablation
from oktopk.cli import main
from oktopk.config import KEPT_RARELY
from oktopk.errors import ConfigError, MismatchError, OkTopkError
from oktopk.training.config import TrainConfig
from oktopk.transport import ThreadTransport, run_world
from oktopk.workloads.base import Recipe
from oktopk.workloads.lamb import Lamb
from test_local_steps import _adam, _OwnChanges, _trained, _WithNorm, model_of, push, run, sgd, shared_of, weights_of
from test_local_steps_hosts import check_equal_inside
from test_local_steps_hosts import run as run_on_hosts


@pytest.mark.parametrize("wire", ["float32", "codebook2"])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_what_ranks_changed_is_in_the_shared_weights_or_still_owed(algorithm: str, wire: str) -> None:
    # Five steps: in the second world the last is not synchronised yet.
    for world_size, every, kept in ((2, 1, 0.0), (3, 2, 0.0), (2, 2, 0.25), (3, 1, 0.1)):
        options: Any = {"algorithm": algorithm, "wire": wire, "keep_owed": kept, "every": every}
        world = run_world(world_size, lambda t, options=options: run(t, 5, **options))  # type: ignore[misc]
        accounted = world_size * (world[0][0] - world[0][1]) + sum(owed for _, _, owed, _ in world)
        changed = sum(changes for *_, changes in world)
        torch.testing.assert_close(accounted, changed, rtol=0, atol=2e-6 * world_size)  # weights of 0.2, moved often
        assert all(torch.equal(shared, world[0][1]) for _, shared, _, _ in world), "equal bits on all ranks"


@pytest.mark.parametrize(("shape", "kept"), [((2, 2), 0.0), ((2, 3), 0.0), ((2, 2), 0.3)])
def test_hosts_lose_nothing_either(shape: tuple[int, int], kept: float) -> None:
    count, per_host = shape
    options: Any = {"algorithm": "topka", "keep_owed": kept, "every": 2}
    world = run_world(count * per_host, lambda t: run_on_hosts(t, per_host, **options))
    check_equal_inside(world, per_host)
    accounted = count * (world[0].start - world[0].shared) + sum(seen.owed for seen in world[::per_host])
    changed = sum(seen.changes for seen in world) / per_host
    torch.testing.assert_close(accounted, changed, rtol=0, atol=2e-6 * count)  # weights of 0.2, moved five times


def test_ranks_start_every_interval_from_the_same_weights() -> None:
    def work(transport: ThreadTransport) -> list[Tensor]:
        model = model_of()
        optimizer = _adam(model)
        seen = []
        with oktopk.local_steps(model, optimizer, every=4, keep_owed=0, min_numel=0, group=transport) as handle:
            for step in range(12):
                push(model, optimizer, transport.rank, step)
                seen.append(weights_of(model))
            assert any(owed.any() for owed in handle.owed().values())
            assert torch.equal(seen[-1], shared_of(handle))
        return seen

    first, second = run_world(2, work)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [False, False, False, True] * 3


def test_ranks_that_keep_a_share_start_from_the_shared_weights_less_that() -> None:
    def work(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = _adam(model)
        with oktopk.local_steps(model, optimizer, every=4, keep_owed=0.25, min_numel=0, group=transport) as handle:
            for step in range(8):
                push(model, optimizer, transport.rank, step)
            expected = shared_of(handle).double() - 0.25 * owed_of(handle)
            assert owed_of(handle).any()
            torch.testing.assert_close(weights_of(model).double(), expected, rtol=0, atol=1e-6)
            before, owed = handle.reducer.last_step, owed_of(handle)
            handle.finish()  # right after a synchronisation: nothing travels
            assert handle.reducer.last_step == before and torch.equal(weights_of(model), shared_of(handle))
            torch.testing.assert_close(owed_of(handle), owed, rtol=0, atol=1e-6)

    run_world(2, work)


def owed_of(handle: oktopk.LocalSteps) -> Tensor:
    return torch.cat([part.double() for part in handle.owed().values()])


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finishing_averages_own_weights_and_leaves_owed_what_they_forgot(dtype: torch.dtype, every: int) -> None:
    """Six steps: with every=4 the last two are averaged; with every=1 nothing is left to average, and nothing moves."""

    def work(transport: ThreadTransport) -> tuple[Tensor, ...]:
        model = model_of(0, dtype)
        optimizer = sgd(model)
        options: Any = {"density": 0.1, "min_numel": 0, "group": transport, "keep_owed": 0, "every": every}
        with oktopk.local_steps(model, optimizer, **options) as handle:
            start = weights_of(model).double()
            own = _OwnChanges(handle, optimizer, model)
            for step in range(6):
                push(model, optimizer, transport.rank, step)
            mine, synchronisations = weights_of(model).double(), handle.reducer.last_step
            handle.finish()
            assert (handle.reducer.last_step == synchronisations) == (every == 1)
            return start, mine, weights_of(model).double(), shared_of(handle).double(), owed_of(handle), own.total

    world = run_world(2, work)
    start, _, ended, shared, *_ = world[0]
    rounding = 2e-6 if dtype == torch.float32 else 4e-3  # weights of up to 0.5
    torch.testing.assert_close(ended, (world[0][1] + world[1][1]) / 2, rtol=0, atol=rounding)
    assert torch.equal(ended, world[1][2]) and torch.equal(shared, world[1][3])
    if every == 1:  # what steps changed is known to the last bit
        accounted = 2 * (start - shared) + world[0][4] + world[1][4]
        torch.testing.assert_close(accounted, world[0][5] + world[1][5], rtol=0, atol=4e-6)
    assert all(owed.any() for *_, owed, _ in world)


def test_buffers_are_equal_in_the_end_though_weights_are_already() -> None:
    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor]:
        model = _WithNorm()
        optimizer = _adam(model)
        with oktopk.local_steps(model, optimizer, group=transport, every=4, min_numel=0) as handle:
            for step in range(4):
                optimizer.zero_grad()
                data = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + transport.rank))
                model(data).square().mean().backward()
                optimizer.step()
            model(torch.ones(8, 6) * transport.rank)  # a buffer moves, and no step follows
            handle.finish()
            mean = model.layers[1].running_mean
            assert isinstance(mean, Tensor)
            return mean.clone(), weights_of(model)

    (mean, weights), (other, others) = run_world(2, work)
    assert torch.equal(mean, other) and torch.equal(weights, others)


@pytest.mark.parametrize("kept", [0, 0.25])
def test_it_is_the_plain_rule(kept: float) -> None:
    """Error feedback on the change of weights, written down again in `Ablation`."""
    numel, rounds = 50, 4

    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor]:
        def change(turn: int) -> Tensor:
            return torch.randn(numel, generator=torch.Generator().manual_seed(100 * transport.rank + turn))

        model = torch.nn.Linear(numel, 1, bias=False)
        start = torch.linspace(-1, 1, numel)
        with torch.no_grad():
            model.weight.copy_(start[None])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        options: Any = {"algorithm": "topka", "wire": "int8", "min_numel": 0, "hosts": None}
        handle = oktopk.local_steps(model, optimizer, 0.2, keep_owed=kept, group=transport, **options)
        plain, own = Ablation(start, [start.shape], transport, density=0.2, keeps=kept, largest=1), start.clone()
        for turn in range(rounds):
            model.weight.grad = change(turn)[None]
            optimizer.step()
            own -= change(turn)
            plain.synchronize_(own)
        found = model.weight.detach()[0].clone()
        handle.close()
        return found, own

    for found, plain in run_world(3, work):
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)  # another order of sums


@pytest.mark.parametrize(("save_at", "kept"), [(8, 0.0), (6, 0.3)])
def test_a_resumed_training_equals_one_that_was_not_interrupted(save_at: int, kept: float, tmp_path: Path) -> None:
    straight = run_world(2, lambda t: _trained(t, tmp_path, save_at, 13, False, every=4, keep_owed=kept))
    resumed = run_world(2, lambda t: _trained(t, tmp_path, save_at, 13, True, every=4, keep_owed=kept))
    for (own, shared, moments), (own_again, shared_again, moments_again) in zip(straight, resumed, strict=True):
        assert torch.equal(own, own_again) and torch.equal(shared, shared_again)
        assert all(torch.equal(a, b) for a, b in zip(moments, moments_again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [((4, 1), (2, 1)), ((2, 1), (3, 1)), ((2, 1), (2, 1)), ((2, 2), (4, 1))])
@pytest.mark.parametrize(("kept", "keeps"), [(0.25, 0.25), (0, 1), (1, 0.25)])
def test_what_is_owed_outlives_other_worlds_and_other_ways_to_owe(
    before: Any, after: Any, kept: float, keeps: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The shared weights minus the mean of what is owed are where they would have been."""
    options: Any = {"algorithm": "topka", "density": 0.1, "min_numel": 0, "every": 3, "wire": "float32"}

    def save(transport: ThreadTransport) -> tuple[Tensor, Tensor]:
        model = model_of(0, dtype)
        optimizer = _adam(model)
        each: Any = {**options, "keep_owed": kept, "group": transport, "hosts": before[1]}
        with oktopk.local_steps(model, optimizer, **each) as handle:
            for step in range(5):  # two of them after the last synchronisation
                push(model, optimizer, transport.rank, step)
            oktopk.save(handle, tmp_path)
            return shared(handle, model), owed_of(handle)

    def load(transport: ThreadTransport) -> tuple[Tensor, Tensor]:
        model = model_of(7, dtype)
        each: Any = {**options, "keep_owed": keeps, "group": transport, "hosts": after[1]}
        with oktopk.local_steps(model, _adam(model), **each) as handle:
            oktopk.load(handle, tmp_path)
            return shared(handle, model), owed_of(handle)

    def shared(handle: oktopk.LocalSteps, model: nn.Module) -> Tensor:
        with handle.shared():
            return weights_of(model).double()

    def paid(world: list[tuple[Tensor, Tensor]], hosts: tuple[int, int]) -> Tensor:
        assert any(owed.any() for _, owed in world), "else nothing is tested"
        return world[0][0] - torch.stack([owed for _, owed in world[:: hosts[1]]]).mean(0)

    saved = paid(run_world(before[0] * before[1], save), before)
    loaded = paid(run_world(after[0] * after[1], load), after)
    torch.testing.assert_close(loaded, saved, rtol=0, atol=1e-6)  # shared weights are the same, rounded or not


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [0.0, 0.25])
def test_steps_of_an_unfinished_interval_are_not_lost_in_another_world(
    kept: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Own weights hold them: they count when training ends there, however many ranks it ends with."""

    def work(transport: ThreadTransport, load: bool) -> Tensor:
        model = model_of().to(dtype)
        optimizer = sgd(model)
        with oktopk.local_steps(model, optimizer, 0.1, every=4, keep_owed=kept, group=transport, hosts=None) as handle:
            if load:
                oktopk.load(handle, tmp_path)
            else:
                for step in range(6):
                    push(model, optimizer, 0, step)
                oktopk.save(handle, tmp_path)
            handle.finish()
            return weights_of(model).double()

    finished = run_world(2, lambda t: work(t, False))[0]
    for again in run_world(3, lambda t: work(t, True)):
        torch.testing.assert_close(again, finished, rtol=0, atol=1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("kept", [0.0, 0.25])
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_bad_step_leaves_the_shared_weights_and_what_is_owed_alone(kept: float, is_finished: bool) -> None:
    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor]:
        model = model_of()
        optimizer = sgd(model)
        options: Any = {"density": 0.1, "min_numel": 0, "group": transport, "on_nonfinite": "skip"}
        with oktopk.local_steps(model, optimizer, keep_owed=kept, **options) as handle:
            push(model, optimizer, transport.rank, 0)
            if is_finished:
                handle.finish()
            before, owed = shared_of(handle).clone(), handle.owed()
            if transport.rank == 0:
                spoil(model, handle)
            stand_still(model, optimizer)
            assert torch.equal(shared_of(handle), before) and weights_of(model).isfinite().all()
            for name, part in handle.owed().items():  # the share that a bad weight kept is known but for its rounding
                torch.testing.assert_close(part, owed[name], rtol=0, atol=1e-6 if kept else 0.0)
            push(model, optimizer, transport.rank, 1)
            return shared_of(handle).clone(), weights_of(model)

    first, second = run_world(2, work)
    assert torch.equal(first[0], second[0]) and first[0].isfinite().all() and first[1].isfinite().all()


def spoil(model: nn.Module, handle: oktopk.LocalSteps) -> None:
    """As a bad step would."""
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.nan
    handle._watch.accept()


def stand_still(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("kept", [1.0, 0.25])
def test_all_end_with_the_same_weights_though_the_last_synchronisation_was_skipped(kept: float) -> None:
    def work(transport: ThreadTransport) -> Tensor:
        model = model_of()
        optimizer = sgd(model)
        options: Any = {"density": 0.1, "min_numel": 0, "group": transport, "on_nonfinite": "skip"}
        with oktopk.local_steps(model, optimizer, keep_owed=kept, **options) as handle:
            push(model, optimizer, transport.rank, 0)
            if transport.rank == 0:
                spoil(model, handle)
            stand_still(model, optimizer)
            handle.finish()
            return weights_of(model)

    first, second = run_world(2, work)
    assert torch.equal(first, second) and first.isfinite().all()


def test_weights_that_were_loaded_are_not_quietly_replaced_in_the_end() -> None:
    def work(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = _adam(model)
        with oktopk.local_steps(model, optimizer, every=4, min_numel=0, group=transport) as handle:
            for step in range(4):
                push(model, optimizer, transport.rank, step)
            model.load_state_dict(model_of(7).state_dict())
            with pytest.raises(OkTopkError, match=r"handle\.restart"):
                handle.finish()

    run_world(2, work)


def test_a_rank_that_has_taken_a_further_step_is_noticed_when_nothing_has_to_travel() -> None:
    def work(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = _adam(model)
        with oktopk.local_steps(model, optimizer, every=4, min_numel=0, group=transport) as handle:
            for step in range(4 + transport.rank):
                push(model, optimizer, transport.rank, step)
            with pytest.raises(MismatchError, match=r"\[4, 5\] steps"):
                handle.finish()

    run_world(2, work)


def test_a_bad_step_after_a_resume_falls_back_to_the_share_that_was_kept(tmp_path: Path) -> None:
    def work(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = sgd(model)
        options: Any = {"density": 0.1, "min_numel": 0, "group": transport, "on_nonfinite": "skip", "keep_owed": 0.25}
        with oktopk.local_steps(model, optimizer, **options) as handle:
            push(model, optimizer, transport.rank, 0)
            oktopk.save(handle, tmp_path)
            before = weights_of(model)
            oktopk.load(handle, tmp_path)
            if transport.rank == 0:
                spoil(model, handle)
            stand_still(model, optimizer)
            torch.testing.assert_close(weights_of(model), before, rtol=0, atol=1e-6)

    run_world(2, work)


def _lamb(model: nn.Module) -> Lamb:
    return Lamb(model.parameters())


def _rms(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters())


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (_adam, {"every": 4}, ("topka", KEPT_RARELY, "all")),
        (_adam, {"every": 3}, ("randomk", 1, "all")),
        (_adam, {"every": "auto"}, ("randomk", 1, "all")),
        (_adam, {"every": 4, "overlap": True}, ("randomk", 1, "all")),
        (_adam, {"every": 4, "keep_owed": True}, ("randomk", 1, "all")),
        (_adam, {"every": 4, "algorithm": "oktopk"}, ("oktopk", KEPT_RARELY, "all")),
        (_adam, {"every": 4, "algorithm": "randomk"}, ("randomk", 1, "all")),
        (_adam, {"keep_owed": False}, ("topka", 0, "all")),
        (_adam, {"keep_owed": 0.5}, ("topka", 0.5, "all")),
        (_adam, {"every": 4, "mean_over": "senders"}, ("topka", KEPT_RARELY, "senders")),
        (sgd, {"every": 8}, ("topka", KEPT_RARELY, "all")),
        (sgd, {"every": 3}, ("randomk", 1, "all")),
        (sgd, {"every": 8, "mean_over": "all"}, ("topka", KEPT_RARELY, "all")),
        (sgd, {"every": 8, "mean_over": "senders"}, ("topka", KEPT_RARELY, "senders")),
        (sgd, {"every": 8, "mean_over": "senders", "keep_owed": 0.5}, ("topka", 0.5, "senders")),
        (sgd, {"every": 8, "mean_over": "senders", "keep_owed": 1}, ("topka", 1, "senders")),
        (sgd, {"every": 8, "mean_over": "senders", "overlap": True}, ("topka", 1, "senders")),
        (sgd, {"every": "auto", "mean_over": "senders"}, ("topka", 1, "senders")),
        (sgd, {"mean_over": "senders"}, ("topka", 1, "senders")),
        (sgd, {"keep_owed": 0.5}, ("topka", 0.5, "all")),
        (sgd, {}, ("randomk", 1, "all")),
        (_lamb, {"every": 8}, ("randomk", 1, "all")),
        (_rms, {"every": 8}, ("randomk", 1, "all")),
    ],
)
def test_who_steps_often_goes_on_from_the_shared_weights(make: Any, options: Any, expected: Any) -> None:
    model = model_of()
    with oktopk.local_steps(model, make(model), **options) as handle:
        config = handle.reducer.config
        assert (handle.reducer.algorithm, config.keep_owed, config.mean_over) == expected


def test_the_trainer_chooses_alike() -> None:
    def recipe(**said: Any) -> Recipe:
        return TrainConfig(workload="gpt", reduce="updates", **said).recipe(Recipe(optimizer="adamw"), 2)

    rare, often = recipe(every=4), recipe()
    assert (rare.algorithm, rare.density, rare.wire, rare.keep_owed) == ("topka", 0.06, "codebook2", KEPT_RARELY)
    assert (often.algorithm, often.keep_owed) == ("randomk", 1)
    assert recipe(every=4, optimizer="sgd").keep_owed == KEPT_RARELY
    assert recipe(every=4, optimizer="lamb").keep_owed == 1
    assert recipe(every=4, keep_owed=1).algorithm == "randomk"
    assert recipe(keep_owed=0).keep_owed == 0 and recipe(every=4, keep_owed=0.5).keep_owed == 0.5
    config = TrainConfig(workload="speech", reduce="updates", every=4)
    assert config.recipe(Recipe(optimizer="adamw", keep_owed=1), 2).keep_owed == 1, "as the preset says"
    assert TrainConfig(workload="gpt", keep_owed=True).keep_owed == 1.0
    with pytest.raises(ConfigError, match="keep_owed is for --reduce updates"):
        TrainConfig(workload="gpt", reduce="gradients", keep_owed=False)
    with pytest.raises(ConfigError, match="keep_owed is a share"):
        TrainConfig(workload="gpt", keep_owed=2.0)
    with pytest.raises(ConfigError, match="mean_over senders is for --reduce updates"):
        TrainConfig(workload="gpt", reduce="gradients", mean_over="senders")
    with pytest.raises(ConfigError, match="'all' or 'senders', got 'sender'"):
        TrainConfig(workload="gpt", mean_over="sender")  # type: ignore[arg-type]


def test_a_preset_may_say_over_whom_means_of_rare_updates_are() -> None:
    def over(**said: Any) -> tuple[str, str | None]:
        recipe = TrainConfig(workload="ptb", reduce="updates", **said).recipe(base, 4)
        return recipe.algorithm, recipe.mean_over

    base = Recipe(optimizer="sgd", mean_over="senders")
    assert over(every=4) == over(mean_over="senders") == ("topka", "senders")
    # As an earlier version wrote it down, which did not know of it: a resumed run goes on as it was.
    assert over(every=4, algorithm="randomk", keep_owed=1.0) == ("randomk", "all")
    assert over() == over(every=4, overlap=True) == ("randomk", "all")
    assert over(every=4, mean_over="all") == ("topka", "all")


@pytest.mark.parametrize(("said", "meant"), [("0.5", 0.5), ("1", 1.0), ("True", 1.0), ("False", 0.0)])
def test_the_command_line_takes_a_share_or_a_word(said: str, meant: float, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "gpt", "--preset", "tiny", "--reduce", "updates", "--keep-owed", said, "--dry-run"]
    assert main(arguments) == 0
    assert f'"keep_owed": {meant}' in capsys.readouterr().out


def test_a_file_may_say_true(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text('workload = "gpt"\npreset = "tiny"\nreduce = "updates"\nevery = 4\nkeep_owed = true\n')
    assert main(["train", "--config", str(file), "--dry-run"]) == 0
    assert '"keep_owed": 1.0' in capsys.readouterr().out


def test_what_makes_no_sense_is_refused() -> None:
    model = model_of()
    with pytest.raises(ConfigError, match="overlap=True and keep_owed=0 do not go together"):
        oktopk.local_steps(model, sgd(model), overlap=True, keep_owed=False)
    with pytest.raises(ConfigError, match=r"keep_owed is a share, from 0 .* to 1 .*, got 1\.5"):
        oktopk.local_steps(model, sgd(model), keep_owed=1.5)
    with pytest.raises(ConfigError, match="keep_owed is about weights"):
        oktopk.Reducer("oktopk", 0.1, keep_owed=False)

    def differing(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = sgd(model)
        options: Any = {"algorithm": "topka", "density": 0.1, "wire": "int8", "min_numel": 0, "group": transport}
        refused = pytest.raises(MismatchError, match="configuration")
        with oktopk.local_steps(model, optimizer, keep_owed=transport.rank == 0, **options), refused:
            push(model, optimizer, transport.rank, 0)

    run_world(2, differing)
