"""What front ends refuse or limit before anything is sent, and the options they take."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import oktopk
from oktopk.config import ReducerConfig, ReducerOptions
from oktopk.errors import ConfigError, UnsupportedError
from oktopk.front_ends import memory
from oktopk.front_ends.clipping import NormClip
from oktopk.front_ends.memory import HeapGaps, resident_memory, return_gaps
from oktopk.front_ends.parameters import named_parameters, refuse_unsupported
from oktopk.reduction.autotune import AutoConfig
from oktopk.transport import ThreadWorld


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(100, dtype=torch.complex64))


def register(model: nn.Module, **options: Any) -> object:
    return oktopk.register(model, **options)


def wrap(model: nn.Module, **options: Any) -> Any:
    return oktopk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)


@pytest.mark.parametrize("front_end", [register, wrap])
@pytest.mark.parametrize("layer", [nn.Embedding(20, 4, sparse=True), nn.EmbeddingBag(20, 4, sparse=True)])
def test_sparse_gradients_are_refused_before_training(front_end: Any, layer: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match=r"gradient of '1.weight' is a sparse tensor.* sparse=False"):
        front_end(nn.Sequential(nn.Identity(), layer))


def test_a_sparse_layer_that_is_not_trained_is_none_of_our_business() -> None:
    layer = nn.Embedding(20, 4, sparse=True).requires_grad_(False)
    refuse_unsupported(named_parameters(layer), layer, in_one_vector=True)


def test_a_sparse_gradient_of_parameters_without_their_module_is_refused_in_backward() -> None:
    layer = nn.Embedding(20, 4, sparse=True)
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    group = ThreadWorld(1).transports()[0]
    optimizer = oktopk.DistributedOptimizer(inner, layer.named_parameters(), group=group)
    with pytest.raises(UnsupportedError, match="gradient of 'weight' is a sparse tensor"):
        layer(torch.tensor([1, 2])).sum().backward()
    optimizer.close()


@pytest.mark.parametrize("front_end", [register, wrap])
def test_complex_parameters_are_refused_before_training(front_end: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"'phase' is torch.complex64.*view_as_complex"):
        front_end(Complex())


@pytest.mark.parametrize("front_end", [register, wrap])
def test_one_vector_over_several_devices_is_refused_before_training(front_end: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UnsupportedError, match=r"on 2 devices \(cpu, meta\).*use fuse='bucket'"):
        front_end(model, fuse="step")


@pytest.mark.parametrize("front_end", [register, wrap])
@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(front_end: Any, limit: float) -> None:
    with pytest.raises(ConfigError, match=r"norm_clip must be above 0"):
        front_end(nn.Linear(2, 2), norm_clip=limit)


def test_a_gradient_is_clipped_to_its_share_of_the_limit() -> None:
    grads = [torch.full((50,), 3.0), torch.full((50,), -4.0, dtype=torch.float64)]
    norm = (50 * 9 + 50 * 16) ** 0.5
    assert NormClip(2.0, world_size=4).factor(grads) == pytest.approx(2.0 / 2 / norm)
    assert NormClip(2 * norm + 1e-9, world_size=4).factor(grads) == 1.0
    assert NormClip(2.0, world_size=4).factor([]) == 1.0
    assert NormClip(2.0, world_size=4).factor([torch.tensor([float("inf")])]) == 1.0, "for the reducer to find"


def test_the_limit_is_in_the_unit_of_gradients_before_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    grads = [torch.full((100,), 1024 * 3.0)]
    assert NormClip(2.0, 1, scaler).factor(grads) == pytest.approx(NormClip(2.0, 1).factor([torch.full((100,), 3.0)]))


def test_the_limit_of_the_mean_is_in_that_unit_too() -> None:
    model, scaler = nn.Linear(10, 10), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with wrap(model, scaler=scaler, density=1.0, norm_clip_after=0.5) as optimizer:
        scaler.scale(model(torch.ones(1, 10)).sum()).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(0.5, rel=1e-4)


def test_the_typed_options_are_the_fields_of_the_configurations() -> None:
    """What editors complete is what the reducer takes, with the same types."""
    named = {"density", "warmup_steps", "wire"}  # arguments of their own
    classes = [ReducerConfig, AutoConfig, *(config for config, _ in oktopk.ALGORITHMS.values())]
    expected = {
        field.name: get_type_hints(cls)[field.name]
        for cls in classes
        for field in dataclasses.fields(cls)
        if field.name not in named
    }
    assert get_type_hints(ReducerOptions) == expected


def test_freed_memory_is_kept_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("oktopk.front_ends.optimizer.keep_freed_memory", lambda: asked.append(True))
    for options in ({}, {"keep_memory": True}):
        model = nn.Linear(2, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        oktopk.DistributedOptimizer(inner, model, group=ThreadWorld(1).transports()[0], **options).close()
        assert len(asked) == len(options)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_gaps_between_things_in_use_go_back_to_the_system() -> None:
    blocks = _with_gaps()
    before = resident_memory()
    assert return_gaps()
    assert before - resident_memory() > 2**25 and all(float(block[-1]) == 1.0 for block in blocks)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_gaps_go_back_only_when_that_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(memory, "perf_counter", lambda: now)
    return_gaps()
    gaps = HeapGaps()
    blocks = _with_gaps()  # 128 MB more than before: 50 ms to touch them again
    grown = resident_memory()
    now = 1.0
    gaps.step()
    assert resident_memory() > grown - 2**23, "a step of a second is no reason to give back what the next one wants"
    now = 10.0
    gaps.step()
    given_back = resident_memory()
    assert grown - given_back > 2**25 and all(float(block[-1]) == 1.0 for block in blocks)
    now = 100.0
    more = torch.ones(2**20)  # 4 MB are not worth the look
    gaps.step()
    assert resident_memory() >= given_back and float(more[0]) == 1.0


MANY_LENGTHS = """
import torch
from oktopk.front_ends.memory import keep_fewer_compiled, resident_memory, return_gaps

keep_fewer_compiled()
layer = torch.nn.Linear(256, 256).bfloat16()

def after(lengths):
    for length in lengths:
        layer(torch.ones(length, 256, dtype=torch.bfloat16)).sum().backward()
    return_gaps()
    return resident_memory()

before = after(range(100, 200))
print(after(range(200, 500)) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="elsewhere freed memory cannot be told from kept")
def test_operations_compiled_for_lengths_that_do_not_come_again_are_forgotten() -> None:
    done = subprocess.run([sys.executable, "-c", MANY_LENGTHS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**26, "oneDNN kept what it compiled for 300 lengths: 330 MB where nobody tells it"


def test_how_much_stays_compiled_is_left_to_who_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "")
    memory.keep_fewer_compiled()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7" and os.environ["LRU_CACHE_CAPACITY"] == ""


def _with_gaps() -> list[torch.Tensor]:
    """Blocks of 64 kB with gaps between them: they come from the heap, and no two gaps merge."""
    blocks = [torch.ones(2**14) for _ in range(2000)]
    del blocks[::2]
    return blocks


TYPED = """
import torch, oktopk
from oktopk.integrations import LightningCallback

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with oktopk.register(model, density=0.1, min_numel=0, wire="int8", norm_clip=1.0) as reducer:
    oktopk.save(reducer, "folder")
oktopk.Reducer("oktopk", **oktopk.PAPER_LSTM)
oktopk.Reducer(min_numl=0)  # wrong
oktopk.register(model, reduce="updates")  # wrong
oktopk.register(model, densty=0.1)  # wrong
oktopk.register(model, min_numel="many")  # wrong
oktopk.DistributedOptimizer(optimizer, model, fuse="all")  # wrong
oktopk.sparse_allreduce(torch.ones(3), wires=3)  # wrong
oktopk.register_fsdp(model, None, colour="red")  # wrong
LightningCallback(densty=0.1)  # wrong
"""


@pytest.mark.slow
def test_a_type_checker_finds_every_wrong_option_and_no_other(tmp_path: Path) -> None:
    program, root = tmp_path / "program.py", Path(__file__).parent.parent
    program.write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=root)
    found = {int(line.split(":")[1]) for line in ended.stdout.splitlines() if ": error: " in line}
    assert found == {i for i, line in enumerate(TYPED.splitlines(), 1) if line.endswith("# wrong")}, ended.stdout
