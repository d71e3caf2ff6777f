"""The figures of the page: quality against time, and quality against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from oktopk.bench.target.replay import Goal, Moment, pareto_front
from oktopk.bench.target.results import Results
from oktopk.plotting.drawing import Drawing
from oktopk.plotting.frame import Axis, Frame
from oktopk.plotting.lines import Chart, Series, Style, draw_lines

WIDE = Frame(640, 340)
# Contenders of one family share a colour.
FAMILIES = {
    "ddp": "c7", "powersgd": "c4", "register": "c0", "diloco": "c1", "sparseloco": "c3", "sparta": "c5",
    "updates": "c2",
}  # fmt: skip
STYLES: tuple[Style, ...] = ("line", "dashed", "points", "reference")


def quality_over_time(results: Results, hosts: int, network: str) -> Drawing:
    """Lines: the mean over seeds, as if training ended there; below them the mean of their targets."""
    runs = {name: results.runs(name, hosts, network) for name in results.contenders(hosts)}
    known = {name: mean_run(list(of_seeds.values())) for name, of_seeds in runs.items() if of_seeds}
    series = [_line(name, moments, style) for (name, moments), style in zip(known.items(), _styles(known), strict=True)]
    goal = results.goal(hosts)
    ends = [x for one in series for x in one.x]
    target = Series("target", [min(ends), max(ends)], [goal.value] * 2, "muted", "reference")
    time, quality = Axis("time", "seconds", log=True), Axis(results.metric, log=results.lower_is_better)
    return draw_lines(Chart(time, quality, [*series, target], frame=WIDE))


def quality_over_bytes(results: Results, hosts: int, network: str) -> Drawing:
    """Dots: every seed at the end of its training; a line along those contenders that nobody beats in both."""
    ends = {
        name: [run[-1] for run in results.runs(name, hosts, network).values()] for name in results.contenders(hosts)
    }
    known = {name: moments for name, moments in ends.items() if moments}
    dots = [_dots(family, known) for family in FAMILIES if any(family_of(name) == family for name in known)]
    means = [(mean(m.bytes for m in moments), mean(m.quality for m in moments)) for moments in known.values()]
    front = pareto_front(means, results.lower_is_better)
    line = Series(
        "nobody is better with fewer bytes", [x for x, _ in front], [y for _, y in front], "muted", "reference"
    )
    goal = _goal_line(results.goal(hosts), [x for x, _ in means])
    sent = Axis("sent by one host in the whole training", "bytes", log=True)
    return draw_lines(Chart(sent, Axis(results.metric, log=results.lower_is_better), [line, goal, *dots], frame=WIDE))


def family_of(contender: str) -> str:
    return contender.partition(" ")[0]


def mean_run(runs: Sequence[Sequence[Moment]]) -> list[Moment]:
    """The mean over seeds at every evaluation that all of them have; the start, before any time, is left out."""
    together = zip(*runs, strict=False)
    means = [Moment(at[0].step, *(mean(column) for column in zip(*map(_numbers, at), strict=True))) for at in together]
    return [moment for moment in means if moment.step]


def _numbers(moment: Moment) -> tuple[float, float, float]:
    return moment.quality, moment.seconds, moment.bytes


def _line(name: str, moments: Sequence[Moment], style: Style) -> Series:
    return Series(name, [m.seconds for m in moments], [m.quality for m in moments], FAMILIES[family_of(name)], style)


def _styles(names: Mapping[str, object]) -> list[Style]:
    """Another one for each of a family."""
    before = [sum(family_of(other) == family_of(name) for other in list(names)[:n]) for n, name in enumerate(names)]
    return [STYLES[count % len(STYLES)] for count in before]


def _dots(family: str, ends: Mapping[str, Sequence[Moment]]) -> Series:
    """All contenders of a family, named in the order in which they lie."""
    mine = sorted(
        (name for name in ends if family_of(name) == family), key=lambda name: mean(m.bytes for m in ends[name])
    )
    moments = [moment for name in mine for moment in ends[name]]
    label = ", ".join([mine[0], *(name.removeprefix(f"{family} ") for name in mine[1:])])
    return Series(label, [m.bytes for m in moments], [m.quality for m in moments], FAMILIES[family], "dots")


def _goal_line(goal: Goal, x: Sequence[float]) -> Series:
    return Series("target", [min(x), max(x)], [goal.value] * 2, "muted", "dashed")
