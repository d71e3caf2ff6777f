"""Schedules, the cost model's shape, and the local threshold policies."""

from __future__ import annotations

import pytest
import torch

from inputs import KINDS, gradient
from oktopk import exponential_warmup
from oktopk.bench.cost_model import predict
from oktopk.errors import ConfigError
from oktopk.kernels import ReferenceKernels
from oktopk.primitives.selection import ReusedThreshold, gaussian_select
from oktopk.schedule import Schedule, is_due


def test_density_follows_its_schedule() -> None:
    schedule = Schedule({0: 0.25, 500: 0.0625, 1000: 0.01}, warmup_steps=3)
    assert [schedule.density_at(step) for step in (0, 499, 500, 999, 1000, 10**6)] == [
        0.25,
        0.25,
        0.0625,
        0.0625,
        0.01,
        0.01,
    ]
    assert [schedule.is_warmup(step) for step in (0, 2, 3)] == [True, True, False]
    assert Schedule(0.001).k_at(0, 100) == 1 and Schedule(0.01).k_at(5, 1000) == 10


def test_exponential_warmup_ends_at_the_final_density() -> None:
    ramp = exponential_warmup(0.01, stages=4, steps_per_stage=10)
    assert ramp == {0: 0.25, 10: 0.0625, 20: 0.015625, 30: 0.01, 40: 0.01}
    with pytest.raises(ConfigError):
        exponential_warmup(0.01, stages=0)


def test_due_at_the_start_and_then_periodically() -> None:
    assert [step for step in range(10) if is_due(step, 4)] == [0, 4, 8]


def test_a_reused_threshold_is_nudged_towards_k_and_renewed_when_due() -> None:
    policy, kernels = ReusedThreshold(8, 1.1, 1.1, (0.75, 1.25), cap=1.5), ReferenceKernels()
    counts = [policy.select(gradient("normal", 5000, 0, step), 100, kernels)[0].nnz for step in range(20)]
    assert counts[0] == counts[8] == counts[16] == 100
    assert max(counts) <= 150
    before = policy.value
    policy.nudge(140, 100)
    assert policy.value > before
    policy.nudge(10, 100)
    assert policy.value == pytest.approx(before)


def test_a_reused_threshold_is_renewed_when_k_changes_or_nothing_passes() -> None:
    policy, kernels = ReusedThreshold(100, 1.1, 1.1, (0.75, 1.25), cap=1.5), ReferenceKernels()
    assert policy.select(gradient("normal", 5000, 0, 0), 100, kernels)[0].nnz == 100
    assert policy.select(gradient("normal", 5000, 0, 1), 500, kernels)[0].nnz == 500
    assert policy.select(1e-6 * gradient("normal", 5000, 0, 2), 500, kernels)[0].nnz == 500


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("k", [1, 50, 2500])
def test_the_gaussian_threshold_ends_near_k_on_any_input(kind: str, k: int) -> None:
    x = gradient(kind, 5000, 0, 0)
    chosen, threshold = gaussian_select(x, k, 4, 1 / 3, ReferenceKernels())
    most = min(k, int(x.count_nonzero()))
    assert most * 2 / 3 - 1 <= chosen.nnz <= k * 4 / 3
    assert threshold >= 0 and torch.isfinite(torch.tensor(threshold))


def test_predicted_volumes_are_those_of_the_literature() -> None:
    numel, k = 27_569_568, 275_696

    def words(algorithm: str, world_size: int) -> float:
        return predict(algorithm, numel, k, world_size).payload_words

    assert words("dense", 4) == 2 * numel * 3 / 4
    assert words("topka", 8) == 2 * k * 7
    assert words("oktopk", 8) == 6 * k * 7 / 8
    assert words("oktopk", 1000) <= 6 * k
    assert words("gtopk", 8) == pytest.approx(2 * k * 4)
    assert predict("oktopk", numel, k, 1).bytes_received == 0
    assert predict("oktopk", numel, k, 4, "bfloat16").bytes_received < predict("oktopk", numel, k, 4).bytes_received
    with pytest.raises(ConfigError, match="Did you mean"):
        predict("oktop", 10, 1, 2)
