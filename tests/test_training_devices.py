"""Where the trainer computes: on a GPU that is not there, and in precisions that the CPU has too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from devices import GPU, Gpu, OnGpu, fake_gpu, to_gpu
from oktopk.checkpoint import pack, read_rank, unpack
from oktopk.cli.compare import comparison_rows
from oktopk.cli.main import main
from oktopk.errors import ConfigError, UnsupportedError
from oktopk.training.checkpoint import find_checkpoint
from oktopk.training.config import TrainConfig
from oktopk.training.devices import Place, find_place
from oktopk.training.randomness import random_state, restore_random_state
from oktopk.training.workload import make_workload
from trainings import final_weights, resume_alone, strict_rows, toy_config, train_alone, train_as_rank
from trainings import plain_kernels as plain_kernels
from worlds import run_processes

pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.timeout(200)]
SLOW = pytest.mark.slow  # where another case is as good, and transformers, which take seconds to import
WAYS: dict[str, dict[str, Any]] = {
    "gradients": {"norm_clip": 0.5, "accumulate": 2, "analyze_every": 2, "optimizer": "adamw"},
    "updates": {"reduce": "updates", "every": 2, "norm_clip": 0.5, "optimizer": "lamb"},
}


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with fake_gpu() as gpu:
        yield gpu


def same(one: Path, other: Path) -> bool:
    weights, others = final_weights(one), final_weights(other)
    return all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("way", WAYS)
def test_a_training_on_a_gpu_is_one_on_the_cpu_and_says_what_memory_it_took(
    gpu: Gpu, way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"dropout": 0.0}  # the generator of a GPU gives other numbers
    for device in ("cpu", "cuda"):
        train_alone(toy_config(tmp_path, device, device=device, workload_options=settings, **WAYS[way]))
    assert gpu.waits, "nothing was computed there"
    assert same(tmp_path / "cpu", tmp_path / "cuda")
    for row in strict_rows(tmp_path / "cuda" / "steps.jsonl"):
        assert (row["gpu_allocated_bytes"], row["gpu_peak_bytes"], row["gpu_reserved_bytes"]) == (1000, 3000, 4000)
    for name in ("steps.jsonl", "epochs.jsonl", "summary.json"):
        assert "gpu_peak" not in (tmp_path / "cpu" / name).read_text(), "on the CPU there is nothing to say"
        assert "gpu_peak_bytes" in (tmp_path / "cuda" / name).read_text()
    assert main(["inspect", str(tmp_path / "cuda")]) == 0
    rows = comparison_rows([tmp_path / "cpu", tmp_path / "cuda"])
    assert [row.get("GPU peak") for row in rows] == [None, "3.0 kB"]
    assert "GPU 1.0 kB allocated, 3.0 kB peak, 4.0 kB reserved" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("way", "devices"),
    [
        ("gradients", ("cpu", "cuda")),
        ("updates", ("cuda", "cpu")),
        pytest.param("gradients", ("cuda", "cpu"), marks=SLOW),
        pytest.param("updates", ("cpu", "cuda"), marks=SLOW),
    ],
    ids=str,
)
def test_a_run_goes_on_exactly_on_another_device(gpu: Gpu, way: str, devices: tuple[str, str], tmp_path: Path) -> None:
    settings = WAYS[way] | {"workload_options": {"dropout": 0.0}, "epochs": 3}
    train_alone(toy_config(tmp_path, "whole", device="cpu", **settings))
    first, second = devices
    train_alone(toy_config(tmp_path, "cut", device=first, max_steps=4, **settings))
    resume_alone(tmp_path / "cut", device=second, max_steps=None)
    assert same(tmp_path / "whole", tmp_path / "cut")
    rows = strict_rows(tmp_path / "cut" / "steps.jsonl")
    assert [("gpu_peak_bytes" in row) for row in rows] == [
        (d == "cuda") for d in [first] * 4 + [second] * (len(rows) - 4)
    ]


def test_weights_that_are_shared_on_a_gpu_are_saved_once(gpu: Gpu) -> None:
    weight = to_gpu(torch.arange(1000.0))
    once, twice, apart = (
        pack(state) for state in ({"a": weight}, {"a": weight, "b": weight}, {"a": weight, "b": weight[1:]})
    )
    assert len(twice) < len(once) + 500 < len(apart) - 3000
    assert all(torch.equal(part, torch.arange(1000.0)) for part in unpack(twice).values())


WORKLOADS: dict[str, dict[str, Any]] = {
    "vision": {"preset": "small"},
    "gpt": {"preset": "tiny", "workload_options": {"valid_windows": 2}},
    "bert": {"preset": "tiny"},
    "ptb": {"preset": "small"},
    "speech": {"preset": "small", "data": "synth-an4:24"},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name == "bert" else ()) for name in WORKLOADS])
def test_no_workload_mixes_tensors_of_two_devices(gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload: Any = make_workload(TrainConfig(workload=name, batch_size=2, **WORKLOADS[name]))
    torch.manual_seed(0)
    model, place = workload.model(), Place(GPU)
    batches = [batch for batch, _ in zip(workload.batches(0, 0, 1), range(2), strict=False)]
    expected = [float(workload.loss(model, batch).detach()) for batch in batches]
    workload.load_state_dict({})
    torch.manual_seed(0)
    workload.model()  # as many numbers as before
    model.to(place.device)
    losses = [workload.loss(model, place.take(batch)) for batch in batches]
    losses[-1].backward()
    assert all(isinstance(parameter.grad, OnGpu) for parameter in model.parameters() if parameter.grad is not None)
    assert [float(loss.detach()) for loss in losses] == pytest.approx(expected, rel=1e-5)  # memory is aligned otherwise
    workload.evaluate(model, 0, 400 if name != "ptb" else 16)


def test_a_host_without_gpus_says_so_when_one_is_asked_for(tmp_path: Path) -> None:
    assert find_place("auto", rank=0) == find_place("cpu", rank=0) == Place(torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=r"--device cuda wants a GPU, and torch .* sees none.*--device cpu"):
        find_place("cuda", rank=0)
    assert main(["train", "toy:ToyWorkload", "--device", "cuda", "--runs", str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir()), "nothing is begun"


def test_each_rank_of_a_host_has_a_gpu_and_those_beyond_share(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    places = [find_place("auto", rank) for rank in range(3)]
    assert [str(place.device) for place in places] == ["cuda:0", "cuda:1", "cuda:0"]
    assert current == [place.device for place in places]
    assert find_place("cpu", 1).device.type == "cpu"


def test_the_generator_of_a_gpu_is_saved_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.arange(16, dtype=torch.uint8)
    restored: list[Any] = []
    assert "cuda" not in random_state()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    saved = random_state()
    restore_random_state(saved)
    assert restored == [state]
    restore_random_state({name: part for name, part in saved.items() if name != "cuda"})
    assert len(restored) == 1, "a run that comes from the CPU has no such numbers"


NARROW: dict[str, dict[str, Any]] = {"gradients": {}, "updates": {"reduce": "updates", "every": 2, "norm_clip": 9.0}}


@pytest.mark.parametrize("way", NARROW)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_learns_as_float32_does(way: str, precision: str, tmp_path: Path) -> None:
    for name in ("float32", precision):
        train_alone(toy_config(tmp_path, name, precision=name, epochs=6, **NARROW[way]))
    whole, narrow = (strict_rows(tmp_path / name / "epochs.jsonl") for name in ("float32", precision))
    assert narrow[-1]["train_loss"] < 0.7 * narrow[0]["train_loss"]
    if precision == "bfloat16":  # float16 skips the first steps, until it has found its scale
        assert narrow[-1]["train_loss"] == pytest.approx(whole[-1]["train_loss"], rel=0.2)
    assert narrow[0]["train_loss"] != whole[0]["train_loss"], "it was computed in float32"
    weights = final_weights(tmp_path / precision)
    assert {weight.dtype for weight in weights.values()} == {torch.float32, torch.int64}, "weights stay wide"


def scale_after(run: Path, rank: int = 0) -> float:
    return float(read_rank(find_checkpoint(run), rank)["scaler"]["scale"])


@pytest.mark.parametrize("way", NARROW)
def test_an_overflow_in_float16_halves_the_scale_and_a_resumed_run_knows_it(way: str, tmp_path: Path) -> None:
    settings = NARROW[way] | {"precision": "float16", "epochs": 4}
    bad = {"workload_options": {"nan_at": 20}}  # when the scale has been found
    train_alone(toy_config(tmp_path, "good", **settings))
    train_alone(toy_config(tmp_path, "bad", **settings | bad))
    train_alone(toy_config(tmp_path, "cut", max_steps=21, **settings | bad))
    assert scale_after(tmp_path / "bad") == scale_after(tmp_path / "cut") == scale_after(tmp_path / "good") / 2
    resume_alone(tmp_path / "cut", max_steps=None)
    assert same(tmp_path / "bad", tmp_path / "cut")
    assert all(torch.isfinite(weight).all() for weight in final_weights(tmp_path / "bad").values())


def test_a_run_can_go_on_in_another_precision(tmp_path: Path) -> None:
    """What is owed was in the unit of scaled gradients."""
    train_alone(toy_config(tmp_path, "run", precision="float16", max_steps=5))
    owed = read_rank(find_checkpoint(tmp_path / "run"))["synchronisation"]["residuals"]
    resume_alone(tmp_path / "run", precision="float32", max_steps=6)
    later = read_rank(find_checkpoint(tmp_path / "run"))["synchronisation"]["residuals"]
    assert max(part.abs().max() for part in owed.values()) > 1000 * max(part.abs().max() for part in later.values()) > 0


def test_an_analysis_of_scaled_gradients_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"float16 scales"):
        TrainConfig(precision="float16", analyze_every=1)


@pytest.mark.processes
@pytest.mark.parametrize("way", NARROW)
def test_ranks_stay_together_when_one_of_them_overflows(way: str, tmp_path: Path) -> None:
    settings = NARROW[way] | {"precision": "float16", "workload_options": {"nan_at": 9}}  # on rank 0
    run_processes(2, train_as_rank, toy_config(tmp_path, "run", **settings), timeout=100)
    scales = [scale_after(tmp_path / "run", rank) for rank in range(2)]
    skipped = [
        row["step"] for row in strict_rows(tmp_path / "run" / "steps.jsonl") if row.get("reduce", {}).get("skipped")
    ]
    if way == "gradients":
        assert 9 in skipped
        assert scales == [2.0 ** (16 - len(skipped))] * 2
    else:
        assert not skipped
        assert scales[0] < scales[1], "a rank that steps by itself has a scale of its own"
