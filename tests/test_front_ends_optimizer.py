"""`DistributedOptimizer`: equal replicas, nothing lost, and still an optimizer."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

import oktopk
import optimizer_cases as cases
from front_end_cases import Net, Result
from oktopk.errors import ConfigError
from test_front_ends import check_conservation, check_equal
from worlds import run_processes

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def world() -> list[dict[str, Result]]:
    return run_processes(3, cases.run_cases, timeout=400)


@pytest.mark.processes
@pytest.mark.parametrize("case", cases.CASES)
def test_replicas_stay_bitwise_equal(case: str, world: list[dict[str, Result]]) -> None:
    check_equal([rank[case] for rank in world])


@pytest.mark.processes
@pytest.mark.parametrize("case", cases.CASES)
def test_no_gradient_is_lost(case: str, world: list[dict[str, Result]]) -> None:
    check_conservation([rank[case] for rank in world])


@pytest.mark.processes
def test_clipping_before_limits_what_each_rank_gives(world: list[dict[str, Result]]) -> None:
    given = world[0]["clipped before"].given
    norm = sum(float(g.square().sum()) for g in given.values()) ** 0.5
    assert 0 < norm <= 30 * 0.05 / 3**0.5 * (1 + 1e-6)


@pytest.mark.processes
def test_options_agree_with_one_process_that_sees_every_batch() -> None:
    for rank in run_processes(2, cases.same_as_one_process, timeout=200):
        for name, (ours, alone) in rank.items():
            for parameter in ours:
                torch.testing.assert_close(ours[parameter], alone[parameter], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.processes
def test_schedulers_closures_state_and_misuse() -> None:
    for seen in run_processes(2, cases.duties, timeout=200):
        assert seen["closure"] > 0
        assert seen["lr"] == (0.05, 0.05)
        assert seen["state"] == ["param_groups", "state"]
        assert seen["step"] == 2
        assert "more than accumulate=1 backward passes" in seen["twice"]
        assert "zero_grad() between backward and step()" in seen["zero_grad"]
        assert "before wrapping it" in seen["group"]


@pytest.mark.processes
def test_a_skipped_step_of_a_grad_scaler_keeps_residuals() -> None:
    world = run_processes(2, cases.scaled, timeout=200)
    assert all(rank["kept"] for rank in world)
    for name, weight in world[0]["weights"].items():
        assert weight.isfinite().all() and torch.equal(weight, world[1]["weights"][name])


def test_momentum_cannot_count_twice() -> None:
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match="set the optimizer's to 0"):
        oktopk.DistributedOptimizer(inner, model, momentum_correction=0.9)


def test_parameters_without_a_name_are_refused() -> None:
    model, other = Net(), Net()
    inner = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match="8 parameters of the optimizer have no name"):
        oktopk.DistributedOptimizer(inner, model)


def test_folding_needs_a_learning_rate() -> None:
    model = Net()
    optimizer = oktopk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, fold_learning_rate=True)
    with pytest.raises(ConfigError, match="learning rate above 0"):
        model(torch.ones(1, 24)).sum().backward()
    optimizer.reducer.close()


def test_momentum_correction_with_masking_stops_sent_momentum() -> None:
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"momentum_correction": 0.9, "factor_masking": True, "density": 1.0, "min_numel": 0}
    optimizer = oktopk.DistributedOptimizer(inner, model, **options)
    model(torch.ones(2, 24)).sum().backward()
    optimizer.step()
    assert not any(v.any() for v in optimizer.reducer._pipeline.feedback.velocities().values()), (
        "all was sent, so all stops"
    )
    optimizer.reducer.close()


FAULTS = """
import resource, torch, oktopk

model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(4)))
inner = torch.optim.SGD(model.parameters(), lr=1e-6)
optimizer = oktopk.DistributedOptimizer(inner, model, density=0.01, fuse="step", keep_memory=True)
faults = []
for step in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    optimizer.zero_grad()
    model(torch.ones(2, 1500)).sum().backward()
    optimizer.step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[3:]))
optimizer.reducer.close()
"""


@pytest.mark.slow  # it counts pages, and a machine that is busy gives other counts now and then
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep freed memory")
def test_gradients_live_in_memory_that_was_touched_before() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=100)
    assert int(done.stdout) < 8800, "fresh pages in nine steps; gradients of one take 8,800"
