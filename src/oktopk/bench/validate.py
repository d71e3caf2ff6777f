"""Was the planner right? Its predictions against a run of `bench step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from oktopk.bench.machine import Machine
from oktopk.bench.network import Network
from oktopk.bench.planner import Scenario, predict_step
from oktopk.bench.runs import Header
from oktopk.bench.step import StepResult
from oktopk.config import WIRES
from oktopk.errors import ConfigError

BACKWARD_SHARE = 0.4  # of a step without synchronisation, in the stand-in model


@dataclass(frozen=True)
class Comparison:
    """One contender: seconds per step."""

    contender: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative: 0.1 means 10% too high."""
        return self.predicted / self.measured - 1


def compare(header: Header, results: Sequence[StepResult]) -> list[Comparison]:
    """Predict every algorithm and wire format of a run from its floor, its network and its machine's costs."""
    if header.kind != "step" or not header.costs:
        raise ConfigError(f"only runs of `oktopk bench step` can be validated, got one of kind {header.kind!r}.")
    machine, scenario = machine_of(header.costs), scenario_of(header, results)
    compared = []
    for result in results:
        name = "dense float32" if result.contender == "ddp dense" else result.contender
        algorithm, wire, *how = [*name.split(), ""]
        # A plain loop has another floor than the one that was measured, which is DDP's.
        if wire in WIRES and algorithm in machine.per_entry and "optimizer" not in how:
            there = replace(
                scenario,
                bucket_bytes=result.bucket_bytes,
                compute_seconds=result.floor_seconds,
                backward_seconds=BACKWARD_SHARE * result.floor_seconds,
            )
            predicted = predict_step(there, machine, algorithm, wire).step_seconds
            compared.append(Comparison(result.contender, predicted, result.step_seconds))
    return compared


def scenario_of(header: Header, results: Sequence[StepResult]) -> Scenario:
    floor = next(result for result in results if result.contender == "floor")
    return Scenario(
        numel=floor.numel,
        density=floor.density,
        ranks=header.world_size,
        ranks_per_host=header.per_host,
        network=Network(header.bits_per_second, header.latency),
        compute_seconds=floor.step_seconds,
        backward_seconds=BACKWARD_SHARE * floor.step_seconds,
        ranks_per_core=header.world_size / header.machine["cores"],
        bucket_bytes=floor.bucket_bytes,
    )


def machine_of(costs: Mapping[str, Any]) -> Machine:
    expected = {field.name for field in fields(Machine)}
    if set(costs) != expected:
        differing = ", ".join(sorted(set(costs) ^ expected))
        raise ConfigError(f"this run has other costs than this version knows ({differing}): measure it again.")
    return Machine(**costs)
