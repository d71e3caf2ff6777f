"""Means over those who sent an entry: nothing is lost, ranks get the same bits, and who cannot count is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk.config import WIRES
from oktopk.errors import ConfigError, MismatchError
from oktopk.transport import ThreadTransport, run_world
from test_local_steps import RATE, _trained, model_of, push, sgd, weights_of
from test_local_steps_hosts import hosts_of

SENDERS: dict[str, Any] = {"algorithm": "topka", "mean_over": "senders", "min_numel": 0}
Step = tuple[Tensor, Tensor]  # how far the shared weights moved, and what left this rank


def shared_now(handle: oktopk.LocalSteps, model: torch.nn.Module) -> Tensor:
    with handle.shared():
        return weights_of(model).double()


def owed_of(handle: oktopk.LocalSteps) -> Tensor:
    return torch.cat([part.double() for part in handle.owed().values()])


def steps_of(transport: ThreadTransport, count: int = 4, **options: Any) -> list[Step]:
    """What every synchronisation did."""
    model = model_of(transport.rank)
    optimizer = sgd(model)
    seen = []
    with oktopk.local_steps(model, optimizer, 0.1, group=transport, **SENDERS, **options) as handle:
        for step in range(count):
            shared, owed = shared_now(handle, model), owed_of(handle)
            change = RATE * push(model, optimizer, transport.rank, step).double()
            seen.append((shared - shared_now(handle, model), owed + change - owed_of(handle)))
    return seen


def check(steps: list[Step]) -> None:
    """Of one synchronisation, as all workers saw it."""
    moved = steps[0][0]
    assert all(torch.equal(other, moved) for other, _ in steps), "equal bits on all ranks"
    sent = torch.stack([left for _, left in steps])
    sent = torch.where(sent.abs() > 1e-6, sent, 0.0)  # weights of 0.2 in float32, and changes of 0.1
    senders = sent.ne(0).sum(0)
    assert {1, 2} <= set(senders.unique().tolist()), "else this is no other mean"
    torch.testing.assert_close(moved * senders.clamp(min=1), sent.sum(0), rtol=0, atol=2e-6 * len(steps))


@pytest.mark.parametrize("kept", [1.0, 0.25, 0.0])
@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "int8"])  # which sends zeros: below
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_left_the_ranks_is_the_mean_times_those_who_sent_it(world_size: int, wire: str, kept: float) -> None:
    world = run_world(world_size, lambda t: steps_of(t, wire=wire, keep_owed=kept))
    for steps in zip(*world, strict=True):
        check(list(steps))


@pytest.mark.parametrize(("kept", "wire"), [(1.0, "float32"), (0.25, "float32"), (0.25, "codebook2")])
def test_hosts_count_as_one_sender(kept: float, wire: str) -> None:
    """Two hosts of two ranks, which step on the mean of their gradients."""

    def work(transport: ThreadTransport) -> list[tuple[Tensor, Tensor, Tensor]]:
        model = model_of(transport.rank)
        optimizer = sgd(model)
        seen = []
        options: Any = {**SENDERS, "wire": wire, "keep_owed": kept, "hosts": 2}
        with oktopk.local_steps(model, optimizer, 0.1, group=transport, **options) as handle:
            for step in range(3):
                shared, owed = shared_now(handle, model), owed_of(handle)
                change = RATE * push(model, optimizer, transport.rank, step).double()
                seen.append((shared - shared_now(handle, model), owed - owed_of(handle), change))
        return seen

    world = run_world(4, work)
    for step in range(3):
        hosts = [[seen[step] for seen in host] for host in hosts_of(world, 2)]
        check([(host[0][0], host[0][1] + (host[0][2] + host[1][2]) / 2) for host in hosts])


def test_it_is_the_mean_over_all_where_all_send_everything() -> None:
    def shared(transport: ThreadTransport, over: str) -> Tensor:
        model = model_of(transport.rank)
        optimizer = sgd(model)
        options: Any = {**SENDERS, "mean_over": over, "wire": "float32"}
        with oktopk.local_steps(model, optimizer, 1.0, group=transport, **options) as handle:
            for step in range(3):
                push(model, optimizer, transport.rank, step)
            return shared_now(handle, model)

    over_senders, over_all = (run_world(3, lambda t, over=over: shared(t, over))[0] for over in ("senders", "all"))  # type: ignore[misc]
    torch.testing.assert_close(over_senders, over_all, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kept", [1.0, 0.25])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (4, 3)])
def test_what_one_rank_owes_counts_whole_in_another_world_too(
    before: int, after: int, kept: float, tmp_path: Path
) -> None:
    """Rank 0 alone has learned something; steps on no gradient let all of it arrive."""

    def work(transport: ThreadTransport, load: bool) -> Tensor:
        model = model_of()
        optimizer = sgd(model)
        options: Any = {**SENDERS, "wire": "float32", "keep_owed": kept, "group": transport}
        with oktopk.local_steps(model, optimizer, 0.2, **options) as handle:
            if load:
                oktopk.load(handle, tmp_path)
            else:
                push(model, optimizer, 0, 0, scale=float(transport.rank == 0))
                oktopk.save(handle, tmp_path)
            for step in range(1, 8):
                push(model, optimizer, 0, step, scale=0.0)
            assert not owed_of(handle).any()
            return shared_now(handle, model)

    expected = run_world(before, lambda t: work(t, False))[0]
    for weights in run_world(after, lambda t: work(t, True)):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


def test_with_a_global_cut_the_largest_means_win() -> None:
    """What one rank alone has to say is larger than what all agree on, and their sum is not."""

    def work(transport: ThreadTransport) -> Tensor:
        model = torch.nn.Linear(8, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        options: Any = {**SENDERS, "wire": "float32", "global_cut": True, "hosts": None, "group": transport}
        with oktopk.local_steps(model, optimizer, 0.25, **options) as handle:
            said = [0.0, 0.0, 1.0, 1.1] if transport.rank == 0 else [0.4, 0.39, 0.0, 0.0]
            model.weight.grad = -torch.tensor([[*said, 0.0, 0.0, 0.0, 0.0]])
            optimizer.step()
            return shared_now(handle, model)

    expected = torch.tensor([0.0, 0.0, 1.0, 1.1, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(run_world(4, work)[0], expected, rtol=0, atol=1e-6)


def test_an_entry_that_rounding_left_nothing_of_was_not_sent() -> None:
    """One huge entry makes int8 round the others of its block to nothing: what others sent there counts whole."""

    def work(transport: ThreadTransport) -> Tensor:
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with oktopk.local_steps(model, optimizer, 1.0, "int8", group=transport, hosts=None, **SENDERS) as handle:
            first = [1e6, 1.0, 0.0, 0.0] if transport.rank == 0 else [0.0, 4.0, 2.0, 0.0]
            model.weight.grad = -torch.tensor([first])
            optimizer.step()
            return shared_now(handle, model)

    moved = run_world(2, work)[0]
    torch.testing.assert_close(moved, torch.tensor([1e6, 4.0, 2.0, 0.0], dtype=torch.float64), rtol=0.01, atol=0.02)


@pytest.mark.parametrize(("every", "overlap"), [(2, True), (2, False), (4, False)])
def test_a_resumed_training_equals_one_that_was_not_interrupted(every: int, overlap: bool, tmp_path: Path) -> None:
    options: Any = {"mean_over": "senders", "every": every, "overlap": overlap}
    straight = run_world(2, lambda t: _trained(t, tmp_path, 5, 9, False, **options))
    resumed = run_world(2, lambda t: _trained(t, tmp_path, 5, 9, True, **options))
    for (own, shared, _), (own_again, shared_again, _) in zip(straight, resumed, strict=True):
        assert torch.equal(own, own_again) and torch.equal(shared, shared_again)


def test_the_default_under_sgd_follows_what_all_agree_on() -> None:
    """A quadratic that all ranks have in common, with noise and momentum: means over senders take P times the step.

    What travels rarely takes its time (0.05 after 120 steps), and must not come back.
    """

    def work(transport: ThreadTransport) -> float:
        model = torch.nn.Linear(2048, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1, 1, 2048)[None])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        noise = torch.Generator().manual_seed(transport.rank)
        with oktopk.local_steps(model, optimizer, every=4, group=transport) as handle:
            for _ in range(300):
                model.weight.grad = model.weight.detach() + 0.1 * torch.randn(1, 2048, generator=noise)
                optimizer.step()
            with handle.shared():
                return float(model.weight.detach().square().mean())

    assert run_world(4, work)[0] < 0.01  # from 1/3; noise alone leaves about 1e-3


def test_who_cannot_count_senders_is_refused() -> None:
    model = model_of()
    for options, words in (
        ({"algorithm": "oktopk", "mean_over": "senders"}, "got 'oktopk': take 'topka'"),
        ({"algorithm": "randomk", "mean_over": "senders"}, "got 'randomk': take 'topka'"),
        ({"algorithm": "topka", "mean_over": "sender"}, "'all' or 'senders', got 'sender'"),
    ):
        with pytest.raises(ConfigError, match=words):
            oktopk.local_steps(model, sgd(model), **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mean of gradients is over all ranks"):
        oktopk.Reducer("topka", mean_over="senders")


def test_ranks_that_mean_something_else_are_refused_before_data_moves() -> None:
    def work(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = sgd(model)
        over: Any = "senders" if transport.rank else "all"
        options: Any = {"algorithm": "topka", "mean_over": over, "group": transport}
        with oktopk.local_steps(model, optimizer, **options), pytest.raises(MismatchError):
            push(model, optimizer, transport.rank, 0)

    run_world(2, work)
