"""`oktopk plan` and `oktopk advise`: what each algorithm should cost, and which one to use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from oktopk.cli.console import bytes_text, console, duration_text, table
from oktopk.config import Optimizer
from oktopk.errors import ConfigError

if TYPE_CHECKING:
    from oktopk.bench.machine import Machine
    from oktopk.bench.planner import Prediction, Scenario
    from oktopk.bench.training_time import Length


@dataclass(frozen=True)
class Plan:
    """Predict the step time of every algorithm and wire format on a cluster that you describe. No network is needed.

    The cost of selecting and packing is measured on this machine, in a few seconds; the network is what you say it is.

    Example:
      oktopk plan --numel 110000000 --ranks 16 --ranks-per-host 4 --network 10gbit --compute 400ms --backward 250ms
        --steps 20000 --warmup-steps 2000
    """

    numel: int = 27_570_000  # parameters
    density: float = 0.01  # fraction of the gradient that sparse algorithms send
    ranks: int = 4  # processes that train together
    ranks_per_host: int = 1  # of them on one machine, behind one network link
    flat: bool = False  # let every rank reduce for itself (hosts=None), also where several are on a machine
    network: str = "1gbit"  # rate of a host's link
    latency: str = "100us"  # one way
    compute: str = "200ms"  # a step without synchronisation
    backward: str = ""  # the part of it that synchronisation can hide behind; default: half of compute
    ranks_per_core: float = 1.0  # above 1, ranks share cores and their work takes longer
    optimizer: Optimizer | None = None  # what steps the weights, for a whole training; None: an answer for each kind
    steps: int = 0  # of the whole training: also say what that takes; 0: only a step
    warmup_steps: int = 0  # dense steps before sparse ones, in a whole training
    scale: bool = False  # also predict worlds of up to 10,000 ranks, and links as slow as the internet
    plot: Path | None = None  # folder for plots of the speed-up by bandwidth and by ranks
    validate: Path | None = None  # a run of `oktopk bench step --json`: print predicted against measured instead

    def __call__(self) -> int:
        if self.validate is not None:
            return _validate(self.validate)
        from oktopk.bench.machine import measure_machine

        scenario, length = self._scenario(), _length(self.steps, self.warmup_steps)
        machine = measure_machine(self.density)
        _print_plan(scenario, machine)
        if length:
            _print_training(scenario, machine, length, self.optimizer)
        if self.scale:
            _print_scales(scenario, machine)
        if self.plot:
            _plot(scenario, machine, self.plot)
        return 0

    def _scenario(self) -> Scenario:
        from oktopk.bench.network import Network, parse_seconds
        from oktopk.bench.planner import Scenario

        compute = parse_seconds(self.compute)
        return Scenario(
            self.numel, self.density, self.ranks, self.ranks_per_host, Network.parse(self.network, self.latency),
            compute, parse_seconds(self.backward) if self.backward else compute / 2, self.ranks_per_core,
            flat=self.flat,
        )  # fmt: skip


@dataclass(frozen=True)
class Advise:
    """Measure the link and this machine, then recommend what to send: gradients or updates, how, and how often.

    Under torchrun (or mpirun, srun) it measures the network between the ranks. Started alone it measures loopback,
    or, with --network and root, an emulated network.

    Example:
      oktopk advise --numel 1000000 --network 100mbit --compute 50ms
    """

    numel: int = 27_570_000  # parameters
    density: float = 0.01  # fraction of the gradient that sparse algorithms send
    hosts: int = 2  # emulated hosts, when no launcher started this
    ranks_per_host: int = 1  # processes on one machine, behind one network link
    network: str = "loopback"  # what to emulate when no launcher started this
    compute: str = "200ms"  # a step without synchronisation
    backward: str = ""  # the part of it that synchronisation can hide behind; default: half of compute
    optimizer: Optimizer | None = None  # what steps the weights; None: an answer for each kind
    steps: int = 0  # of the whole training: also say what that takes; 0: only a step
    warmup_steps: int = 0  # dense steps before sparse ones, in a whole training

    def __call__(self) -> int:
        from oktopk.bench.advise import Link, measure_here, measure_under_launcher
        from oktopk.bench.machine import measure_machine
        from oktopk.bench.network import Network, parse_seconds
        from oktopk.bench.planner import Scenario

        compute, length = parse_seconds(self.compute), _length(self.steps, self.warmup_steps)
        backward = parse_seconds(self.backward) if self.backward else compute / 2
        link: Link | None = measure_under_launcher()
        if link is None:
            link, notes = measure_here(self.hosts, Network.parse(self.network), self.ranks_per_host)
            for note in notes:
                console().print(f"note: {note}", markup=False, soft_wrap=True)
        if link.rank != 0:
            return 0
        machine = replace(measure_machine(self.density), round_seconds=link.round_seconds)
        network = Network(float(f"{link.bits_per_second:.3g}"))
        console().print(
            f"measured: {network.label}/s between ranks, "
            f"{link.round_seconds * 1e6:.0f} us per round, {link.world_size} ranks"
        )
        sizes = self.numel, self.density, link.world_size, self.ranks_per_host
        scenario = Scenario(*sizes, network, compute, backward)
        _print_advice(scenario, machine, self.optimizer)
        if length:
            _print_training(scenario, machine, length, self.optimizer)
        return 0


def _print_advice(scenario: Scenario, machine: Machine, optimizer: Optimizer | None) -> None:
    from oktopk.bench.planner import recommend
    from oktopk.bench.update_advice import recommend_updates

    _print_predictions(scenario, machine)
    said = [f"under sgd reduce gradients: {recommend(scenario, machine)}"] if optimizer in (None, "sgd") else []
    kinds: list[Optimizer] = ["adamw", "lamb"] if optimizer is None else [optimizer] if optimizer != "sgd" else []
    for sentence in [*said, *(recommend_updates(scenario, machine, kind) for kind in kinds)]:
        console().print(sentence, markup=False, soft_wrap=True)


def _length(steps: int, warmup_steps: int) -> Length | None:
    """Of the training that is asked about, if one is."""
    from oktopk.bench.training_time import Length

    if warmup_steps and not steps:
        raise ConfigError("--warmup-steps is about a whole training: give its --steps too.")
    return Length(steps, warmup_steps) if steps else None


def _print_training(scenario: Scenario, machine: Machine, length: Length, optimizer: Optimizer | None) -> None:
    for kind in get_args(Optimizer) if optimizer is None else [optimizer]:
        _print_training_under(kind, scenario, machine, length)


def _print_training_under(optimizer: Optimizer, scenario: Scenario, machine: Machine, length: Length) -> None:
    from oktopk.bench.training_time import DENSE, predict_trainings, recommend_training

    found = predict_trainings(scenario, machine, length, optimizer)
    dense = next(one for one in found if one.name == DENSE)
    rows = [
        {
            "whole training": one.name,
            "time": duration_text(one.seconds),
            "speed-up": round(dense.seconds / one.seconds, 2),
            "dense steps": one.dense_steps,
            "sent per rank": bytes_text(one.bytes_per_rank),
            "fewer": round(dense.bytes_per_rank / max(1.0, one.bytes_per_rank), 1),
        }
        for one in found
    ]
    console().print(table(f"{length.steps:,} steps under {optimizer}", rows))
    console().print(recommend_training(scenario, machine, length, optimizer), markup=False, soft_wrap=True)


def _print_plan(scenario: Scenario, machine: Machine) -> None:
    from oktopk.bench.planner import recommend

    _print_predictions(scenario, machine)
    console().print(recommend(scenario, machine), markup=False, soft_wrap=True)


def _print_predictions(scenario: Scenario, machine: Machine) -> None:
    from oktopk.bench.planner import predict_all

    predictions = predict_all(scenario, machine)
    dense = next(p for p in predictions if p.algorithm == "dense")
    title = (
        f"{scenario.numel:,} parameters, density {scenario.density:g}, {scenario.ranks} ranks{_of_hosts(scenario)}, "
        f"{scenario.network.label}"
    )
    console().print(table(title, [_row(p, dense, scenario) for p in predictions]))


def _of_hosts(scenario: Scenario) -> str:
    if scenario.ranks_per_host == 1:
        return ""
    how = "dense inside" if scenario.has_hosts else "each by itself"
    return f" on {scenario.hosts} hosts ({how})"


def _row(prediction: Prediction, dense: Prediction, scenario: Scenario) -> dict[str, Any]:
    return {
        "algorithm": prediction.algorithm,
        "wire": prediction.wire,
        "step ms": round(prediction.step_seconds * 1e3, 1),
        "speed-up": round(dense.step_seconds / prediction.step_seconds, 2),
        "work ms": round(prediction.work_seconds * 1e3, 1),
        "link ms": round(prediction.link_seconds * 1e3, 1),
        "rounds ms": round(prediction.wait_seconds * 1e3, 1),
        "sent per rank": bytes_text(prediction.bytes_per_rank),
    }


def _print_scales(scenario: Scenario, machine: Machine) -> None:
    from oktopk.bench.planner import CLUSTER_SIZES, LINKS, best_sparse, speedup

    rows = []
    for name, network in LINKS.items():
        row: dict[str, Any] = {"link": name}
        for ranks in CLUSTER_SIZES:
            there = replace(scenario, network=network, ranks=ranks * scenario.ranks_per_host)
            row[f"{there.ranks} ranks"] = f"{speedup(there, machine, best_sparse(there, machine)):.1f}x"
        rows.append(row)
    console().print(table("predicted speed-up of the best sparse choice over dense", rows))


def _plot(scenario: Scenario, machine: Machine, folder: Path) -> None:
    from oktopk.bench.network import Network
    from oktopk.bench.planner import CLUSTER_SIZES, LINKS
    from oktopk.bench.plots import speedup_lines
    from oktopk.plotting.drawing import write_svg
    from oktopk.plotting.frame import Axis

    rates = [10 ** (7 + step / 8) for step in range(33)]
    networks = [Network(rate, scenario.network.latency) for rate in rates]
    by_rate = {
        f"oktopk {wire}": [
            ((network.bits_per_second or 0.0) / 1e9, _gain(replace(scenario, network=network), machine, wire))
            for network in networks
        ]
        for wire in ("float32", "bfloat16", "int8")
    }
    drawing = speedup_lines(by_rate, Axis("Gbit/s", log=True))
    paths = [write_svg(folder / "plan-bandwidth.svg", "Speed-up by bandwidth", drawing)]
    by_ranks = {
        name: [
            (float(n), _gain(replace(scenario, network=net, ranks=n * scenario.ranks_per_host), machine))
            for n in CLUSTER_SIZES
        ]
        for name, net in LINKS.items()
    }
    drawing = speedup_lines(by_ranks, Axis("hosts", log=True))
    paths.append(write_svg(folder / "plan-ranks.svg", "Speed-up of oktopk bfloat16 by cluster size", drawing))
    console().print(f"plots: {', '.join(map(str, paths))}", markup=False, soft_wrap=True)


def _gain(scenario: Scenario, machine: Machine, wire: str = "bfloat16") -> float:
    from oktopk.bench.planner import predict_step, speedup

    return speedup(scenario, machine, predict_step(scenario, machine, "oktopk", wire))


def _validate(path: Path) -> int:
    from oktopk.bench.validate import compare, read_steps

    header, results = read_steps(path)
    compared = compare(header, results)
    shown = [
        {"contender": c.contender, "predicted ms": round(c.predicted * 1e3), "measured ms": round(c.measured * 1e3),
         "error": f"{c.error:+.0%}"}
        for c in compared
    ]  # fmt: skip
    console().print(table(f"{header.world_size} ranks, {header.network}", shown))
    console().print(f"worst error: {max(abs(c.error) for c in compared):.0%}")
    return 0
