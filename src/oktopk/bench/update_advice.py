"""Which settings of local steps suit a model, a machine and a link."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from oktopk.bench.machine import Machine
from oktopk.bench.planner import Prediction, Scenario, predict_step
from oktopk.config import UPDATES_ALGORITHM, update_defaults
from oktopk.front_ends.every import MOST, SHARE

Optimizer = Literal["sgd", "adamw", "lamb"]


@dataclass(frozen=True)
class UpdateAdvice:
    """How to reduce updates."""

    density: float
    wire: str
    every: int  # steps between synchronisations
    synchronising_seconds: float
    step_seconds: float  # with its share of a synchronisation
    speedup: float  # over dense
    rate_factor: float  # what to multiply the best learning rate of dense with


def advise_updates(scenario: Scenario, machine: Machine, optimizer: Optimizer) -> UpdateAdvice:
    """As rarely as synchronising takes a tenth of the time needs, and not more rarely."""
    usual = update_defaults(UPDATES_ALGORITHM)
    whole = replace(scenario, density=usual.density, bucket_bytes=4 * scenario.numel)  # one vector, hidden by nothing
    sent: Prediction = predict_step(whole, machine, UPDATES_ALGORITHM, usual.wire)
    synchronising = sent.work_seconds + sent.link_seconds + sent.wait_seconds if scenario.ranks > 1 else 0.0
    computing = scenario.compute_seconds + _averaging_seconds(scenario, machine)
    every = min(MOST, max(1, ceil(synchronising / (SHARE * computing))))
    step = computing + synchronising / every
    dense = predict_step(scenario, machine, "dense", "float32").step_seconds
    workers = scenario.hosts if scenario.has_hosts else scenario.ranks
    factor = workers**0.5 if optimizer == "adamw" else 1.0
    return UpdateAdvice(usual.density, usual.wire, every, synchronising, step, dense / step, factor)


def _averaging_seconds(scenario: Scenario, machine: Machine) -> float:
    """What ranks of a host take in every step to average gradients: each hands parts over, and its own mean back."""
    if not scenario.has_hosts:
        return 0.0
    handed = 2 * scenario.of_a_part.numel * (scenario.ranks_per_host - 1)
    return handed * machine.hand_over_per_entry * max(1.0, scenario.ranks_per_core)


def recommend_updates(scenario: Scenario, machine: Machine, optimizer: Optimizer) -> str:
    """The advice, in one sentence."""
    advice = advise_updates(scenario, machine, optimizer)
    rate = "that of dense" if advice.rate_factor == 1.0 else f"{advice.rate_factor:.2g} times that of dense"
    return (
        f"under {optimizer} reduce updates: oktopk.local_steps(model, optimizer, every={advice.every}), density "
        f"{advice.density:g} in turn, {advice.wire}, no dense steps, learning rate {rate}. A synchronisation takes "
        f"{advice.synchronising_seconds * 1e3:.3g} ms: {advice.speedup:.2g}x over dense."
    )
