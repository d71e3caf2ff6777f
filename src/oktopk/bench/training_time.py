"""What a whole training takes: a dense start and sparse steps, or local steps and the mean that ends them.

A step that is 20 times faster makes no training 3 times faster whose first third is dense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from oktopk.bench.machine import Machine
from oktopk.bench.planner import Prediction, Scenario, best_sparse, expected_bytes, predict_step
from oktopk.bench.update_advice import UpdateAdvice, advise_updates, as_one_vector
from oktopk.config import Optimizer
from oktopk.errors import ConfigError
from oktopk.plotting.scales import say

DENSE, UPDATES = "dense", "local steps"
WORTH = 1.1  # dense is recommended unless it takes this much longer: nobody has to look whether it learns as well


@dataclass(frozen=True)
class Length:
    """How long a training is."""

    steps: int
    warmup_steps: int = 0  # of them dense, where gradients are sparsified

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps must be 1 or more, got {self.steps}: those of the whole training.")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ConfigError(f"warmup_steps must be 0 to {self.steps}, all steps, got {self.warmup_steps}.")


@dataclass(frozen=True)
class TrainingTime:
    """One way through a whole training."""

    name: str
    dense_steps: int
    seconds: float
    bytes_per_rank: float


def predict_trainings(
    scenario: Scenario, machine: Machine, length: Length, optimizer: Optimizer = "sgd"
) -> list[TrainingTime]:
    """Dense, the fastest way to send the largest entries, and local steps; the fastest first."""
    dense = predict_step(scenario, machine, "dense", "float32")
    found = [
        _of_gradients(dense, dense, Length(length.steps)),
        _of_gradients(best_sparse(scenario, machine), dense, length),
        _of_updates(scenario, machine, advise_updates(scenario, machine, optimizer), length.steps),
    ]
    return sorted(found, key=lambda one: one.seconds)


def recommend_training(scenario: Scenario, machine: Machine, length: Length, optimizer: Optimizer = "sgd") -> str:
    """The advice, in one sentence."""
    found = predict_trainings(scenario, machine, length, optimizer)
    dense = next(one for one in found if one.name == DENSE)
    best = found[0] if dense.seconds > WORTH * found[0].seconds else dense
    rest = " and ".join(f"{say(one.seconds, 'seconds')} with {one.name}" for one in found if one is not best)
    every = advise_updates(scenario, machine, optimizer).every
    call = f", oktopk.local_steps(model, optimizer, every={every})" if best.name == UPDATES else ""
    what = f"{length.steps:,} steps under {optimizer}"
    return f"{what}: use {best.name}{call}: {say(best.seconds, 'seconds')}, against {rest}."


def _of_gradients(prediction: Prediction, dense: Prediction, length: Length) -> TrainingTime:
    is_dense = prediction is dense
    first, rest = (length.steps, 0) if is_dense else (length.warmup_steps, length.steps - length.warmup_steps)
    seconds = first * dense.step_seconds + rest * prediction.step_seconds
    sent = first * dense.bytes_per_rank + rest * prediction.bytes_per_rank
    after = f" after {first} dense steps" if first and not is_dense else ""
    return TrainingTime(DENSE if is_dense else f"{prediction.name}{after}", first, seconds, sent)


def _of_updates(scenario: Scenario, machine: Machine, advice: UpdateAdvice, steps: int) -> TrainingTime:
    """At the end one dense mean, with nothing to hide behind, unless weights that forget have just been brought
    together."""
    whole = as_one_vector(scenario, advice.sent)
    each = expected_bytes(whole, machine, advice.sent.algorithm, advice.sent.wire)
    seconds, sent = steps * advice.step_seconds, steps // advice.every * each
    if advice.sent.keep_owed == 1 or steps % advice.every:
        final = predict_step(replace(whole, compute_seconds=0.0, backward_seconds=0.0), machine, "dense", "float32")
        seconds, sent = seconds + final.step_seconds, sent + final.bytes_per_rank
    return TrainingTime(UPDATES, 0, seconds, sent)
