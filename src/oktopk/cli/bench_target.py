"""`oktopk bench target`: who gets a model of a given quality first, on which network?"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from oktopk.cli.arguments import field_types, to_flags
from oktopk.cli.console import bytes_text, console, duration_text, table
from oktopk.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from oktopk.bench.target.pieces import Sweep
    from oktopk.bench.target.progress import Progress as Made
    from oktopk.bench.target.replay import Standing
    from oktopk.bench.target.results import Results

_NOT_OF_THE_SWEEP = ("parts", "runs")
_LINE_SECONDS = 30.0  # between two lines where there is no bar


@dataclass(frozen=True)
class BenchTarget:
    """Train a workload under every contender, and say who reaches a target when on networks of given rates.

    Quality comes from one whole training per contender and seed, without a network: it does not depend on one. Steps of
    each kind (dense, local, with an exchange) are then timed on emulated hosts, and the training is replayed with those
    times. A training of each contender in --checked really crosses every network, to be compared with its replay; with
    --measured all do. Everything finished is kept in --runs, and in the results of --docs: call again to go on, or to
    add contenders, seeds, hosts and networks.
    Needs root and iproute2 (trainings alone do not: --parts trainings).

    Example:
      oktopk bench target gpt --preset tiny --epochs 1 --seeds 1 --network 100mbit --contenders "ddp dense" updates
        --evaluations 4 --seconds 1
    """

    workload: tyro.conf.Positional[str] = "gpt"  # what to train, as in oktopk train: speech, vision, ptb, bert, gpt
    network: tuple[str, ...] = ("10mbit", "100mbit", "1gbit", "10gbit")  # rates of each host's link
    contenders: tuple[str, ...] = ()  # who takes part; default: everyone
    target: str = "dense"  # the quality to reach; dense: what DDP reaches at the end of its recipe, within 1%
    seeds: int = 3  # trainings of each contender
    hosts: tuple[int, ...] = (2,)  # emulated hosts, one rank on each
    preset: str | None = None  # of the workload; None: its first
    data: str | None = None  # of the workload; None: what comes with it
    epochs: int | None = None  # passes over the training set; None: the preset's
    lr: float | None = None  # learning rate of dense, from which that of local optimizers follows; None: the preset's
    lr_warmup_epochs: float | None = None  # linear rise of the rate; None: the preset's
    evaluations: int = 20  # looks at the quality of a training
    measured: bool = False  # let every step of every training cross the network, instead of replaying it
    checked: tuple[str, ...] | None = None  # whose replay is compared with a measured training; None: updates
    seconds: float = 4.0  # of timing per contender and network; slow ones still get four steps of each kind
    parts: tuple[Literal["trainings", "timings", "measured"], ...] = ("trainings", "timings", "measured")  # what to do
    # in this call; the page is made of all that is there
    runs: Path = Path("runs/target")  # where trainings and timings are kept
    docs: Path | None = None  # folder of the page time-to-target.md; figures go to img/ in it, results to bench/

    def __call__(self) -> int:
        from oktopk.bench.target.pieces import pieces, require_emulation, require_workloads
        from oktopk.bench.target.progress import make_all
        from oktopk.bench.target.results import collect

        sweep, target = self._sweep(), _value(self.target)
        known = self._known(sweep)
        if known:
            sweep = replace(sweep, parameters=known.parameters)
        asked = pieces(sweep, self.parts)
        wanted = [rest for piece in asked if (rest := known.rest_of(piece))] if known else asked
        require_emulation(wanted)
        require_workloads(wanted)
        with _progress(len(wanted)) as hear:
            make_all(wanted, hear)
        results = collect(sweep, target, self.command(known), known)
        _print(results)
        if self.docs:
            self._write_page(self.docs, sweep, results)
        return 0

    def command(self, known: Results | None = None) -> str:
        """What makes all of it again, what was known before too: without what one call did, and where it was kept."""
        whole = self._with(known) if known else self
        values = {f.name: getattr(whole, f.name) for f in fields(self) if f.name not in _NOT_OF_THE_SWEEP}
        said = {name: value for name, value in values.items() if value != getattr(type(self), name)}
        workload = said.pop("workload", self.workload)
        return shlex.join(["oktopk", "bench", "target", workload, *to_flags(said, field_types(type(self)))])

    def _with(self, known: Results) -> BenchTarget:
        """The call that makes what this one makes and what is known."""
        from oktopk.bench.network import parse_rate, rate_label
        from oktopk.bench.target.contenders import CONTENDERS, OURS

        ran = {name for hosts in known.hosts for name in known.contenders(hosts)}
        names = tuple(name for name in CONTENDERS if name in {*ran, *(self.contenders or CONTENDERS)})
        crossed = {one.contender for one in known.measured if not known.is_measured}
        checked = tuple(name for name in CONTENDERS if name in {*crossed, *(self.checked or ())})
        rates = {*known.networks.values(), *map(parse_rate, self.network)}
        return replace(
            self, contenders=() if len(names) == len(CONTENDERS) else names, seeds=max(self.seeds, known.seeds),
            hosts=tuple(sorted({*self.hosts, *known.hosts})), network=tuple(map(rate_label, sorted(rates))),
            checked=None if set(checked) <= {OURS} else checked,
        )  # fmt: skip

    def _known(self, sweep: Sweep) -> Results | None:
        """What the page already has of this sweep."""
        from oktopk.bench.target.results import known_results, outdated, read_target

        if self.docs is None:
            return None
        path = self._file(self.docs, sweep)
        known = known_results(path, sweep, self.parts)
        if known:
            text = f"{len(known.trained)} trainings and {len(known.costs)} timings are known from {path}."
            console().print(text, markup=False, soft_wrap=True)
            for name in outdated(read_target(path), sweep):
                then = ", and so once more" if name not in known.names else ": not asked for now, it stays as it was"
                text = f"{name}: trained by another recipe than today's{then}."
                console().print(text, markup=False, soft_wrap=True)
        elif path.is_file():
            other = read_target(path)
            there = {**other.asked, "measured": other.is_measured}
            here = {**sweep.asked, "measured": sweep.measured}
            unlike = [
                f"{name} {there.get(name)!r} and not {value!r}"
                for name, value in here.items()
                if there.get(name) != value
            ]
            raise ConfigError(
                f"{path} has the results of another sweep ({', '.join(unlike)}), which would be lost: ask for the same,"
                " give another --docs, or delete it."
            )
        return known

    def _sweep(self) -> Sweep:
        from oktopk.bench.network import Network
        from oktopk.bench.target.contenders import CONTENDERS, DENSE_NAME, OURS, require_contenders
        from oktopk.bench.target.pieces import Sweep

        preset = self._preset()
        contenders = self.contenders or tuple(CONTENDERS)
        require_contenders(contenders)
        if self.measured and "measured" not in self.parts:
            raise ConfigError(
                f"with --measured every training crosses a network, and --parts {self.parts} leave that out."
            )
        if _value(self.target) is None and DENSE_NAME not in contenders:
            raise ConfigError(f"the target is what dense reaches, so {DENSE_NAME!r} must take part, or give a value.")
        checked = tuple(name for name in (OURS,) if name in contenders) if self.checked is None else self.checked
        return Sweep(
            self.workload, tuple(Network.parse(rate) for rate in self.network), contenders, self.seeds, self.hosts,
            preset, self.data, self.epochs, self.lr, self.lr_warmup_epochs, self.evaluations, self.measured,
            checked, self.seconds, self.runs,
        )  # fmt: skip

    def _write_page(self, docs: Path, sweep: Sweep, results: Results) -> None:
        from oktopk.bench.target.page import write_page
        from oktopk.bench.target.results import write_target

        write_target(self._file(docs, sweep), results)
        console().print(f"page: {write_page(docs)}", markup=False, soft_wrap=True)

    def _preset(self) -> str:
        from oktopk.training.workload import find_classes

        return self.preset or str(find_classes(self.workload)[0]().preset)

    def _file(self, docs: Path, sweep: Sweep) -> Path:
        from oktopk.bench.target.results import result_name

        return docs / "bench" / f"{result_name(self._preset(), sweep.asked)}.json"


def _value(target: str) -> float | None:
    """What to reach; None: what dense does."""
    if target == "dense":
        return None
    try:
        value = float(target)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"a target is a number of the workload's metric, or dense; got {target!r}.")
    return value


@contextmanager
def _progress(pieces: int) -> Iterator[Callable[[Made], None]]:
    """One bar over all pieces on a terminal, now and then a line elsewhere."""
    out = console()
    if not out.is_terminal:
        yield _Lines().hear
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("", total=pieces, left="")

        def hear(made: Made) -> None:
            left = "" if made.remaining is None else f"ETA {duration_text(made.remaining)}"
            at = made.done + (0.0 if made.is_finished else made.share)
            bar.update(task, completed=at, total=made.of, description=made.name, left=left)

        yield hear


class _Lines:
    """A line for every finished piece, and now and then one for the piece under way."""

    def __init__(self) -> None:
        self._said = perf_counter()

    def hear(self, made: Made) -> None:
        if made.is_finished or perf_counter() - self._said > _LINE_SECONDS:
            self._said = perf_counter()
            left = "" if made.remaining is None else f", ETA {duration_text(made.remaining)}"
            what = "done" if made.is_finished else f"{made.share:.0%}"
            console().print(f"[{made.done}/{made.of}] {made.name}: {what}{left}", markup=False, soft_wrap=True)


def _print(results: Results) -> None:
    for hosts in results.hosts:
        goal = results.goal(hosts)
        for network, rate in results.networks.items():
            standings = results.standings(hosts, network)
            if not standings:
                continue
            per_parameter = f"{rate / 8 / results.parameters:.3g} bytes per second and parameter"
            title = (
                f"{results.workload} {results.preset}, {results.parameters:,} parameters, {hosts} hosts, {network} "
                f"({per_parameter}): {results.metric} {goal.value:.4g}"
            )
            console().print(table(title, [_row(one, results.metric) for one in standings]))
    for measured, replayed, off in results.checks():
        took, would = (duration_text(run[-1].seconds) for run in (measured.moments, replayed))
        text = f"{measured.contender}, {measured.hosts} hosts, {measured.network}: measured {took}, replayed {would}"
        console().print(f"{text} ({off:+.1%})", markup=False, soft_wrap=True)


def _row(one: Standing, metric: str) -> dict[str, Any]:
    from oktopk.bench.target.page import quality_text, reached_text

    moments = one.reached if one.has_reached else one.ends
    return {
        "contender": one.contender,
        "target": reached_text(one),
        "steps": round(_mean([moment.step for moment in moments])),
        "time": duration_text(_mean([moment.seconds for moment in moments])),
        "sent per host": bytes_text(_mean([moment.bytes for moment in moments])),
        f"{metric} at the end": quality_text(one),
        "whole training": duration_text(_mean([moment.seconds for moment in one.ends])),
        "sent in it": bytes_text(_mean([moment.bytes for moment in one.ends])),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
