"""Was the planner right? Its predictions against a run of `bench step`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oktopk.bench.machine import Machine
from oktopk.bench.network import Network
from oktopk.bench.planner import Scenario, predict_step
from oktopk.bench.result_file import Header, read_results
from oktopk.bench.step import StepResult
from oktopk.config import WIRES
from oktopk.errors import ConfigError, DataError

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
    """Predict every algorithm and wire format of a run from its floors, its network and its machine's costs."""
    if header.kind != "step" or not header.costs:
        raise ConfigError(f"only runs of `oktopk bench step` can be validated, got one of kind {header.kind!r}.")
    machine, compared = Machine(**header.costs), []
    for result in results:
        name = "dense float32" if result.contender == "ddp dense" else result.contender
        algorithm, wire, *how = [*name.split(), ""]
        # A plain loop has another floor than the one that was measured, which is DDP's.
        if wire in WIRES and algorithm in machine.per_entry and "optimizer" not in how:
            scenario = replace(scenario_of(header, result), flat="flat" in how)
            predicted = predict_step(scenario, machine, algorithm, wire).step_seconds
            compared.append(Comparison(result.contender, predicted, result.step_seconds))
    return compared


def scenario_of(header: Header, result: StepResult) -> Scenario:
    """What the planner must know to predict a result."""
    return Scenario(
        numel=result.numel,
        density=result.density,
        ranks=header.world_size,
        ranks_per_host=header.per_host,
        network=Network(header.bits_per_second, header.latency),
        compute_seconds=result.floor_seconds,
        backward_seconds=BACKWARD_SHARE * result.floor_seconds,
        ranks_per_core=header.world_size / header.machine["cores"],
        bucket_bytes=result.bucket_bytes,
    )


def read_steps(path: Path) -> tuple[Header, list[StepResult]]:
    """A run of `oktopk bench step`, by this version: others measured other things."""
    header, rows = read_results(path)
    if header.kind != "step":
        raise ConfigError(f"{path} is a run of `oktopk bench {header.kind}`; give one of `oktopk bench step`.")
    try:
        Machine(**header.costs)
        return header, [StepResult(**row) for row in rows]
    except TypeError as error:
        raise DataError(f"{path} was written by another version ({error}): measure it again.") from error
