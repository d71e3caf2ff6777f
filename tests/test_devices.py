"""Gradients on a GPU, with one that is not there: how often the host waits, on which streams, and what is mixed."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

import oktopk
from device_groups import Devices
from devices import GPU, Gpu, OnGpu, Telling, fake_gpu, to_gpu, to_host
from inputs import gradient
from interpreter import patched_once
from oktopk import Reducer
from oktopk.checkpoint import pack, unpack
from oktopk.errors import NonFiniteError, UnsupportedError
from oktopk.kernels import choice, choose, triton_search
from oktopk.kernels.triton import TritonKernels
from oktopk.reduction import streams
from oktopk.transport import run_world

NUMEL, FLOAT = 3000, torch.float32
LAUNCH = triton_search.launch
MOST_WAITS = 4  # per bucket, on any number of ranks


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    with patched_once():
        yield


@pytest.fixture(autouse=True)
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so low that small gradients are sampled as large ones are."""
    for name, value in {"BLOCK": 512, "SMALL": 64, "SAMPLE": 256, "LINE": 8}.items():
        monkeypatch.setattr(triton_search, name, value)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with fake_gpu() as gpu:
        yield gpu


def reduced(reducer: Reducer, rank: int, step: int, dtype: torch.dtype, scattered: bool, device: str) -> Tensor:
    """The mean of this step, on the host."""
    flat = gradient("normal", NUMEL, rank, step).to(dtype)
    names = {"a": 1000, "b": 500, "c": 1500} if scattered else {"all": NUMEL}
    pieces = [part.clone() for part in flat.split(list(names.values()))]
    if device == "cuda":
        pieces = [to_gpu(piece) for piece in pieces]
    reducer.submit(list(names.items()), pieces if scattered else pieces[0]).wait()
    return torch.cat([to_host(piece) for piece in pieces])


def trained(
    transport: Any,
    algorithm: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    scattered: bool,
    device: str,
    steps: int,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The means of some steps, and what is owed then."""
    with Reducer(algorithm, 0.02, group=transport, **options) as reducer:
        means = [reduced(reducer, transport.rank, step, dtype, scattered, device) for step in range(steps)]
        owed = reducer.residuals()
    assert all(isinstance(residual, OnGpu) == (device == "cuda") for residual in owed.values())
    return means, {name: to_host(residual) for name, residual in owed.items()}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"threshold": "reused", "reestimate_every": 2}, {"wire": "int8", "warmup_steps": 2}, {"in_turn": 0.3}],
    ids=str,
)
def test_the_host_waits_at_most_four_times_for_a_bucket(
    gpu: Gpu, world_size: int, scattered: bool, options: dict[str, Any]
) -> None:
    steps = 3
    run_world(world_size, lambda transport: trained(transport, "oktopk", options, FLOAT, scattered, "cuda", steps))
    waits = [why for thread in gpu.waits.values() for why in thread if why != "synchronize"]  # to look at residuals
    assert waits and len(waits) <= MOST_WAITS * world_size * steps
    assert set(waits) == {"wait"}, "somebody waits elsewhere than in kernels/staging.py"


def test_ranks_of_a_host_wait_for_its_gpus_as_often_and_get_the_bits_of_the_cpu(gpu: Gpu) -> None:
    options = {"hosts": 3, "warmup_steps": 1}
    for scattered in (False, True):
        gpu.waits.clear()
        ours, theirs = (
            run_world(6, lambda t, d=device, s=scattered: trained_on(t, d, s, options)) for device in ("cuda", "cpu")
        )
        for rank, expected in zip(ours, theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(rank, expected, strict=True))
        waits = [why for thread in gpu.waits.values() for why in thread if why != "synchronize"]
        assert set(waits) == {"wait"} and len(waits) <= MOST_WAITS * 6 * 3


def trained_on(transport: Any, device: str, scattered: bool, options: dict[str, Any]) -> list[Tensor]:
    """The means of three steps; residuals of parts are on the host, wherever gradients are."""
    with Reducer("oktopk", 0.02, group=transport, **options) as reducer:
        return [reduced(reducer, transport.rank, step, FLOAT, scattered, device) for step in range(3)]


@pytest.mark.parametrize("scattered", [False, True])
def test_where_gpus_sum_for_their_host_it_waits_as_often_and_nothing_is_staged(
    gpu: Gpu, scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices("cuda", wait=lambda: gpu.wait("wait"))
    devices.use(monkeypatch)
    options = {"hosts": 3, "warmup_steps": 1}
    ranks = run_world(6, lambda t: trained(t, "oktopk", options, FLOAT, scattered, "cuda", steps=3))
    staged = run_world(6, lambda t: trained_on(t, "cpu", scattered, options))
    for (means, _), expected in zip(ranks, staged, strict=True):
        assert all(torch.equal(ours, same) for ours, same in zip(means, ranks[0][0], strict=True))
        for ours, theirs in zip(means, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # sums of three, in another order
    waits = [why for thread in gpu.waits.values() for why in thread if why != "synchronize"]
    assert set(waits) == {"wait"} and len(waits) <= MOST_WAITS * 6 * 3
    assert [verb for verb, _ in devices.done].count("reduce_scatter") == 6 * 3


def test_a_threshold_that_is_corrected_costs_a_wait_for_each_correction(gpu: Gpu) -> None:
    run_world(2, lambda transport: trained(transport, "gaussiank", {}, FLOAT, False, "cuda", 2))
    assert sum(why == "wait" for thread in gpu.waits.values() for why in thread) <= 8 * 2 * 2


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("oktopk", {}),
        ("oktopk", {"threshold": "reused"}),
        ("oktopk", {"in_turn": 0.3}),
        ("oktopk", {"wire": "int8", "warmup_steps": 1}),
        ("oktopk", {"momentum_correction": 0.9, "factor_masking": True}),
        ("oktopk", {"on_nonfinite": "skip"}),
        ("topka", {"global_cut": True}),
        ("topkdsa", {}),
        ("gtopk", {}),
        ("gaussiank", {}),
        ("randomk", {"wire": "bfloat16"}),
        ("dense", {}),
        ("dense", {"wire": "float16"}),
    ],
    ids=str,
)
def test_means_and_residuals_are_those_of_the_cpu_bit_by_bit(gpu: Gpu, algorithm: str, options: dict[str, Any]) -> None:
    def on(device: str, dtype: torch.dtype, scattered: bool) -> Any:
        return run_world(2, lambda t: trained(t, algorithm, options, dtype, scattered, device, steps=2))

    for kind in ((torch.float32, True), (torch.bfloat16, False)):
        for (means, owed), (expected, expected_owed) in zip(on("cuda", *kind), on("cpu", *kind), strict=True):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(means, expected, strict=True))
            assert owed.keys() == expected_owed.keys()
            assert all(torch.equal(owed[name], expected_owed[name]) for name in owed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_precisions_are_served_too(gpu: Gpu, dtype: torch.dtype) -> None:
    ours, theirs = (
        run_world(2, lambda t, d=device: trained(t, "oktopk", {}, dtype, True, d, steps=2))
        for device in ("cuda", "cpu")
    )
    assert all(torch.equal(a, b) for a, b in zip(ours[0][0], theirs[0][0], strict=True))


def test_the_communication_thread_has_a_stream_of_its_own(gpu: Gpu) -> None:
    with Reducer(density=0.02) as reducer:
        reduced(reducer, 0, 0, FLOAT, True, "cuda")
    assert gpu.log == [
        "default records",  # on the thread that has written the gradient
        "own waits for event of default",
        *["own holds memory"] * 3,
        "settled on own",  # so that whoever waits for the future waits for what was told to this stream
    ]


def test_what_a_reducer_hands_out_is_not_overwritten_while_the_caller_works_with_it(gpu: Gpu) -> None:
    with Reducer(density=0.02) as reducer:
        reduced(reducer, 0, 0, FLOAT, True, "cuda")
        gpu.log.clear()
        assert len(reducer.residuals()) == 3
    # It waits for what the caller has told the device, and the memory of its results is the caller's too.
    assert gpu.log == ["default records", "own waits for event of default", *["default holds memory"] * 3]


def test_a_gradient_in_pieces_can_be_freed_when_it_is_reduced(gpu: Gpu) -> None:
    with Reducer(density=0.02) as reducer:
        pieces = [to_gpu(part.clone()) for part in gradient("normal", NUMEL, 0, 0).split(1000)]
        reducer.submit([(str(n), 1000) for n in range(3)], pieces).wait()
        storages = [weakref.ref(piece.untyped_storage()) for piece in pieces]
        del pieces
        reducer.residuals()  # the job is over
        gc.collect()
        assert [storage() for storage in storages] == [None] * 3


def test_kernels_are_launched_on_the_device_of_their_tensors(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: current.append(device) or nullcontext())
    launched: dict[Any, Any] = {(3,): lambda *args, **options: current.append("launched")}
    LAUNCH(launched, 3, None, to_gpu(torch.zeros(2)))
    LAUNCH(launched, 3, torch.zeros(2))
    assert current == [GPU, "launched", "launched"]


def test_futures_know_the_device_of_their_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses a result on a device that a future was not told of."""
    monkeypatch.setattr(torch.futures, "Future", lambda devices: devices)
    assert streams.future_on(torch.device("cpu")) is None
    for name in ("cuda:1", "mps:0", "xpu:0"):
        assert streams.future_on(torch.device(name)) == [torch.device(name)]


def test_pieces_on_several_devices_are_refused(gpu: Gpu) -> None:
    with Reducer(density=0.02, min_numel=0) as reducer:
        pieces = [to_gpu(torch.ones(10)), torch.ones(10)]
        with pytest.raises(UnsupportedError, match="one vector must be on one device, got pieces on"):
            reducer.submit([("a", 10), ("b", 10)], pieces).wait()


def test_a_gradient_scale_that_stays_the_same_costs_nothing(gpu: Gpu) -> None:
    with Reducer(density=0.02) as reducer:
        reduced(reducer, 0, 0, FLOAT, True, "cuda")
        gpu.waits.clear()
        reducer.set_gradient_scale(1.0)
        assert not gpu.waits
        owed = {name: to_host(residual) for name, residual in reducer.residuals().items()}
        reducer.set_gradient_scale(4.0)
        assert all(torch.equal(to_host(r), 4 * owed[name]) for name, r in reducer.residuals().items())


def test_a_bad_gradient_is_found_and_leaves_residuals_alone(gpu: Gpu) -> None:
    with Reducer(density=0.02) as reducer:
        reducer.reduce("w", to_gpu(gradient("normal", NUMEL, 0, 0)))
        owed = to_host(reducer.residuals()["w"])
        bad = gradient("normal", NUMEL, 0, 1)
        bad[7] = float("nan")
        with pytest.raises(NonFiniteError):
            reducer.reduce("w", to_gpu(bad))
        assert torch.equal(to_host(reducer.residuals()["w"]), owed)


def test_residuals_saved_on_the_host_are_resumed_on_the_device(gpu: Gpu) -> None:
    first, second = gradient("normal", NUMEL, 0, 0), gradient("normal", NUMEL, 0, 1)
    with Reducer(density=0.02) as on_cpu, Reducer(density=0.02) as on_gpu:
        on_cpu.reduce("w", first)
        on_gpu.load_state_dict(on_cpu.state_dict())
        theirs, ours = on_cpu.reduce("w", second), on_gpu.reduce("w", to_gpu(second))
        assert isinstance(on_gpu.residuals()["w"], OnGpu)
        assert torch.equal(to_host(ours), theirs)
        assert torch.equal(to_host(on_gpu.residuals()["w"]), on_cpu.residuals()["w"])


def test_devices_without_compiled_kernels_are_served_by_torch_and_told_once(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "_triton_obstacle", lambda device: "nobody has compiled anything for it")
    with Reducer(density=0.02) as reducer, Reducer(density=0.02) as on_cpu:
        for step in range(2):
            grad = gradient("normal", NUMEL, 0, step)
            assert torch.equal(to_host(reducer.reduce("w", to_gpu(grad))), on_cpu.reduce("w", grad))
    told = [record.message for record in caplog.records if "plain torch" in record.message]
    assert len(told) == 1 and "nobody has compiled anything for it" in told[0]


@pytest.fixture
def fresh_obstacles() -> Iterator[None]:
    choice._triton_obstacle.cache_clear()
    yield
    choice._triton_obstacle.cache_clear()


@pytest.mark.usefixtures("fresh_obstacles")
@pytest.mark.parametrize("broken", ["nothing", "missing", "failing", "wrong"])
def test_kernels_for_gpus_are_tried_before_they_are_chosen(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.delenv("OKTOPK_KERNELS", raising=False)
    monkeypatch.setattr(choice, "_is_interpreted", lambda: False)
    monkeypatch.setattr(choice, "_TRIAL", 3000)
    monkeypatch.setattr(choice, "_TRIAL_K", 30)
    retain = TritonKernels.retain_
    if broken == "missing":
        monkeypatch.setitem(sys.modules, "oktopk.kernels.triton", None)
    elif broken == "failing":
        monkeypatch.setattr(TritonKernels, "fill_", lambda *_: 1 / 0)
    elif broken == "wrong":
        monkeypatch.setattr(TritonKernels, "retain_", lambda self, r, sent: retain(self, r, sent.at(torch.tensor([0]))))
    chosen = choose(GPU)
    assert chosen.kernels.name == ("triton" if broken == "nothing" else "reference")
    reasons = {
        "nothing": "compiled by Triton",
        "missing": "oktopk[gpu]",
        "failing": "ZeroDivision",
        "wrong": "disagree",
    }
    assert reasons[broken] in chosen.reason


@pytest.mark.usefixtures("fresh_obstacles")
def test_kernels_for_gpus_can_be_forced_where_they_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OKTOPK_KERNELS", "triton")
    assert choose(torch.device("cpu")).kernels.name == "triton"
    monkeypatch.setattr(choice, "_is_interpreted", lambda: False)
    assert choose(torch.device("cpu")).kernels.name == "cpu", "the host of a GPU has kernels of its own"
    with pytest.raises(UnsupportedError, match="tensors are on meta"):
        choose(torch.device("meta"))


def stepped(transport: Any, device: str, wrap: Any, dtype: torch.dtype = FLOAT) -> list[Tensor]:
    """The weights of a model after some steps of an optimizer that is synchronised by `wrap`."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    for part in (model[0], model[2]):
        for name, parameter in list(part.named_parameters()):
            start = gradient("normal", parameter.numel(), transport.rank, 9).view_as(parameter).to(dtype) / 10
            setattr(part, name, torch.nn.Parameter(to_gpu(start) if device == "cuda" else start))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    handle = wrap(model, optimizer, transport)
    stepping = handle if isinstance(handle, torch.optim.Optimizer) else optimizer
    for step in range(STEPS):
        x = gradient("normal", 240, transport.rank, step).view(8, 30).to(dtype)
        stepping.zero_grad()
        model(to_gpu(x) if device == "cuda" else x).square().mean().backward()
        stepping.step()
    weights = [to_host(parameter.detach()) for parameter in model.parameters()]
    handle.close()
    return weights


@pytest.mark.parametrize(
    ("devices", "warmup_steps"), [(("cuda", "cpu"), 0), (("cpu", "cuda"), 9)], ids=["sparse, to cpu", "dense, to cuda"]
)
def test_local_steps_go_on_exactly_on_another_device(gpu: Gpu, devices: tuple[str, str], warmup_steps: int) -> None:
    """Also with a reduction that has arrived and is not applied yet."""

    def stepped_twice(transport: Any, devices: tuple[str, str]) -> list[Tensor]:
        states: list[Any] = []

        def wrap(model: Any, optimizer: Any, transport: Any) -> Any:
            handle = oktopk.local_steps(
                model, optimizer, 0.05, "int8", algorithm="oktopk", overlap=True, group=transport, min_numel=0,
                warmup_steps=warmup_steps,
            )  # fmt: skip
            for state in states:
                handle.load_state_dict(unpack(state))
            close = handle.close
            handle.close = lambda: (states.append(pack(handle.state_dict())), close())
            return handle

        with Telling():
            stepped(transport, devices[0], wrap)
            return stepped(transport, devices[1], wrap)

    ours, theirs = (run_world(2, lambda t, d=d: stepped_twice(t, d)) for d in (devices, ("cpu", "cpu")))
    for rank, expected in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rank, expected, strict=True))


STEPS = 3
FRONT_ENDS = {
    "DistributedOptimizer": (4, {}),  # waits for each step and rank
    "one vector": (4, {"fuse": "step"}),
    "clipped": (5, {"fuse": "step", "norm_clip": 0.1}),  # a norm is a number that the host must know
    "local_steps": (4, {}),
    "local_steps, the largest": (4, {"algorithm": "oktopk", "wire": "int8", "on_nonfinite": "skip"}),
    "local_steps, 16 bits": (5, {"algorithm": "oktopk", "wire": "int8"}),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_front_ends_train_on_a_gpu_as_on_the_cpu(gpu: Gpu, front_end: str) -> None:
    most, given = FRONT_ENDS[front_end]

    def wrap(model: Any, optimizer: Any, transport: Any) -> Any:
        options: dict[str, Any] = {"density": 0.05, "group": transport, "min_numel": 0, **given}
        if front_end.startswith("local_steps"):
            return oktopk.local_steps(model, optimizer, **options)
        return oktopk.DistributedOptimizer(optimizer, model, **options)

    dtype = torch.bfloat16 if "16 bits" in front_end else FLOAT
    ours, theirs = (run_world(2, lambda t, d=device: stepped(t, d, wrap, dtype)) for device in ("cuda", "cpu"))
    for rank, expected in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rank, expected, strict=True))
    waits = [why for thread in gpu.waits.values() for why in thread]
    assert 2 * 2 * STEPS <= len(waits) <= 2 * (most * STEPS + 1), waits  # and once for the first weights
