"""Settings of local steps on the workloads that are not the small decoder: how often, how many, how finely, which.

Trains whatever is not in docs/bench/updates-elsewhere.jsonl yet, and prints two tables of docs/results.md, three seeds
each: settings with two workers, whose dense and default rows are those of docs/bench/target-*.json, with the same
recipes; and updates that send as few bytes as SparseLoCo every 4 steps.

python docs/figures/updates_elsewhere.py [AN4_FOLDER]    # without a folder nothing is trained
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kept import add_row, read_rows, train

from oktopk.bench.markdown import markdown_table
from oktopk.bench.target.page import spread_text
from oktopk.bench.target.results import read_target

DOCS = Path(__file__).parent.parent
KEPT = DOCS / "bench" / "updates-elsewhere.jsonl"
SEEDS = (0, 1, 2)
NETWORK = "100mbit"  # whose timings say what an interface sends
AT_ONCE = 2  # trainings of two ranks wait for each other often enough
METRICS = {"speech": "WER", "bert": "perplexity", "ptb": "perplexity", "vision": "accuracy"}
SWEEPS = {
    "speech": "target-speech-small-an4-epochs-12", "bert": "target-bert-small", "ptb": "target-ptb-small-lr-40",
    "vision": "target-vision-small-lr-0.24",
}  # fmt: skip
WORKLOADS = {"speech": ("--epochs", "12"), "bert": (), "ptb": ("--lr", "40.0"), "vision": ("--lr", "0.24")}
KNOWN = {"dense": "ddp dense", "default: in turn, 0.3, codebook2, every step": "updates"}
SETTINGS = {
    "every 2": "--every 2",
    "every 8": "--every 8 --keep-owed 1 --mean-over all",
    "every 16": "--every 16 --keep-owed 1 --mean-over all",
    "density 0.1": "--density 0.1",
    "int8": "--wire int8",
    "the largest 0.05, int8": "--algorithm topka",
    "the largest 0.05 with a global cut, int8": "--algorithm oktopk",
    "every 4, in turn": "--every 4 --keep-owed 1 --mean-over all",
    "every 4, a quarter kept, the largest 0.06": "--every 4 --keep-owed 0.25 --mean-over all",
}


@dataclass(frozen=True)
class Recipe:
    """How everyone is trained in one comparison."""

    workload: str
    workers: int
    sweep: str  # in docs/bench/, with the same recipe
    frugal: str  # what sends as few bytes as SparseLoCo every 4 steps
    rate: float | None = None  # of dense; None: the preset's

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.workers} workers" + (f", rate {self.rate:g}" if self.rate else "")

    def command(self, seed: int) -> list[str]:
        how = ("--lr", str(self.rate)) if self.rate else WORKLOADS[self.workload]
        return command(self.workload, self.frugal, how, self.workers, seed)


RECIPES = (  # keeping a quarter (speech; bert, 2 workers) was chosen on tuning data
    Recipe("speech", 2, SWEEPS["speech"], "--every 4 --keep-owed 0.25 --density 0.033"),
    Recipe("speech", 4, SWEEPS["speech"], "--every 4 --keep-owed 0.25 --density 0.02"),
    Recipe("bert", 2, SWEEPS["bert"], "--every 4 --keep-owed 0.25 --density 0.038"),
    Recipe("bert", 4, SWEEPS["bert"], "--every 4 --density 0.24"),
    Recipe("ptb", 2, SWEEPS["ptb"], "--every 4 --density 0.03", 40.0),
    Recipe("ptb", 4, SWEEPS["ptb"], "--every 4 --density 0.03", 40.0),
    Recipe("vision", 2, SWEEPS["vision"], "--every 4 --density 0.03", 0.24),
    Recipe("vision", 4, "target-vision-small-lr-0.48", "--every 4 --density 0.03", 0.48),
)  # fmt: skip
KNOWN_IN_SWEEPS = {"dense": "ddp dense", "SparseLoCo every 4": "sparseloco 4", "updates every 4": "updates 4"}


def main(an4: Path | None) -> None:
    if an4 is not None:
        make_all(an4)
    kept = read_rows(KEPT)
    rows = [{"setting": name, **{w: known_cell(SWEEPS[w], who, 2) for w in WORKLOADS}} for name, who in KNOWN.items()]
    for name, flags in SETTINGS.items():
        commands = {w: [setting_command(w, flags, seed) for seed in SEEDS] for w in WORKLOADS}
        rows.append({"setting": name, **{w: cell(found, kept) for w, found in commands.items()}})
    print("\n".join(markdown_table([row for row in rows if any(row[workload] for workload in WORKLOADS)])))
    print("\n".join(markdown_table([row_of(one, kept) for one in RECIPES])))


def make_all(an4: Path) -> None:
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(AT_ONCE) as pool:
        known = [row["command"] for row in read_rows(KEPT)]
        wanted = [one.command(seed) for seed in SEEDS for one in RECIPES]
        wanted += [
            setting_command(one, flags, seed) for seed in SEEDS for flags in SETTINGS.values() for one in WORKLOADS
        ]
        missing = [one for one in wanted if one not in known]
        for row in pool.map(lambda one: make(one, an4, Path(scratch)), missing):
            add_row(KEPT, row)
            print(row["command"], f"{row['quality']:.4f}", file=sys.stderr)


def setting_command(workload: str, flags: str, seed: int) -> list[str]:
    return command(workload, flags, WORKLOADS[workload], 2, seed)


def command(workload: str, flags: str, how: Sequence[str], workers: int, seed: int) -> list[str]:
    common = ["--preset", "small", "--workers", str(workers), "--reduce", "updates", "--seed", str(seed)]
    return ["oktopk", "train", workload, *common, *how, *flags.split()]


def make(command: list[str], an4: Path, scratch: Path) -> dict[str, Any]:
    workload, name = command[2], f"{abs(hash(tuple(command)))}"
    data = ["--data", str(an4)] if workload == "speech" else []
    where = ["--runs", str(scratch), "--name", name, "--validate-every", "1000"]  # at the end
    found = train([*command, *data, *where], scratch / name / "summary.json")
    return {
        "command": command, "quality": found["validation"][METRICS[workload]],
        "sent": found["bytes_sent"], "dense": found["dense_bytes"],
    }  # fmt: skip


def cell(commands: list[list[str]], kept: list[dict[str, Any]]) -> str:
    found = [row for row in kept if row["command"] in commands]
    if len(found) < len(commands):
        return ""
    return quality_text([row["quality"] for row in found], found[0]["dense"] / found[0]["sent"])


def row_of(recipe: Recipe, kept: list[dict[str, Any]]) -> dict[str, Any]:
    """Those of the sweep, and those that send less."""
    return {
        "training": recipe.name,
        **{name: known_cell(recipe.sweep, who, recipe.workers) for name, who in KNOWN_IN_SWEEPS.items()},
        "with as few bytes": cell([recipe.command(seed) for seed in SEEDS], kept),
        "by": f"`{recipe.frugal}`",
    }


def known_cell(sweep: str, contender: str, workers: int) -> str:
    """Of a sweep; bytes, known where steps were timed, are those of an interface, headers included."""
    path = DOCS / "bench" / f"{sweep}.json"
    if not path.is_file():
        return ""
    found = read_target(path)
    finals = [one.final for one in found.trained if (one.contender, one.hosts) == (contender, workers)]
    if len(finals) < len(SEEDS):
        return ""
    runs, dense = (found.runs(who, workers, NETWORK) for who in (contender, "ddp dense"))
    return quality_text(finals, dense[0][-1].bytes / runs[0][-1].bytes if runs and dense else None)


def quality_text(quality: list[float], fewer: float | None) -> str:
    return spread_text(quality) + (f" ({fewer:.3g}x)" if fewer else "")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
