"""Settings of local steps on the workloads that are not the small decoder: how often, how many, how finely, which.

Trains whatever is not in docs/bench/updates-elsewhere.jsonl yet (one seed, two workers), and prints a table of
docs/results.md. Dense, the default and every 4 steps are those of docs/bench/target-*.json, with the same recipes.

python docs/figures/updates_elsewhere.py [AN4_FOLDER]    # without a folder nothing is trained
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kept import add_row, read_rows, train

from oktopk.bench.markdown import markdown_table
from oktopk.bench.target.results import Results, read_target

DOCS = Path(__file__).parent.parent
KEPT = DOCS / "bench" / "updates-elsewhere.jsonl"
SEED = 0
AT_ONCE = 2  # trainings of two ranks wait for each other often enough
WORKLOADS = {"speech": ("--epochs", "12"), "bert": (), "ptb": (), "vision": ()}
KNOWN = {"dense": "ddp dense", "default: in turn, 0.3, codebook2, every step": "updates", "every 4": "updates 4"}
SETTINGS = {
    "every 2": "--every 2",
    "every 8": "--every 8 --keep-owed 1",
    "every 16": "--every 16 --keep-owed 1",
    "density 0.1": "--density 0.1",
    "int8": "--wire int8",
    "the largest 0.05, int8": "--algorithm topka",
    "the largest 0.05 with a global cut, int8": "--algorithm oktopk",
    "every 4, a quarter kept, the largest 0.06": "--every 4 --keep-owed 0.25",
}


def main(an4: Path | None) -> None:
    if an4 is not None:
        make_all(an4)
    kept = read_rows(KEPT)
    rows = [{"setting": name, **{w: known_cell(w, contender) for w in WORKLOADS}} for name, contender in KNOWN.items()]
    rows += [{"setting": name, **{w: cell(w, flags, kept) for w in WORKLOADS}} for name, flags in SETTINGS.items()]
    print("\n".join(markdown_table([row for row in rows if any(row[workload] for workload in WORKLOADS)])))


def make_all(an4: Path) -> None:
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(AT_ONCE) as pool:
        known = [row["command"] for row in read_rows(KEPT)]
        wanted = [(workload, flags) for flags in SETTINGS.values() for workload in WORKLOADS]
        missing = [one for one in wanted if command(*one) not in known]
        for row in pool.map(lambda one: make(*one, an4=an4, scratch=Path(scratch)), missing):
            add_row(KEPT, row)
            print(row["command"], f"{row['quality']:.4f}", file=sys.stderr)


def command(workload: str, flags: str) -> list[str]:
    common = ["--preset", "small", "--workers", "2", "--reduce", "updates", "--seed", str(SEED)]
    return ["oktopk", "train", workload, *common, *WORKLOADS[workload], *flags.split()]


def make(workload: str, flags: str, an4: Path, scratch: Path) -> dict[str, Any]:
    name = f"{abs(hash((workload, flags)))}"
    data = ["--data", str(an4)] if workload == "speech" else []
    where = ["--runs", str(scratch), "--name", name, "--validate-every", "1000"]  # at the end
    found = train([*command(workload, flags), *data, *where], scratch / name / "summary.json")
    return {
        "command": command(workload, flags), "quality": found["validation"][metric_of(workload)],
        "sent": found["bytes_sent"], "dense": found["dense_bytes"],
    }  # fmt: skip


def metric_of(workload: str) -> str:
    return targets(workload).metric


def targets(workload: str) -> Results:
    name = "target-speech-small-an4-epochs-12" if workload == "speech" else f"target-{workload}-small"
    return read_target(DOCS / "bench" / f"{name}.json")


def known_cell(workload: str, contender: str) -> str:
    found = targets(workload)
    trained = [one for one in found.trained if (one.contender, one.hosts, one.seed) == (contender, 2, SEED)]
    return f"{trained[0].final:.4g}"


def cell(workload: str, flags: str, kept: list[dict[str, Any]]) -> str:
    found = [row for row in kept if row["command"] == command(workload, flags)]
    return f"{found[0]['quality']:.4g} ({found[0]['dense'] / found[0]['sent']:.3g}x)" if found else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
