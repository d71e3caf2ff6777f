"""What decides how good local steps are: settings of updates, things left out, and rivals, on the small decoder.

Trains whatever is not in docs/bench/updates-gpt.jsonl yet, prints the tables of docs/results.md, and draws its picture.
Rates are found on WikiText-2's validation text (seed 100); all trainings are judged by its test text (seeds 0, 1, 2).

python docs/figures/updates.py [WIKITEXT2_FOLDER]    # without a folder nothing is trained
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from kept import add_row, read_rows, train

from oktopk.bench.markdown import markdown_table
from oktopk.bench.target.replay import pareto_front
from oktopk.plotting.drawing import write_svg
from oktopk.plotting.frame import Axis, Frame
from oktopk.plotting.lines import Chart, Series, draw_lines

DOCS = Path(__file__).parent.parent
KEPT = DOCS / "bench" / "updates-gpt.jsonl"
SEEDS, TUNING_SEED = (0, 1, 2), 100
MORE_SEEDS = tuple(range(9))  # of who is so close that three do not tell
AT_ONCE = 2  # trainings of two ranks wait for each other often enough
COMMON = ["--preset", "tiny", "--epochs", "6"]
DENSE_LR, LR = 0.016, 0.014


@dataclass(frozen=True)
class Setting:
    """One way to train."""

    name: str
    flags: str = ""
    lr: float = LR
    workers: int = 2
    warmup: int = 2  # epochs of 100 steps in which the rate rises

    @property
    def is_rival(self) -> bool:
        return "--rival" in self.flags

    @property
    def command(self) -> list[str]:
        what = ["bench", "rivals"] if self.is_rival else ["train", "gpt"]
        rates = ["--lr", str(self.lr), "--lr-warmup-epochs", str(self.warmup), "--workers", str(self.workers)]
        return ["oktopk", *what, *COMMON, *rates, *self.flags.split()]


def updates(name: str, flags: str = "", **others: Any) -> Setting:
    return Setting(name, f"--reduce updates {flags}", **others)


def largest(name: str, density: float, algorithm: str = "oktopk", wire: str = "int8") -> Setting:
    return updates(name, f"--algorithm {algorithm} --density {density} --wire {wire}")


def rival(name: str, flags: str, **others: Any) -> Setting:
    return Setting(name, f"--rival {flags}", **others)


DENSE = Setting("dense", "--algorithm dense", DENSE_LR)
OURS = updates("in turn, 0.3, codebook2, every step (default)")
RARE = "largest 0.06, codebook2, every 4 steps, a quarter of what is owed kept (default of every=4)"
RARE_AND_FEWER = "the same, largest 0.03"
RARE_AS_SPARSELOCO = "the same, largest 0.026"
RARE_AND_FEWEST = "the same, largest 0.015"
KEEP, FORGET = "--keep-owed 1", "--keep-owed 0"
RIVALS = {
    "DiLoCo, every 45": "diloco --every 45",
    "DiLoCo, plain mean, every 45": "diloco --every 45 --settings rate 1.0 momentum 0.0",
    "SPARTA, 2.16%": "sparta --settings share 0.0216",
    "SparseLoCo, every step": "sparseloco",
    "SparseLoCo, 160 of 4,096, every step": "sparseloco --settings kept 160",
    "SparseLoCo, every 4": "sparseloco --every 4",
    "SparseLoCo, 42 of 4,096, every 4": "sparseloco --every 4 --settings kept 42",
    "SparseLoCo, every 15": "sparseloco --every 15",
}
RATES = (0.008, 0.014, 0.02)  # of rivals, the best of which is reported
TUNED: Mapping[str, tuple[Setting, ...]] = {
    **{
        name: tuple(rival(name, flags, lr=rate) for rate in RATES) for name, flags in RIVALS.items()
    },
    RARE: tuple(updates(RARE, "--every 4", lr=lr) for lr in (0.02, 0.028, 0.04)),
    RARE_AND_FEWER: tuple(updates(RARE_AND_FEWER, "--every 4 --density 0.03", lr=lr) for lr in (0.02, 0.028, 0.04)),
    RARE_AS_SPARSELOCO: tuple(
        updates(RARE_AS_SPARSELOCO, "--every 4 --density 0.026", lr=lr) for lr in (0.02, 0.028, 0.04)
    ),
    RARE_AND_FEWEST: tuple(
        updates(RARE_AND_FEWEST, "--every 4 --density 0.015", lr=lr) for lr in (0.02, 0.028, 0.04)
    ),
    "the same, nothing kept": tuple(
        updates("the same, nothing kept", f"--every 4 {FORGET}", lr=lr) for lr in (0.014, 0.02, 0.028)
    ),
    "dense, 4 workers": tuple(
        Setting("dense, 4 workers", "--algorithm dense", lr, 4) for lr in (0.011, 0.016, 0.022)
    ),
    "updates, 4 workers": tuple(
        updates("updates, 4 workers", lr=lr, workers=4, warmup=3) for lr in (0.02, 0.028, 0.04)
    ),
    "updates every 4, 4 workers": tuple(
        updates("updates every 4, 4 workers", "--every 4", lr=lr, workers=4, warmup=3) for lr in (0.02, 0.028, 0.04)
    ),
    "the same, largest 0.12, 4 workers": tuple(
        updates("the same, largest 0.12, 4 workers", "--every 4 --density 0.12", lr=lr, workers=4, warmup=3)
        for lr in (0.02, 0.028, 0.04)
    ),
    "the same, largest 0.026, 4 workers": tuple(
        updates("the same, largest 0.026, 4 workers", "--every 4 --density 0.026", lr=lr, workers=4, warmup=3)
        for lr in (0.02, 0.028, 0.04)
    ),
    "SparseLoCo every 4, 4 workers": tuple(
        rival("SparseLoCo every 4, 4 workers", "sparseloco --every 4", lr=lr, workers=4, warmup=3)
        for lr in (0.014, 0.02, 0.028)
    ),
}  # fmt: skip
SWEEPS: Mapping[str, tuple[Setting, ...]] = {
    "every, own weights keep what is owed": (
        OURS, updates("every 2", "--every 2"),
        *(updates(f"every {every}", f"--every {every} {KEEP}") for every in (4, 8, 16)),
    ),
    "every, own weights forget what is owed": (
        *(updates(f"every {every}, forgetting", f"--every {every} {FORGET}", lr=0.02) for every in (1, 2, 4, 8, 16)),
    ),
    "share of what is owed that own weights keep, every 4 steps, largest 0.06": tuple(
        updates(f"{kept:g} kept, rate {lr:g}", f"--every 4 --keep-owed {kept:g}", lr=lr)
        for lr in (0.02, 0.028) for kept in (0, 0.125, 0.25, 0.5)
    ),
    "which entries, every 4 steps, a quarter of what is owed kept": (
        updates("largest 0.015", "--every 4 --density 0.015", lr=0.028),
        updates("largest 0.12", "--every 4 --density 0.12", lr=0.028),
        updates("largest 0.06, int8", "--every 4 --wire int8", lr=0.028),
        updates("largest 0.06 with a global cut (oktopk)", "--every 4 --algorithm oktopk", lr=0.028),
        updates("in turn 0.3", "--every 4 --algorithm randomk --keep-owed 0.25", lr=0.028),
    ),
    "density, in turn, codebook2": (
        *(updates(f"in turn, {density}", f"--density {density}") for density in (0.02, 0.05, 0.1, 0.14)), OURS
    ),
    "wire, in turn, density 0.3": (
        OURS, *(updates(f"0.3, {wire}", f"--wire {wire}") for wire in ("int4", "int8", "float32"))
    ),
    "in turn with as few bytes as SparseLoCo": (
        updates("in turn, 0.13, every 1", "--density 0.13 --every 1"),
        *(updates(f"in turn, 0.13, every {every}", f"--density 0.13 --every {every} {KEEP}") for every in (4, 15)),
    ),
    "the largest instead (oktopk)": (
        *(largest(f"largest, {density}, int8", density) for density in (0.01, 0.02, 0.05, 0.1)),
        largest("largest, 0.11, codebook2", 0.11, wire="codebook2"),
        largest("largest, 0.05, int8, no global cut", 0.05, "topka"),
        largest("mixture, 0.13, int4, 3/4 in turn", 0.13, "oktopk --in-turn 0.75", "int4"),
        updates("by chance, 0.3, codebook2", "--algorithm randomk --order random"),
    ),
    "left out": (
        rival("nothing left out", "ablation"),
        rival("own weights forget what is owed", "ablation --settings keeps 0"),
        rival("forget, and what is owed decays by 0.95", "ablation --settings keeps 0 decay 0.95"),
        rival("what is owed decays by 0.95", "ablation --settings decay 0.95"),
        rival("what is owed decays by 0.99", "ablation --settings decay 0.99"),
    ),
}  # fmt: skip


IN_TURN = [name for name in SWEEPS if "in turn" in name or name.endswith("weights keep what is owed")]
FORGETTING = [name for name in SWEEPS if "forget" in name or "every 4 steps" in name]


def main(data: Path | None) -> None:
    if data is not None:
        make_all(data)
    kept = read_rows(KEPT)
    for name, settings in TUNED.items():
        print(f"\n{name}, seed {TUNING_SEED}, validation text:", end="")
        for one in settings:
            print(*(f" {one.lr:g}: {row['loss']:.3f}" for row in mine(kept, one, TUNING_SEED)), end="")
    best = best_of_all(kept)
    firsts = {
        "2 workers": (DENSE, OURS, *(one for one in best if one.workers == 2)),
        "4 workers": tuple(one for one in best if one.workers == 4),
    }
    for name, sweep in {**firsts, **SWEEPS}.items():
        print(f"\n\n{name}\n")
        print("\n".join(markdown_table([table_row(one, kept) for one in sweep if mine(kept, one)])))
    print(f"\n\nas few bytes as SparseLoCo, {len(MORE_SEEDS)} seeds\n")
    print("\n".join(markdown_table([table_row(one, kept, MORE_SEEDS) for one in close_ones(kept)])))
    draw(kept)


def make_all(data: Path) -> None:
    """First what is tuned, then what is reported."""
    with TemporaryDirectory() as scratch:
        valid, test = Path(scratch) / "valid", Path(scratch) / "test"
        for folder in (valid, test):
            folder.mkdir()
            (folder / "train.txt").symlink_to((data / "train.txt").resolve())
            (folder / "valid.txt").symlink_to((data / f"{folder.name}.txt").resolve())
        for work in (tuning(valid), reported(test)):
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda job: make(*job, scratch=Path(scratch)), work))


def tuning(data: Path) -> Iterator[tuple[Setting, int, Path]]:
    yield from ((one, TUNING_SEED, data) for settings in TUNED.values() for one in settings)


def reported(data: Path) -> Iterator[tuple[Setting, int, Path]]:
    kept = read_rows(KEPT)
    everyone = [DENSE, *best_of_all(kept), *dict.fromkeys(one for sweep in SWEEPS.values() for one in sweep)]
    yield from ((one, seed, data) for seed in MORE_SEEDS for one in close_ones(kept))
    yield from ((one, seed, data) for seed in SEEDS for one in everyone)


def close_ones(kept: list[dict[str, Any]]) -> list[Setting]:
    names = ("SparseLoCo, every 4", RARE_AS_SPARSELOCO, "SparseLoCo, 42 of 4,096, every 4", RARE_AND_FEWEST)
    return [one for one in best_of_all(kept) if one.name in names]


def best_of_all(kept: list[dict[str, Any]]) -> list[Setting]:
    """Of everyone who was tuned, the best rate."""
    known = {
        name: [(row["loss"], one) for one in settings for row in mine(kept, one, TUNING_SEED)]
        for name, settings in TUNED.items()
    }
    return [min(found, key=lambda pair: pair[0])[1] for found in known.values() if found]


def make(setting: Setting, seed: int, data: Path, scratch: Path) -> None:
    if mine(read_rows(KEPT), setting, seed):
        return
    name = f"{abs(hash((setting, seed)))}"
    kept_in = scratch / (f"{name}.jsonl" if setting.is_rival else f"{name}/summary.json")
    where = ["--json", str(kept_in)] if setting.is_rival else ["--runs", str(scratch), "--name", name]
    command = [*setting.command, "--data", str(data), "--seed", str(seed), *where]
    found = train(command, kept_in)
    row = {
        "command": setting.command, "seed": seed, "loss": found["validation"]["loss"],
        "sent": found["bytes_sent"], "dense": found["dense_bytes"],
    }  # fmt: skip
    add_row(KEPT, row)
    print(f"{setting.name}, rate {setting.lr:g}, seed {seed}: {row['loss']:.4f}", file=sys.stderr)


def mine(kept: list[dict[str, Any]], setting: Setting, *seeds: int) -> list[dict[str, Any]]:
    """Trainings of a setting that are reported, or those with these seeds."""
    seeds = seeds or SEEDS
    return [row for row in kept if row["command"] == setting.command and row["seed"] in seeds]


def table_row(setting: Setting, kept: list[dict[str, Any]], seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    found = mine(kept, setting, *seeds)
    losses = [row["loss"] for row in found]
    spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
    return {
        "setting": setting.name, "rate": f"{setting.lr:g}", "loss": f"{fmean(losses):.3f}{spread}",
        "fewer bytes": f"{fewer(found):.1f}x", "seeds": len(losses),
    }  # fmt: skip


def fewer(found: list[dict[str, Any]]) -> float:
    return fmean(row["dense"] / row["sent"] for row in found)


def draw(kept: list[dict[str, Any]]) -> None:
    """Means over seeds: loss over how many times fewer bytes."""
    groups = {
        "updates, own weights keep what is owed": ("c2", [one for sweep in IN_TURN for one in SWEEPS[sweep]]),
        "updates, own weights forget most of it or all": ("c1", [
            *(one for one in best_of_all(kept) if one.workers == 2 and not one.is_rival),
            *(one for sweep in FORGETTING for one in SWEEPS[sweep]),
        ]),
        "updates, the largest or a mixture, kept": ("c0", list(SWEEPS["the largest instead (oktopk)"][:-1])),
        "DiLoCo": ("c4", [one for one in best_of_all(kept) if "diloco" in one.flags]),
        "SPARTA": ("c5", [one for one in best_of_all(kept) if "sparta" in one.flags]),
        "SparseLoCo": ("c3", [one for one in best_of_all(kept) if "sparseloco" in one.flags and one.workers == 2]),
    }  # fmt: skip
    series, points = [], []
    for name, (color, settings) in groups.items():
        known = [found for one in settings if (found := mine(kept, one))]
        dots = [(fewer(found), fmean(row["loss"] for row in found)) for found in known]
        points += dots
        series.append(Series(name, [x for x, _ in dots], [y for _, y in dots], color, "dots"))
    front = pareto_front([(1 / x, y) for x, y in points], lower_is_better=True)
    line = Series(
        "nobody is better with fewer bytes", [1 / x for x, _ in front], [y for _, y in front], "muted", "reference"
    )
    dense = fmean(row["loss"] for row in mine(kept, DENSE))
    level = Series("DDP dense", [min(x for x, _ in points), max(x for x, _ in points)], [dense] * 2, "muted", "dashed")
    axes = Axis("times fewer bytes than dense, whole training", log=True), Axis("loss on the test text")
    write_svg(
        DOCS / "img" / "updates-gpt.svg",
        "Quality over bytes, gpt tiny, 2 workers",
        draw_lines(Chart(*axes, [line, level, *series], frame=Frame(640, 380))),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
