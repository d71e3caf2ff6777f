"""What a person with a GPU runs, tried without one: on the CPU, and on a GPU that is not there."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

from devices import GPU, Gpu, OnGpu, fake_gpu
from interpreter import patched_once
from oktopk.bench import models
from oktopk.bench.gpu import agreement, check, ranks
from oktopk.bench.kernels_device import COPY, measure_on
from oktopk.bench.rank import backend_for
from oktopk.cli.main import main
from oktopk.kernels import ReferenceKernels
from oktopk.kernels.triton import TritonKernels
from oktopk.training import health
from oktopk.training.devices import HOST, Place
from worlds import run_processes

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with fake_gpu() as gpu:
        properties = SimpleNamespace(major=9, minor=0, total_memory=80e9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        yield gpu


@pytest.mark.processes
def test_without_a_gpu_the_check_says_so_and_fails(tmp_path: Path) -> None:
    page = tmp_path / "gpu-check.md"
    page.write_text("an older one")
    done = subprocess.run([".ci/gpu-check", str(page)], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "wants a GPU, and torch" in done.stderr
    assert not page.exists(), "nothing that could be sent in by mistake"


def test_a_benchmark_of_kernels_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cuda"]) == 2
    assert "wants a GPU" in capsys.readouterr().err


def test_every_kernel_is_compared_with_a_copy_and_with_torch(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OKTOPK_KERNELS", "reference")
    for place in (HOST, Place(GPU)):
        result = measure_on(place, 3000, repeats=1)
        rows = {row["work"]: row for row in json.loads(json.dumps(result.to_json()))["rows"]}
        assert {COPY, "the same in plain torch", "torch.topk, gather and clear", "fill"} < rows.keys()
        assert rows[COPY]["nbytes"] == 2 * 4 * 3000 and rows[COPY]["of_copy"] == 1.0
        for row in rows.values():
            assert row["gigabytes_per_second"] * row["seconds"] * 1e9 == pytest.approx(row["nbytes"])
        assert (result.extra_memory is None) == (place is HOST)


@pytest.mark.parametrize("case", [agreement.Case(300, kind, torch.bfloat16) for kind in ("normal", "ties")], ids=str)
def test_kernels_for_gpus_are_held_to_plain_torch(case: agreement.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with patched_once():
        kernels = TritonKernels(CPU, ReferenceKernels())
        assert agreement.disagreements(kernels, CPU, case) == []
        monkeypatch.setattr(kernels, "retain_", lambda residual, sent: 0.0)
        assert "flat: retained" in agreement.disagreements(kernels, CPU, case)


def test_the_specification_agrees_with_itself_on_every_case() -> None:
    for case in agreement.cases((1, 1000)):
        assert agreement.disagreements(ReferenceKernels(), CPU, case) == []


def test_parts_run_on_a_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = check.Trial("cuda", quick=True)
    monkeypatch.setenv("OKTOPK_KERNELS", "reference")
    with pytest.raises(Exception, match="not selected by compiled kernels: OKTOPK_KERNELS=reference"):
        check.PARTS["Machine"](trial)
    assert "30 inputs" in check.PARTS["Kernels against plain torch"](trial)[0]
    assert len(check.PARTS["Memory"](trial)) == 4, "one tensor, and pieces"
    assert any("of a copy" in line for line in check.PARTS["Speed of kernels"](trial))
    monkeypatch.setenv("OKTOPK_KERNELS", "triton")
    assert any("80 GB" in line for line in check.PARTS["Machine"](trial))
    assert gpu.waits


def test_the_doctor_says_which_kernels_serve_which_device_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu, nowhere = health._kernels()
    assert on_cpu.name == "kernels on cpu" and "CpuKernels: compiled by numba" in on_cpu.found
    assert nowhere.name == "kernels on GPUs" and re.match(r"no GPU here, triton \S+ would", nowhere.found)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with fake_gpu():
        found = {one.name: one for one in health._kernels()}
    assert "TritonKernels: interpreted" in found["kernels on a GPU that is not there"].found
    assert "StagedKernels: plain torch: tensors are on mps" in found["kernels on mps"].found
    assert found["kernels on mps"].fix is not None and not found["kernels on mps"].is_needed
    assert "kernels on GPUs" not in found


def test_benchmarks_put_models_and_batches_on_the_device_of_a_rank(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for model, loss in (models.synthetic(3000, 0, place=Place(GPU)), models.workload("vision:small", 0, 1, Place(GPU))):
        loss(model).backward()
        assert all(isinstance(parameter.grad, OnGpu) for parameter in model.parameters())
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert backend_for(HOST, 1) == "gloo"
    assert backend_for(Place(GPU), 1) == "cpu:gloo,cuda:nccl"
    assert backend_for(Place(GPU), 2) == "gloo", "NCCL refuses two ranks on one GPU"


def recorded(numel: int) -> list[dict[str, Any]]:
    """What a rank of `run_processes` emits."""
    records: list[dict[str, Any]] = []
    context: Any = SimpleNamespace(
        rank=dist.get_rank(), world_size=dist.get_world_size(), place=HOST, emit=lambda **record: records.append(record)
    )
    ranks.measure(context, numel)
    return records


@pytest.mark.processes
def test_two_ranks_agree_with_each_other_and_with_the_host() -> None:
    both = run_processes(2, recorded, 5000, timeout=100)
    rows = [check._rank_row(records) for records in zip(*both, strict=True)]
    assert [row["what"] for row in rows] == [*ranks.REDUCERS, *ranks.FRONT_ENDS]
    assert all(row["replicas equal"] == "yes" and "no" not in row.values() for row in rows)
    apart = check._rank_row([both[0][0], both[1][0] | {"digest": "another", "same_as_host": False, "lost": 0.1}])
    assert [apart[name] for name in ("replicas equal", "bits of the host", "nothing lost")] == ["no"] * 3


def test_a_part_that_fails_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(trial: check.Trial) -> list[str]:
        raise ValueError("an illegal memory access was encountered")

    monkeypatch.setattr(check, "PARTS", {"Memory": check.PARTS["Memory"], "Kernels": fail})
    said: list[str] = []
    assert not check.check(check.Trial("cpu", quick=True), tmp_path / "page.md", said.append)
    page = (tmp_path / "page.md").read_text()
    assert said == ["Memory", "Kernels"]
    assert "1 of 2 parts" in page and "FAILED" in page and "an illegal memory access" in page
    assert "not of a GPU" in page


@pytest.mark.slow
def test_the_whole_procedure_runs_on_the_cpu(tmp_path: Path) -> None:
    page = tmp_path / "made" / "page.md"
    assert main(["bench", "gpu", "--device", "cpu", "--quick", "--output", str(page)]) == 0
    assert f"{len(check.PARTS)} of {len(check.PARTS)} parts are as they should be" in page.read_text()
