"""The kernels for GPUs against the specification, interpreted on the CPU; and compiled for cards that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

from interpreter import counted_traffic, patched_once
from kernel_contract import SPEC, DenseContract, assert_same, example
from memory import peak_of_new_memory
from mirror import MirroredKernels
from oktopk.kernels import Kernels, ReferenceKernels
from oktopk.kernels import triton_loops as loops
from oktopk.kernels import triton_search as search
from oktopk.kernels.staged import StagedKernels
from oktopk.kernels.triton import TritonKernels
from oktopk.types import SparseVector
from triton_compile import Row, table

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    with patched_once():
        yield


def fresh() -> TritonKernels:
    return TritonKernels(CPU, ReferenceKernels())


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so low that small inputs take the paths of large ones."""
    for name, value in {"BLOCK": 64, "CHUNK": 16, "SMALL": 64, "SAMPLE": 128, "LINE": 8}.items():
        monkeypatch.setattr(search, name, value)


class TestTritonKernels(DenseContract):
    """With mirrors, as on a real card: see test_card.py."""

    thrift = 30
    large = 5_000
    densities = (0.02,)

    @pytest.fixture
    def kernels(self) -> Kernels:
        return MirroredKernels(fresh(), CPU)


@pytest.mark.usefixtures("little_room")
class TestTritonKernelsOfManyBlocks(DenseContract):
    thrift = 30
    large = 1_200
    densities = (0.02,)

    @pytest.fixture
    def kernels(self) -> Kernels:
        return fresh()


class TestStagedKernels(DenseContract):
    """Plain torch on a device, for those that Triton does not serve; with mirrors, as on a real card."""

    thrift = 5
    large = 100_000

    @pytest.fixture
    def kernels(self) -> Kernels:
        return MirroredKernels(StagedKernels(CPU, ReferenceKernels()), CPU)


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("kind", ["all equal", "too many where none was sampled", "too few"])
def test_a_sample_that_misleads_costs_a_second_search_and_changes_nothing(kind: str) -> None:
    x, k = torch.full((900,), 1e-3), 40
    lines = search.sampled_lines(900, 16)
    sampled = (lines[:, None] * search.LINE + torch.arange(search.LINE)).flatten()
    if kind.startswith("too many"):
        x += torch.linspace(0, 1e-4, 900)
        x[sampled] = 1e-6
    elif kind == "too few":
        x[sampled] = 1.0 + torch.linspace(0, 1, sampled.numel())
        x[sampled[:100]] += 100.0
    kernels = fresh()
    ours, threshold = kernels.select_topk(x, k)
    theirs, expected = SPEC.select_topk(x, k)
    assert_same(ours, theirs)
    assert threshold == expected
    total, grad = x.clone(), x / 3
    kernels.accumulate_(total, grad, k)
    assert_same(kernels.select_topk(total, k)[0], SPEC.select_topk(x + grad, k)[0])


@pytest.mark.usefixtures("little_room")
def test_a_threshold_may_let_any_number_through() -> None:
    x, kernels = example(1000, 3, "normal", torch.float32), fresh()
    kernels.accumulate_(x, torch.zeros_like(x), 10)
    for threshold in (0.0, 0.5, 2.5, 9.0):
        assert kernels.count_above(x, threshold) == SPEC.count_above(x, threshold)
        assert_same(kernels.select_above(x, threshold), SPEC.select_above(x, threshold))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_beyond_two_to_the_31_are_added_found_and_written(dtype: torch.dtype) -> None:
    far, few = 2**31 + 5000, 3000
    # Memory that nobody touches costs nothing.
    x = torch.from_numpy(np.zeros(far + few, np.float32))
    grad = example(few, 1, "normal", dtype)
    address = grad.data_ptr() - far * grad.itemsize  # of a gradient whose beginning is not there
    starts, addresses = torch.tensor([far, far + 2048, far + few]), torch.tensor([address + far * grad.itemsize] * 2)
    addresses[1] += 2048 * grad.itemsize
    board, energies = torch.zeros(loops.WORDS, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    source = search.Candidates.with_room(few, 2, search.Entries.of(x))
    search.launch(
        loops.scan, 2, x, x, grad, starts, addresses, x.numel(), torch.ones(1, dtype=torch.int32), board, energies,
        source.firsts, source.counts, source.indices, source.values, few,
        SIGN=1, WRITE=True, GATHER=True, SCATTERED=True, BLOCK=2048,
    )  # fmt: skip
    assert torch.equal(x[far:], grad.float())
    assert source.indices is not None and source.indices.dtype == torch.int64
    assert torch.equal(source.indices, far + grad.nonzero().flatten())
    kernels = fresh()
    change = kernels.retain_(x, SparseVector(source.indices, grad.float(), x.numel()))
    assert change == pytest.approx(-float(grad.double().square().sum()))
    assert not x[far:].any()


def test_bits_are_those_of_a_loop_when_an_index_comes_several_times() -> None:
    residual, theirs = torch.tensor([1e8, 3.0]), torch.tensor([1e8, 3.0])
    sent = SparseVector(torch.tensor([0, 1, 0, 0], dtype=torch.int32), torch.tensor([1e8, 1.0, 3.0, 1e-7]), 2)
    fresh().retain_(residual, sent)
    for index, value in zip(sent.indices.tolist(), sent.values, strict=True):
        theirs[index] -= value
    assert torch.equal(residual, theirs)


@pytest.mark.parametrize("scattered", [False, True])
def test_scratch_is_less_than_a_tenth_of_the_gradient(scattered: bool) -> None:
    numel, k = 300_000, 3_000  # as large as the interpreter is quick; what does not grow with it weighs more here
    residual, grad, kernels = example(numel, 1, "normal", torch.float32), torch.randn(numel), fresh()
    with peak_of_new_memory(residual, grad) as peak:
        if scattered:
            kernels.add(residual, residual, grad.split(numel // 3), k)
        else:
            kernels.accumulate_(residual, grad, k)
    chosen, _ = kernels.select_topk(residual, k)
    assert_same(chosen, SPEC.select_topk(residual, k)[0])
    assert peak.nbytes - chosen.nnz * 8 <= 0.1 * grad.nbytes + 4 * search.SAMPLE


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_read_and_written_once_on_its_way_from_sum_to_mean(scattered: bool, dtype: torch.dtype) -> None:
    numel, k = 6000, 60
    residual, out, kernels = example(numel, 1, "normal", torch.float32), torch.empty(numel), fresh()
    pieces = [part.clone() for part in example(numel, 2, "normal", dtype).split(2500 if scattered else numel)]
    with counted_traffic(residual, out, *pieces) as traffic:
        if scattered:
            kernels.add(out, residual, pieces, k)
        else:
            out = residual
            kernels.accumulate_(residual, pieces[0], k)
        chosen, _ = kernels.select_topk(out, k)
        kernels.retain_(out, chosen)
        kernels.fill_(pieces, chosen)
    # Residual and gradient once, the sample of both, and what is chosen when it is taken out.
    assert traffic.read <= 2 * (numel + search.SAMPLE) + k
    # The residual once, and few entries of it and the gradient; the zeros between them are one more write, by torch.
    assert traffic.written <= numel + 2 * k
    assert torch.equal(torch.cat(pieces), chosen.to_dense().to(dtype))


@pytest.mark.slow
def test_every_kernel_compiles_for_three_generations_of_cards_without_spilling() -> None:
    """Without a card, for sm_80, sm_90 and sm_100; docs/kernels.md has the table."""
    script = Path(__file__).with_name("triton_compile.py")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, str(script), "80", "90", "100"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = [Row(**row) for row in json.loads(done.stdout)]
    assert {row.kernel for row in rows} == {
        "scan", "pick", "narrow", "count_kept", "place_kept", "move_at", "subtract_at", "write_at"
    }  # fmt: skip
    for row in rows:
        assert row.spilled == 0, row
        assert row.shared <= 16 * 1024, row
        # Of 65,536: at least two programs of 256 threads at a time, and four of the scans, which have 64.
        assert row.registers <= 96, row
        assert not row.flushes, row
    assert table(rows) in (Path(__file__).parent.parent / "docs" / "kernels.md").read_text(), table(rows)
