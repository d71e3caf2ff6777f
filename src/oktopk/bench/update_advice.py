"""Which settings of local steps suit a model, a machine and a link."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from oktopk.bench.machine import Machine
from oktopk.bench.planner import Prediction, Scenario, predict_step
from oktopk.config import FORGETFUL, RARELY, Optimizer, UpdateDefaults, rate_factor, update_defaults
from oktopk.front_ends.every import MOST, SHARE


@dataclass(frozen=True)
class UpdateAdvice:
    """How to reduce updates."""

    sent: UpdateDefaults  # what travels
    every: int  # steps between synchronisations
    synchronising_seconds: float
    step_seconds: float  # with its share of a synchronisation
    speedup: float  # over dense
    rate_factor: float  # what to multiply the best learning rate of dense with


def advise_updates(scenario: Scenario, machine: Machine, optimizer: Optimizer) -> UpdateAdvice:
    """As rarely as synchronising takes a tenth of the time needs, and not more rarely."""
    computing = scenario.compute_seconds + _averaging_seconds(scenario, machine)

    def every_of(synchronising: float) -> int:
        return min(MOST, max(1, ceil(synchronising / (SHARE * computing))))

    usual = update_defaults()
    synchronising = _synchronising_seconds(scenario, machine, usual)
    every = every_of(synchronising)
    if every >= RARELY and optimizer in FORGETFUL:
        usual = update_defaults(rarely=True)
        synchronising = _synchronising_seconds(scenario, machine, usual)
        every = max(RARELY, every_of(synchronising))
    step = computing + synchronising / every
    dense = predict_step(scenario, machine, "dense", "float32").step_seconds
    workers = scenario.hosts if scenario.has_hosts else scenario.ranks
    return UpdateAdvice(usual, every, synchronising, step, dense / step, rate_factor(optimizer, workers))


def as_one_vector(scenario: Scenario, sent: UpdateDefaults) -> Scenario:
    """Of what is reduced at a synchronisation: all weights at once, hidden by nothing."""
    return replace(scenario, density=sent.density, bucket_bytes=4 * scenario.numel)


def _synchronising_seconds(scenario: Scenario, machine: Machine, sent: UpdateDefaults) -> float:
    if scenario.ranks == 1:
        return 0.0
    found: Prediction = predict_step(as_one_vector(scenario, sent), machine, sent.algorithm, sent.wire)
    return found.work_seconds + found.link_seconds + found.wait_seconds


def _averaging_seconds(scenario: Scenario, machine: Machine) -> float:
    """What ranks of a host take in every step to average gradients: each hands parts over, and its own mean back."""
    if not scenario.has_hosts:
        return 0.0
    handed = 2 * scenario.of_a_part.numel * (scenario.ranks_per_host - 1)
    return handed * machine.hand_over_per_entry * max(1.0, scenario.ranks_per_core)


def recommend_updates(scenario: Scenario, machine: Machine, optimizer: Optimizer) -> str:
    """The advice, in one sentence."""
    advice = advise_updates(scenario, machine, optimizer)
    sent = advice.sent
    which = f"density {sent.density:g} in turn" if sent.keep_owed == 1 else f"the largest {sent.density:g}"
    else_try = (
        "" if sent.keep_owed == 1 else " Not every network wants its ranks to forget what they owe: try keep_owed=1."
    )
    rate = "that of dense" if advice.rate_factor == 1.0 else f"{advice.rate_factor:.2g} times that of dense"
    return (
        f"under {optimizer} reduce updates: oktopk.local_steps(model, optimizer, every={advice.every}), {which}, "
        f"{sent.wire}, no dense steps, learning rate {rate}. A synchronisation takes "
        f"{advice.synchronising_seconds * 1e3:.3g} ms: {advice.speedup:.2g}x over dense.{else_try}"
    )
