"""Every kernel against the specification, on inputs that break selection code."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from kernel_contract import SPEC, DenseContract, SparseContract, assert_same, differing, example
from oktopk.errors import ConfigError, UnsupportedError
from oktopk.kernels import Kernels, choose, cpu_team
from oktopk.kernels import cpu as cpu_module
from oktopk.kernels.choice import _compiled_obstacle
from oktopk.kernels.cpu import CpuKernels


@pytest.fixture(params=["cpu", "cpu, little room", "cpu, three threads"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """As installed, and with limits so low that small inputs take the paths of large ones."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3 if "threads" in request.param else 1)
    if request.param != "cpu":
        monkeypatch.setattr(cpu_module, "SMALL", 64)
        monkeypatch.setattr(cpu_module, "SAMPLE", 128)
        monkeypatch.setattr(cpu_module, "CHUNK", 50)
        monkeypatch.setattr(cpu_team, "GRAIN", 40)
    yield CpuKernels()
    torch.set_num_threads(threads)


class TestCpuKernels(DenseContract, SparseContract):
    """The compiled kernels."""


@pytest.mark.parametrize("where", ["even", "one place"])
def test_threads_choose_what_one_thread_chooses(where: str) -> None:
    x = example(3 << 20, 8, "normal", torch.float32)
    if where == "one place":  # more than one thread's share of room
        x[100_000:] *= 1e-3
    grad, k, threads = x.roll(5), 30_000, torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        kernels, residual = CpuKernels(), x.clone()
        energy = kernels.accumulate_(residual, grad, k)
        results.append((kernels.select_topk(residual, k)[0], kernels.select_topk(residual, k)[0], energy))
    torch.set_num_threads(threads)
    (first, second, energy), (other_first, other_second, other_energy) = results
    for ours in (second, other_first, other_second):
        assert_same(ours, first)
    assert energy == pytest.approx(other_energy, rel=1e-12)


def test_candidates_take_little_memory() -> None:
    numel, k = 3_000_000, 30_000
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    kernels = CpuKernels()
    kernels.accumulate_(x, x.clone(), k)
    kernels.select_topk(x, k)
    assert kernels.scratch_bytes <= 0.07 * x.nbytes  # the sample included, which does not grow with the gradient


def test_dispatch_chooses_compiled_kernels_on_cpu_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OKTOPK_KERNELS", raising=False)
    choice = choose(torch.device("cpu"))
    assert choice.kernels.name == "cpu" and "numba" in choice.reason
    other = choose(torch.device("meta"))
    assert other.kernels.name == "reference" and "meta" in other.reason


def test_dispatch_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OKTOPK_KERNELS", "reference")
    assert choose(torch.device("cpu")).kernels.name == "reference"
    monkeypatch.setenv("OKTOPK_KERNELS", "cpu")
    assert choose(torch.device("cpu")).kernels.name == "cpu"
    with pytest.raises(UnsupportedError, match="meta"):
        choose(torch.device("meta"))
    monkeypatch.setenv("OKTOPK_KERNELS", "cpuu")
    with pytest.raises(ConfigError, match="Did you mean 'cpu'"):
        choose(torch.device("cpu"))


@pytest.mark.parametrize("broken", ["missing", "failing", "wrong"])
def test_dispatch_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.delenv("OKTOPK_KERNELS", raising=False)
    if broken == "missing":
        monkeypatch.setitem(sys.modules, "oktopk.kernels.cpu", None)
    elif broken == "failing":
        monkeypatch.setattr(cpu_module.CpuKernels, "select_topk", lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(cpu_module.CpuKernels, "select_topk", lambda _, x, k: SPEC.select_topk(x, k - 1))
    _compiled_obstacle.cache_clear()
    try:
        choice = choose(torch.device("cpu"))
        assert choice.kernels.name == "reference"
        reasons = {"missing": "numba is missing", "failing": "ZeroDivisionError", "wrong": "disagree"}
        assert reasons[broken] in choice.reason
    finally:
        monkeypatch.undo()
        _compiled_obstacle.cache_clear()


def test_a_glance_is_good_to_a_few_percent_where_parts_differ_by_far() -> None:
    difference = differing([1_000_000, 90_000, 1_100_000])
    for own, factor in zip(difference.own, (1.0, 30.0, 0.1), strict=True):
        own.mul_(factor)
    squares = float((difference.shared - torch.cat(difference.own)).double().square().sum())
    assert CpuKernels().glance(difference) == pytest.approx(squares, rel=0.05)
