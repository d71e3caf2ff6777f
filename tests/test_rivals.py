"""Rivals of local steps do what their papers say: each against the published rule, written down again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Size, Tensor

from oktopk.bench.rivals import RIVALS, Ablation, DiLoCo, SparseLoCo, Sparta, SpartaDiLoCo
from oktopk.bench.rivals.sparseloco import Blocks, blocks_of, pack_bits, quantize, unpack_bits
from oktopk.bench.rivals.training import require_rival, train_rival
from oktopk.cli import main
from oktopk.errors import ConfigError
from oktopk.front_ends.local_steps import local_steps
from oktopk.training.config import TrainConfig
from oktopk.training.world import World
from oktopk.transport import run_world
from oktopk.transport.metered import MeteredTransport

RANKS, ROUNDS = 3, 4
SHAPES = [Size([8, 6]), Size([5])]
NUMEL = sum(shape.numel() for shape in SHAPES)


def start() -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(7))


def local_change(rank: int, turn: int) -> Tensor:
    """What the local steps of a rank do to its weights."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * rank + turn))


def weights_after(name: str, **settings: Any) -> list[list[Tensor]]:
    """The own weights of every rank after every synchronisation."""

    def work(transport: Any) -> list[Tensor]:
        rival, own = RIVALS[name](start(), SHAPES, transport, **settings), start()
        seen = []
        for turn in range(ROUNDS):
            own -= local_change(transport.rank, turn)
            rival.synchronize_(own)
            seen.append(own.clone())
        return seen

    return run_world(RANKS, work)


def test_diloco_is_nesterov_on_the_mean_change() -> None:
    shared = torch.nn.Parameter(start())
    outer = torch.optim.SGD([shared], lr=0.7, momentum=0.9, nesterov=True)
    ranks = weights_after("diloco")
    for turn in range(ROUNDS):
        shared.grad = torch.stack([local_change(rank, turn) for rank in range(RANKS)]).mean(0)
        outer.step()
        for own in ranks:
            torch.testing.assert_close(own[turn], shared.detach(), rtol=1e-5, atol=1e-6)  # another order of sums


def test_sparta_with_diloco_takes_an_outer_step_every_so_many_times() -> None:
    def work(transport: Any) -> list[Tensor]:
        both, own = SpartaDiLoCo(start(), SHAPES, transport, share=0.3, every=2), start()
        sparta, diloco = Sparta(start(), SHAPES, transport, share=0.3), DiLoCo(start(), SHAPES, transport)
        twin, seen = start(), []
        for turn in range(ROUNDS):
            own -= local_change(transport.rank, turn)
            twin -= local_change(transport.rank, turn)
            both.synchronize_(own)
            sparta.synchronize_(twin)
            if turn % 2:
                diloco.synchronize_(twin)
            seen.append(own - twin)
        assert not torch.equal(own, start())
        return seen

    for differences in run_world(RANKS, work):
        assert all(not difference.any() for difference in differences)


def test_sparta_averages_what_all_draw_and_leaves_the_rest() -> None:
    ranks = weights_after("sparta", share=0.3)
    own = [start() for _ in range(RANKS)]
    moved = 0
    for turn in range(ROUNDS):
        own = [x - local_change(rank, turn) for rank, x in enumerate(own)]
        mean = torch.stack(own).mean(0)
        met = (ranks[0][turn] - ranks[1][turn]) == 0
        moved += int(met.sum())
        for rank in range(RANKS):
            expected = torch.where(met, mean, own[rank])
            torch.testing.assert_close(ranks[rank][turn], expected, rtol=1e-5, atol=1e-6)
        own = [ranks[rank][turn] for rank in range(RANKS)]
    assert 0.15 * NUMEL * ROUNDS < moved < 0.45 * NUMEL * ROUNDS


def owed_and_changed(keeps: bool, decay: float, largest: bool) -> None:
    """Whatever is left out: what all ranks changed is what arrived, what is owed, and what decayed."""

    def work(transport: Any) -> tuple[Tensor, Tensor, Tensor]:
        settings = {"keeps": float(keeps), "decay": decay, "largest": float(largest), "density": 0.4}
        one, own = Ablation(start(), SHAPES, transport, **settings), start()
        decayed = torch.zeros(NUMEL)
        for turn in range(ROUNDS):
            decayed += (1 - decay) * one._owed
            own -= local_change(transport.rank, turn)
            one.synchronize_(own)
        assert torch.equal(own, one._shared - one._owed if keeps else one._shared)
        return one._shared, one._owed, decayed

    ranks = run_world(RANKS, work)
    shared = ranks[0][0]
    assert all(torch.equal(shared, other) for other, _, _ in ranks)
    assert all(owed.any() for _, owed, _ in ranks)  # else nothing is tested
    changes = sum(local_change(rank, turn) for rank in range(RANKS) for turn in range(ROUNDS))
    accounted = RANKS * (start() - shared) + sum(owed + decayed for _, owed, decayed in ranks)
    torch.testing.assert_close(accounted, torch.as_tensor(changes), rtol=1e-4, atol=1e-5)  # sums of float32


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("largest", [True, False])
def test_an_ablation_loses_nothing_but_what_decays(keeps: bool, decay: float, largest: bool) -> None:
    owed_and_changed(keeps, decay, largest)


def test_an_ablation_with_nothing_left_out_is_local_steps() -> None:
    def work(transport: Any) -> tuple[Tensor, Tensor]:
        model = torch.nn.Linear(NUMEL, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(start()[None])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        handle = local_steps(model, optimizer, group=transport, min_numel=0, hosts=None)
        one, own = Ablation(start(), SHAPES, transport), start()
        for turn in range(ROUNDS):
            change = local_change(transport.rank, turn)
            model.weight.grad = change[None].clone()
            optimizer.step()
            own -= change
            one.synchronize_(own)
        found = model.weight.detach()[0].clone()
        handle.finish()
        one.finish_(own)
        ended = model.weight.detach()[0].clone()
        handle.close()
        torch.testing.assert_close(ended, own, rtol=1e-5, atol=1e-6)
        return found, one._shared - one._owed

    for found, plain in run_world(RANKS, work):
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)  # another order of sums


def published_quantization(values: Tensor) -> Tensor:
    """Every value becomes the mean of its bin: four of 1.5 deviations, at -2, -1, 0 and 1 from the mean."""
    width = 6 * values.std() / 4
    bins = torch.round((values - values.mean()) / width + 2).clamp(0, 3)
    seen = values.clone()
    for code in bins.unique():
        seen[bins == code] = values[bins == code].mean()
    return seen


def published_sparseloco(kept: int) -> list[Tensor]:
    """The shared weights after every synchronisation; blocks of 4 x 3, and the vector of 5 in one piece."""
    shared, owed, seen = start(), [torch.zeros(NUMEL) for _ in range(RANKS)], []
    for turn in range(ROUNDS):
        sent = []
        for rank in range(RANKS):
            owed[rank] = 0.95 * owed[rank] + local_change(rank, turn)
            sent.append(published_message(owed[rank], kept))
            owed[rank] = owed[rank] - sent[rank]
        senders = sum((message != 0).float() for message in sent)
        shared = shared - sum(sent) / torch.as_tensor(senders).clamp(min=1)
        seen.append(shared)
    return seen


def published_message(owed: Tensor, kept: int) -> Tensor:
    matrix, vector = owed[:48].view(8, 6), owed[48:]
    sent = torch.zeros(8, 6)
    for row in (0, 4):
        for column in (0, 3):
            block = matrix[row : row + 4, column : column + 3]
            cut = block.abs().flatten().sort(descending=True).values[kept - 1]
            sent[row : row + 4, column : column + 3] = torch.where(block.abs() >= cut, block, 0)
    sent[sent != 0] = published_quantization(sent[sent != 0])
    return torch.cat([sent.flatten(), published_quantization(vector)])


def test_sparseloco_follows_its_published_rule() -> None:
    for seen in weights_after("sparseloco", side=5, kept=5):  # 8 = 2 x 4, 6 = 2 x 3
        for own, shared in zip(seen, published_sparseloco(5), strict=True):
            torch.testing.assert_close(own, shared, rtol=1e-5, atol=1e-5)


def test_sparseloco_spends_14_bits_on_an_entry() -> None:
    """And nothing on indices of vectors, which are sent whole."""
    weights = torch.randn(128 * 192 + 64)

    def work(transport: Any) -> int:
        metered = MeteredTransport(transport)
        SparseLoCo(weights, [Size([128, 192]), Size([64])], metered).synchronize_(weights + 1 + weights.abs())
        return metered.tally.bytes_sent

    blocks, codebook = 6, 16
    bits = blocks * 64 * 14 + 64 * 2
    assert run_world(2, work) == [2 * codebook + bits // 8] * 2


@pytest.mark.parametrize("kept", [3, 12, 40])
def test_a_message_comes_back_as_it_was_packed(kept: int) -> None:
    """A matrix whose blocks have 12 entries, a vector of 5, and another such matrix."""
    shapes = [Size([8, 6]), Size([5]), Size([4, 9])]
    vector = torch.randn(89, generator=torch.Generator().manual_seed(1))
    blocks = Blocks(shapes, 4, kept)
    message, sent = blocks.pack(vector)
    assert len(message) == len(blocks.pack(2 * vector)[0]), "ranks need not tell each other how much comes"
    back = blocks.unpack(message)
    assert torch.equal(back.places, sent.places) and torch.equal(back.values, sent.values)
    start = 0
    for shape in shapes:
        inside = (sent.places >= start) & (sent.places < start + shape.numel())
        chosen = vector[sent.places[inside]]
        torch.testing.assert_close(sent.values[inside], published_quantization(chosen), rtol=1e-5, atol=1e-6)
        for block in blocks_of(shape, 4) + start:
            those = vector[block[torch.isin(block, sent.places)]].abs()
            assert torch.equal(those.sort().values, vector[block].abs().sort().values[-kept:])
        start += shape.numel()


def test_equal_values_have_no_spread_to_divide_by() -> None:
    codes, codebook = quantize(torch.full((7,), 0.5), torch.zeros(7, dtype=torch.int64), 1)
    assert codebook[codes].tolist() == [0.5] * 7


@pytest.mark.parametrize("bits", [2, 12])
def test_bits_lie_side_by_side(bits: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 2**bits, 37)
    packed = pack_bits(numbers, bits)
    assert len(packed) == -(-37 * bits // 8)
    assert (unpack_bits(packed, bits, 37) == numbers).all()


@pytest.mark.parametrize("shape", [(128, 64), (33, 7), (65,), (4, 3, 5)])
def test_blocks_have_every_entry_once(shape: tuple[int, ...]) -> None:
    blocks = blocks_of(Size(shape), 64)
    assert sorted(blocks.flatten().tolist()) == list(range(Size(shape).numel()))


def test_all_end_with_the_mean_of_their_weights() -> None:
    def work(transport: Any) -> list[Tensor]:
        ends = []
        for rival in (DiLoCo, Sparta, SparseLoCo):
            own = start() + transport.rank
            rival(start(), SHAPES, transport).finish_(own)
            ends.append(own)
        return ends

    for ends in run_world(RANKS, work):
        for own in ends:
            torch.testing.assert_close(own, start() + 1)  # the mean of 0, 1 and 2


def test_who_has_just_synchronised_has_nothing_left_to_average() -> None:
    def work(transport: Any) -> int:
        most = 0
        for rival in (DiLoCo, SparseLoCo):
            metered = MeteredTransport(transport)
            one, own = rival(start(), SHAPES, metered), start() + transport.rank
            one.synchronize_(own)
            before, bits = metered.tally.bytes_sent, own.clone()
            one.finish_(own)
            assert torch.equal(own, bits)
            most = max(most, metered.tally.bytes_sent - before)
        return most

    assert max(run_world(RANKS, work)) < 32  # they agree on that, and send nothing else


@pytest.mark.parametrize(
    ("rival", "settings"), [("sparseloco", {"kept": 48.0, "side": 64.0}), ("sparta", {"share": 0.1}), ("diloco", {})]
)
def test_a_training_with_a_rival_learns_and_counts_what_it_sends(rival: str, settings: dict[str, float]) -> None:
    config = TrainConfig(
        workload="gpt", preset="tiny", epochs=1, lr=0.01, workload_options={"epoch_steps": 12, "valid_windows": 32}
    )

    def work(transport: Any) -> Any:
        return train_rival(config, rival, settings, 3, World(transport), transport)

    first, second = run_world(2, work)
    assert first.validation == second.validation and first.steps == 12
    assert first.validation["loss"] < 4.75  # log(128) = 4.85 is chance; 12 steps end near 4.5, by machine
    assert 0 < first.bytes_sent < first.dense_bytes / 1.5 and first.fewer > 1.5


def test_unknown_rivals_are_refused_before_anything_starts(capsys: Any) -> None:
    with pytest.raises(ConfigError, match="every must be 1"):
        require_rival("sparta", 0)
    assert main(["bench", "rivals", "--rival", "spartan"]) == 2
    assert "Did you mean 'sparta'" in capsys.readouterr().err
