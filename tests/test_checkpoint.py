"""Checkpoints: continue exactly, never half-written, never believed when damaged, at any world size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import checkpoint_cases
import oktopk
from oktopk import Reducer, load, save
from oktopk.checkpoint import MANIFEST, pack, read_manifest, read_rank, unpack
from oktopk.errors import CheckpointError, ConfigError
from oktopk.transport import ThreadTransport, run_world
from worlds import run_processes

NAMES = {"a": 300, "b": 41}


@pytest.mark.processes
@pytest.mark.timeout(700)
def test_resumed_training_equals_uninterrupted_training_bit_for_bit(tmp_path: Path) -> None:
    straight = run_processes(2, checkpoint_cases.straight_and_half, str(tmp_path), timeout=300)
    resumed = run_processes(2, checkpoint_cases.resume_both_ways, str(tmp_path), timeout=300)
    for rank in range(2):
        for way in checkpoint_cases.WAYS:
            for through in ("oktopk", "dcp"):
                for kind in ("weights", "residuals"):
                    expected, got = straight[rank][way][kind], resumed[rank][through][way][kind]
                    assert expected.keys() == got.keys()
                    for name in expected:
                        assert torch.equal(expected[name], got[name]), (rank, way, through, kind, name)


def reducer_on(transport: ThreadTransport, **options: Any) -> oktopk.Reducer:
    return oktopk.Reducer(density=0.1, min_numel=0, group=transport, **options)


def feed(reducer: oktopk.Reducer, steps: int) -> oktopk.Reducer:
    generator = torch.Generator().manual_seed(reducer.rank)
    for _ in range(steps):
        for name, numel in NAMES.items():
            reducer.reduce(name, torch.randn(numel, generator=generator))
    return reducer


def saved(folder: Path, world_size: int = 2, steps: int = 3, **options: Any) -> list[dict[str, Tensor]]:
    def work(transport: ThreadTransport) -> dict[str, Tensor]:
        with reducer_on(transport, **options) as reducer:
            oktopk.save(feed(reducer, steps), folder)
            return reducer.residuals()

    return run_world(world_size, work)


def loaded(folder: Path, world_size: int = 2, **how: Any) -> list[dict[str, Tensor]]:
    def work(transport: ThreadTransport) -> dict[str, Tensor]:
        with reducer_on(transport) as reducer:
            oktopk.load(reducer, folder, **how)
            assert reducer.step > 0
            return reducer.residuals()

    return run_world(world_size, work)


def total(residuals: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum((r[name].double() for r in residuals if name in r), torch.zeros(1)) for name in NAMES}


def test_what_is_owed_survives_a_change_of_world_size(tmp_path: Path) -> None:
    four = total(saved(tmp_path / "four", 4))

    def through(transport: ThreadTransport) -> dict[str, Tensor]:
        with reducer_on(transport) as reducer:
            oktopk.load(reducer, tmp_path / "four")
            oktopk.save(reducer, tmp_path / "two")
            return reducer.residuals()

    two = total(run_world(2, through))
    four_again = total(loaded(tmp_path / "two", 4))
    for name in NAMES:
        assert four[name].abs().sum() > 0
        # One float32 addition per pair of old ranks. What a rank owes reaches the weights divided by the world size.
        torch.testing.assert_close(two[name] / 2, four[name] / 4, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(four_again[name] / 4, two[name] / 2, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_what_is_eventually_applied_to_the_weights_does_not_depend_on_the_world_that_pays(
    tmp_path: Path, world_size: int
) -> None:
    before = total(saved(tmp_path, 4))["a"] / 4

    def pay(transport: ThreadTransport) -> Tensor:
        with reducer_on(transport) as reducer:
            oktopk.load(reducer, tmp_path)
            nothing = torch.zeros(NAMES["a"])
            return sum((reducer.reduce("a", nothing).double() for _ in range(40)), torch.zeros(1))

    # Each step pays a tenth of the entries, those that are owed most.
    torch.testing.assert_close(run_world(world_size, pay)[0], before, rtol=1e-6, atol=1e-6)


def test_reset_drops_residuals_but_keeps_the_step(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    assert all(not residuals for residuals in loaded(tmp_path, 3, on_world_change="reset"))


def test_a_world_that_grew_trains_on_and_conserves(tmp_path: Path) -> None:
    before = total(saved(tmp_path, 2))

    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor, Tensor]:
        with reducer_on(transport) as reducer:
            oktopk.load(reducer, tmp_path)
            grad = torch.randn(NAMES["a"], generator=torch.Generator().manual_seed(9 + transport.rank))
            mean = reducer.reduce("a", grad)
            return grad, mean, reducer.residuals()["a"]

    world = run_world(4, work)
    given = 4 / 2 * before["a"] + sum(grad.double() for grad, _, _ in world)
    got = 4 * world[0][1].double() + sum(residual.double() for _, _, residual in world)
    torch.testing.assert_close(got, given, rtol=1e-5, atol=1e-5)


def test_a_second_save_replaces_the_first_and_leaves_no_rubbish(tmp_path: Path) -> None:
    saved(tmp_path, steps=2)
    newer = saved(tmp_path, steps=5)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [MANIFEST, *(file.name for file in read_manifest(tmp_path).files)]
    )
    assert read_manifest(tmp_path).step == 5
    for rank, residuals in enumerate(loaded(tmp_path)):
        assert torch.equal(residuals["a"], newer[rank]["a"])


def test_a_save_that_dies_before_its_manifest_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    older = saved(tmp_path, steps=2)
    manifest = (tmp_path / MANIFEST).read_bytes()
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    saved(tmp_path, steps=5)
    # As if rank 0 had died before its rename: the new files, the old files, the old manifest, a temporary file.
    for name, data in kept.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / MANIFEST).write_bytes(manifest)
    (tmp_path / "rank-0-of-2-0123.safetensors.tmp").write_bytes(b"half")
    for rank, residuals in enumerate(loaded(tmp_path)):
        assert torch.equal(residuals["a"], older[rank]["a"])


def _truncate(folder: Path) -> None:
    path = folder / read_manifest(folder).files[1].name
    path.write_bytes(path.read_bytes()[:-5])


def _flip(folder: Path) -> None:
    path = folder / read_manifest(folder).files[1].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _lose(folder: Path) -> None:
    (folder / read_manifest(folder).files[1].name).unlink()


def _age(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"version": 99}))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_truncate, "is damaged: expected"),
        (_flip, "is damaged: expected"),
        (_lose, "is missing: every rank must see the directory"),
        (_age, "is of version 99"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "manifest.json is damaged"),
        (lambda folder: (folder / MANIFEST).unlink(), "no checkpoint in"),
    ],
    ids=["truncated", "bit flipped", "file lost", "other version", "bad manifest", "no manifest"],
)
def test_a_damaged_checkpoint_is_refused_by_every_rank(
    harm: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    harm(tmp_path)

    def work(transport: ThreadTransport) -> str:
        with reducer_on(transport) as reducer:
            with pytest.raises(CheckpointError) as caught:
                oktopk.load(reducer, tmp_path)
            assert reducer.reduce("a", torch.ones(NAMES["a"])).numel() == NAMES["a"], "the group is intact"
            return str(caught.value)

    messages = run_world(2, work)
    assert says in messages[1]
    assert says in messages[0], "rank 0 repeats what rank 1 found, or found it too"


def test_state_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)

    def work(transport: ThreadTransport) -> None:
        with reducer_on(transport, algorithm="topka") as reducer:
            oktopk.load(reducer, tmp_path)

    with pytest.raises(CheckpointError, match="algorithm 'oktopk', but this reducer has 'topka'"):
        run_world(2, work)


def test_saving_where_one_cannot_write_raises_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")

    def work(transport: ThreadTransport) -> str:
        with reducer_on(transport) as reducer, pytest.raises((OSError, CheckpointError)) as caught:
            oktopk.save(feed(reducer, 1), tmp_path / "file" / "checkpoint")
        return str(caught.value)

    assert all("Not a directory" in message for message in run_world(2, work))


def test_unknown_policy_is_refused(tmp_path: Path) -> None:
    with oktopk.Reducer() as reducer, pytest.raises(ConfigError, match="on_world_change must be"):
        oktopk.load(reducer, tmp_path, on_world_change="forget")  # type: ignore[arg-type]


def test_a_state_comes_back_with_the_types_it_had() -> None:
    state = {"state": {0: {"step": 3}, 7: {}}, "betas": (0.9, (1, None)), "names": [("a", 1)], "empty": {}, "none": ()}
    assert unpack(pack(state)) == state


def test_tensors_that_share_memory_are_saved_once_or_apart() -> None:
    weight = torch.arange(12.0)
    state = {"tied": weight, "also": weight, "rows": weight.view(3, 4), "part": weight[2:5], "none": torch.empty(0)}
    data = pack({**state, "none too": torch.empty(0), "as bits": weight.view(torch.int32)})
    got = unpack(data)
    assert all(torch.equal(got[name], tensor) for name, tensor in state.items())
    assert got["tied"] is got["also"] and torch.equal(got["as bits"], weight.view(torch.int32))
    assert len(pack({"tied": weight, "also": weight})) < len(pack({"tied": weight, "also": weight.clone()}))


def test_what_a_checkpoint_is_about_comes_back(tmp_path: Path) -> None:
    with Reducer(density=0.5) as reducer:
        reducer.reduce("a", torch.ones(8))
        save(reducer, tmp_path, about={"epoch": 3})
        assert read_manifest(tmp_path).about == load(reducer, tmp_path).about == {"epoch": 3}
        assert read_rank(tmp_path)["steps"] == {"a": 1}


def test_a_state_that_cannot_be_saved_on_one_rank_ends_the_save_on_all(tmp_path: Path) -> None:
    class Odd:
        def __init__(self, reducer: Reducer) -> None:
            self.reducer = reducer

        def rank_state(self) -> dict[str, object]:
            return {"odd": object() if self.reducer.rank == 1 else 0}

    def work(transport: ThreadTransport) -> str:
        with Reducer(group=transport) as reducer, pytest.raises((TypeError, CheckpointError)) as caught:
            save(Odd(reducer), tmp_path)  # type: ignore[arg-type]
        return f"{type(caught.value).__name__}: {caught.value}"

    zero, one = run_world(2, work)
    assert zero.startswith("CheckpointError: rank 1: TypeError") and one.startswith("TypeError")


def test_pack_and_unpack_are_inverse_and_run_no_code() -> None:
    state = {"tensors": {"a.b/c": torch.arange(5.0)}, "plain": [1, 2.5, "x", None, True], "nested": {"deep": [[1]]}}
    data = pack(state)
    got = unpack(data)
    assert torch.equal(got["tensors"]["a.b/c"], torch.arange(5.0))
    assert got["plain"] == state["plain"] and got["nested"] == state["nested"]
    with pytest.raises(CheckpointError, match="not the state of a reducer"):
        unpack(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
