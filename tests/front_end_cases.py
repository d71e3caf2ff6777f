"""What the tests of the front ends run on every rank of a real world."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from oktopk.kernels import choose
from oktopk.reduction.gradient import Gradient

STEPS = 12
WIDTH = 24
SPARSE: dict[str, Any] = {"density": 0.1, "min_numel": 0}


class Net(nn.Module):
    """Three layers; one of them may be left out."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.extra, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, with_extra: bool = True) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(x + torch.tanh(self.extra(x)) if with_extra else x)


class Shared(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight
        self.extra.weight.requires_grad_(False)


class Mixed(Net):
    """float32, float64 and bfloat16 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.second.to(torch.float64)
        self.extra.to(torch.bfloat16)

    def forward(self, x: Tensor, with_extra: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x.double())).float()
        return self.last(x + self.extra(x.bfloat16()).float())


@dataclass
class Ledger:
    """Everything this rank handed over, and everything that came back, by name."""

    given: dict[str, Tensor] = field(default_factory=dict)
    applied: dict[str, Tensor] = field(default_factory=dict)

    def watch(self, reducer: oktopk.Reducer) -> None:
        submit = reducer.submit

        def recorded(layout: Any, bucket: Any, unused: Any = ()) -> Any:
            for name, part in Gradient.of(layout, bucket).views().items():
                if name not in unused:
                    self.given[name] = self.given.get(name, 0) + part.double()
            return submit(layout, bucket, unused)

        reducer.submit = recorded  # type: ignore[method-assign]

    def apply(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                name = name.replace("_orig_mod.", "")
                self.applied[name] = self.applied.get(name, 0) + parameter.grad.double().flatten()


@dataclass(frozen=True)
class Result:
    weights: dict[str, Tensor]
    given: dict[str, Tensor]
    applied: dict[str, Tensor]
    residuals: dict[str, Tensor]
    groups: int = 0
    phase: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


def batches(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield torch.randn(4, WIDTH, generator=generator).to(dtype)


def train(
    ddp: nn.Module,
    reducer: oktopk.Reducer,
    steps: int = STEPS,
    forward: Callable[[nn.Module, Tensor, int], Tensor] = lambda m, x, _: m(x),
    dtype: torch.dtype = torch.float32,
    accumulate: int = 1,
    join: bool = False,
) -> Result:
    ledger = Ledger()
    ledger.watch(reducer)
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.05)
    inner = getattr(getattr(ddp, "_orig_mod", ddp), "module", ddp)
    rank = dist.get_rank()
    with ddp.join() if join else contextlib.nullcontext():
        for step, x in enumerate(batches(rank, steps, dtype)):
            sync = (step + 1) % accumulate == 0
            with contextlib.nullcontext() if sync else ddp.no_sync():
                forward(ddp, x, step).float().square().mean().backward()
            if sync:
                ledger.apply(inner)
                optimizer.step()
                optimizer.zero_grad()
    return result_of(inner, reducer, ledger)


def result_of(module: nn.Module, reducer: oktopk.Reducer, ledger: Ledger, **notes: Any) -> Result:
    result = Result(
        {name: p.detach().clone() for name, p in module.named_parameters()},
        ledger.given,
        ledger.applied,
        {name: r.double().flatten() for name, r in reducer.residuals().items()},
        len(reducer._pipeline.grouping.current),
        reducer.last_step.phase,
        notes,
    )
    reducer.close()
    return result


SMALL_BUCKETS = {"bucket_cap_mb": 0.002}  # a few per model


def ddp_case(make: Callable[[], nn.Module] = Net, /, *, options: dict[str, Any] | None = None, **kwargs: Any) -> Result:
    trained = {k: kwargs.pop(k) for k in ("forward", "dtype", "accumulate", "join", "steps") if k in kwargs}
    ddp = DDP(make(), **kwargs)
    return train(ddp, oktopk.register(ddp, **{**SPARSE, **(options or {})}), **trained)


def by_kernels_for_gpus() -> Result:
    """Triton's kernels, interpreted: gradients are staged as if the CPU were a GPU."""
    from interpreter import patched_once

    os.environ["OKTOPK_KERNELS"] = "triton"
    assert choose(torch.device("cpu")).kernels.name == "triton"
    with patched_once():
        return ddp_case(steps=4, options={"fuse": "step"})


def torch_style() -> Result:
    ddp = DDP(Net())
    state = oktopk.HookState(ddp, **SPARSE)
    ddp.register_comm_hook(state, oktopk.hook)
    return train(ddp, state.reducer)


def compiled_outside() -> Result:
    ddp = torch.compile(DDP(Net()), backend="aot_eager")
    return train(ddp, oktopk.register(ddp, **SPARSE))


def compiled_inside() -> Result:
    ddp = DDP(torch.compile(Net(), backend="aot_eager"))
    result = train(ddp, oktopk.register(ddp, **SPARSE))
    return Result(**(vars(result) | {"weights": {n.removeprefix("_orig_mod."): w for n, w in result.weights.items()}}))


def uneven_inputs() -> Result:
    return ddp_case(join=True, steps=STEPS - 4 * dist.get_rank())


def sometimes_without_extra(unused_on: Callable[[int], bool]) -> Callable[..., Tensor]:
    rank = dist.get_rank()
    return lambda m, x, step: m(x, step % 3 != 1 or not unused_on(rank))


def auto() -> Result:
    """All of the trials: every way bucket by bucket, then as one vector; and steps after the decision."""
    ddp = DDP(Net(), **SMALL_BUCKETS)
    reducer = oktopk.register(ddp, "auto", **SPARSE, trial_steps=1, wires=("float32", "int8"))
    fusings: list[str] = []

    def forward(module: nn.Module, x: Tensor, step: int) -> Tensor:
        fusings.append(reducer._pipeline.tuner.fusing)
        return module(x)

    result = train(ddp, reducer, steps=30, forward=forward)
    return replace(result, notes={"fusings": fusings, "decisions": reducer.decisions})


def two_models() -> dict[str, Result]:
    first, second = DDP(Net(1)), DDP(Net(2), **SMALL_BUCKETS)
    reducers = oktopk.register(first, **SPARSE), oktopk.register(second, algorithm="topka", **SPARSE)
    one = train(first, reducers[0])
    return {"first": one, "second": train(second, reducers[1])}


CASES: dict[str, Callable[[], Result]] = {
    "default": lambda: ddp_case(),
    "several buckets": lambda: ddp_case(**SMALL_BUCKETS),
    "one vector": lambda: ddp_case(options={"fuse": "step"}, **SMALL_BUCKETS),
    "torch style": torch_style,
    "static graph": lambda: ddp_case(static_graph=True, **SMALL_BUCKETS),
    "unused on one rank": lambda: ddp_case(
        find_unused_parameters=True, forward=sometimes_without_extra(lambda rank: rank == 1), **SMALL_BUCKETS
    ),
    "unused on all ranks": lambda: ddp_case(
        find_unused_parameters=True, forward=sometimes_without_extra(lambda _: True), **SMALL_BUCKETS
    ),
    "unused, one vector": lambda: ddp_case(
        find_unused_parameters=True, forward=sometimes_without_extra(lambda _: True), options={"fuse": "step"}
    ),
    "never used": lambda: ddp_case(static_graph=True, forward=lambda m, x, _: m(x, False)),
    "bucket views": lambda: ddp_case(gradient_as_bucket_view=True, **SMALL_BUCKETS),
    "shared and frozen": lambda: ddp_case(Shared, **SMALL_BUCKETS),
    "mixed dtypes": lambda: ddp_case(Mixed, **SMALL_BUCKETS),
    "mixed dtypes, one vector": lambda: ddp_case(Mixed, options={"fuse": "step"}, **SMALL_BUCKETS),
    "bfloat16 model": lambda: ddp_case(lambda: Net().to(torch.bfloat16), dtype=torch.bfloat16),
    "accumulation": lambda: ddp_case(accumulate=3, **SMALL_BUCKETS),
    "uneven inputs": uneven_inputs,
    "warm-up": lambda: ddp_case(options={"warmup_steps": 4}, **SMALL_BUCKETS),
    "rounding wire": lambda: ddp_case(options={"wire": "bfloat16"}, **SMALL_BUCKETS),
    "clipped before": lambda: ddp_case(options={"norm_clip": 0.05}, **SMALL_BUCKETS),
    "momentum": lambda: ddp_case(options={"momentum_correction": 0.5}, **SMALL_BUCKETS),
}
COMPILED: dict[str, Callable[[], Result]] = {"compiled outside": compiled_outside, "compiled inside": compiled_inside}


def run_cases(names: list[str]) -> dict[str, Result]:
    return {name: {**CASES, **COMPILED}[name]() for name in names}


def dense_and_plain() -> list[dict[str, Tensor]]:
    """Weights trained by plain DDP, and by ours with algorithm='dense'."""
    weights = []
    for kwargs in ({}, SMALL_BUCKETS):
        for hooked in (False, True):
            ddp = DDP(Net(), **kwargs)
            reducer = oktopk.register(ddp, algorithm="dense") if hooked else None
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
            for x in batches(dist.get_rank(), STEPS):
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                optimizer.step()
            weights.append({name: p.detach().clone() for name, p in ddp.module.named_parameters()})
            if reducer is not None:
                reducer.close()
    return weights


def scaled() -> dict[str, Any]:
    """Training with a GradScaler whose scale changes, one rank overflowing at step 5 in the first layer's bucket."""
    ddp = DDP(Net(), **SMALL_BUCKETS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, growth_factor=2.0)
    reducer = oktopk.register(ddp, scaler=scaler, **SPARSE)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    before, after, scales = {}, {}, []
    for step, x in enumerate(batches(dist.get_rank(), 12)):
        if step == 5:
            before = reducer.residuals()
        optimizer.zero_grad()
        loss = scaler.scale(ddp(x).square().mean())
        scales.append(scaler.get_scale())
        handle = None
        if step == 5 and dist.get_rank() == 1:
            handle = ddp.module.first.weight.register_hook(lambda g: g * float("inf"))
        loss.backward()
        if handle is not None:
            handle.remove()
        scaler.step(optimizer)
        scaler.update()
        if step == 5:
            after = reducer.residuals()
    weights = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
    reducer.close()
    return {"before": before, "after": after, "scales": scales, "weights": weights}


def refusals() -> dict[str, str]:
    """The message of each refusal, by what was refused."""
    said = {}
    said["twice"] = _message(lambda ddp: (oktopk.register(ddp), oktopk.register(ddp)))
    said["fuse"] = _message(lambda ddp: oktopk.register(ddp, fuse="all"))
    said["clipped buckets"] = _message(lambda ddp: oktopk.register(ddp, fuse="bucket", norm_clip=1.0))
    said["option"] = _message(lambda ddp: oktopk.register(ddp, densitty=0.1))

    def python_reducer(ddp: DDP) -> None:
        ddp._use_python_reducer = True
        oktopk.register(ddp)

    said["python_reducer"] = _message(python_reducer)

    def mixed_precision(ddp: DDP) -> None:
        ddp.mixed_precision = object()  # type: ignore[assignment]
        oktopk.register(ddp)

    said["mixed_precision"] = _message(mixed_precision)
    said["bucket"] = _message(lambda ddp: oktopk.HookState(ddp).take(("a", "tuple")))  # type: ignore[arg-type]

    def plain_state(ddp: DDP) -> None:
        ddp.register_comm_hook(oktopk.HookState(ddp.module), oktopk.hook)
        ddp(torch.ones(1, WIDTH)).sum().backward()

    said["plain state"] = _message(plain_state)
    return said


def alone() -> tuple[bool, str]:
    """In a world of one rank: whether gradients are those of the plain module, and the phase."""
    plain, ddp = Net(), DDP(Net())
    reducer = oktopk.register(ddp, **SPARSE)
    for model in (plain, ddp):
        model(torch.ones(2, WIDTH)).square().sum().backward()
    pairs = zip(plain.parameters(), ddp.module.parameters(), strict=True)
    same = all(torch.equal(one.grad, other.grad) for one, other in pairs)
    phase = reducer.last_step.phase
    reducer.close()
    return same, phase


def refused_and_alone() -> tuple[dict[str, str], tuple[bool, str]]:
    return refusals(), alone()


def _message(attempt: Callable[[DDP], object]) -> str:
    try:
        attempt(DDP(Net()))
    except oktopk.OkTopkError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def nonfinite() -> dict[str, Any]:
    """A NaN on one rank raises on all of them with its type, out of backward, and training can go on."""
    ddp = DDP(Net(), **SMALL_BUCKETS)
    reducer = oktopk.register(ddp, **SPARSE)
    seen: dict[str, Any] = defaultdict(str)
    for step, x in enumerate(batches(dist.get_rank(), 6)):
        ddp.zero_grad()
        try:
            ddp(x * float("nan") if step == 3 and dist.get_rank() == 1 else x).square().mean().backward()
        except oktopk.OkTopkError as error:
            seen[f"step {step}"] = f"{type(error).__name__}: {error}"
    seen["finite"] = all(bool(r.isfinite().all()) for r in reducer.residuals().values())
    reducer.close()
    return dict(seen)
