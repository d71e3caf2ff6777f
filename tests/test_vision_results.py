"""The results table: what counts as finished, what counts as good, and where it is written."""

from __future__ import annotations

import json

import pytest

from oktopk.bench.results import BEGIN, END, Outcome, Trial, read_outcome, rows, section, trials, write_section
from oktopk.cli import main
from oktopk.cli.train import Train


def outcome(contender: str, seed: int, value: float, lower: bool = False) -> Outcome:
    density = {"dense": 1.0, "updates": 0.3}.get(contender, 0.02)
    trial = Trial("vision", contender, seed)
    return Outcome(trial, "accuracy", lower, value, 10_000_000, 100_000_000, 60.0, 0.013, density, contender)


def write_run(runs, trial, **changed):
    folder = runs / trial.name
    folder.mkdir(parents=True)
    summary = {
        "metric": "accuracy", "validation": {"accuracy": 0.9, "loss": 0.3}, "bytes_sent": 5, "dense_bytes": 50,
    } | changed  # fmt: skip
    config = {"lower_is_better": False, "density": 0.02, "algorithm": "randomk", "wire": "int4"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "summary.json").write_text(json.dumps(summary))
    steps = [{"wall_seconds": wall, "seconds": {"data": 0.02}} for wall in (1.0, 1.2, 1.4, 30.0, 30.2)]
    (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def test_only_runs_that_ran_to_their_end_count(tmp_path):
    whole, stopped, unseen = (Trial("vision", "oktopk", seed) for seed in range(3))
    write_run(tmp_path, whole)
    write_run(tmp_path, stopped, stopped_by="SIGTERM")
    assert read_outcome(tmp_path, whole).value == 0.9
    # A machine that did something else for half a minute does not count.
    assert read_outcome(tmp_path, whole).seconds == pytest.approx(1.0)
    assert read_outcome(tmp_path, whole).data_share == pytest.approx(0.1)
    assert read_outcome(tmp_path, stopped) is None and read_outcome(tmp_path, unseen) is None


@pytest.mark.parametrize(
    ("value", "lower", "good"),
    [(0.90, False, True), (0.895, False, True), (0.85, False, False), (0.99, False, True), (0.95, True, False)],
)
def test_good_means_two_deviations_or_one_percent_or_better(value, lower, good):
    dense = [outcome("dense", seed, 0.9 + 0.003 * (seed - 1), lower) for seed in range(3)]
    table = rows([*dense, outcome("oktopk", 0, value, lower)])
    assert [row.as_good_as_dense for row in table] == [None, good]
    assert table[0].mean == pytest.approx(0.9) and table[0].deviation == pytest.approx(0.003)


def test_seeds_come_first_so_that_early_tables_are_complete():
    assert [trial.name for trial in trials(["ptb"], ["dense", "oktopk"], [0, 1])] == [
        "ptb-dense-seed0", "ptb-oktopk-seed0", "ptb-dense-seed1", "ptb-oktopk-seed1",
    ]  # fmt: skip


def test_the_page_keeps_what_others_wrote(tmp_path):
    path = tmp_path / "docs" / "results.md"
    text = section(rows([outcome("dense", 0, 0.9), outcome("oktopk", 0, 0.9)]), "oktopk results", 2)
    write_section(path, text)
    path.write_text(path.read_text() + "\n## Speech\n\nmore\n")
    write_section(path, text.replace("0.9", "0.8"))
    page = path.read_text()
    assert page.startswith("# Results") and page.endswith("## Speech\n\nmore\n")
    assert page.count(BEGIN) == page.count(END) == 1
    assert "| oktopk | 0.8 | 1 | yes | 10.0 MB | 10x | 60 s | 1.3% |" in page


def test_updates_are_a_row_beside_gradients_that_says_what_travels(tmp_path):
    write_run(tmp_path, Trial("vision", "updates", 0))
    updates = read_outcome(tmp_path, Trial("vision", "updates", 0))
    assert updates.label == "updates: randomk, density 0.02, int4"
    text = section(rows([outcome("dense", 0, 0.9), outcome("oktopk", 0, 0.9), updates]), "oktopk results", 2)
    assert "density of gradients 0.02" in text
    assert "| updates: randomk, density 0.02, int4 | 0.9 | 1 | yes | 0.0 MB | 10x |" in text


def test_updates_are_trained_as_local_steps(tmp_path, monkeypatch):
    asked = []

    def trained(self):
        asked.append((self.reduce, self.algorithm))
        write_run(tmp_path, Trial("gpt", "updates", 0))
        return 0

    monkeypatch.setattr(Train, "__call__", trained)
    words = ["--workloads", "gpt", "--algorithms", "updates", "--seeds", "0", "--runs", str(tmp_path)]
    assert main(["results", *words, "--out", str(tmp_path / "page.md")]) == 0
    assert asked == [("updates", "randomk")]


def test_a_training_that_is_stopped_stops_the_rest(tmp_path, monkeypatch, capsys):
    started = []

    def stopped(self):
        started.append(self.name)
        write_run(tmp_path, Trial("vision", "dense", 0), stopped_by="SIGTERM")
        return 0

    monkeypatch.setattr(Train, "__call__", stopped)
    assert main(["results", "--workloads", "vision", "--runs", str(tmp_path), "--out", str(tmp_path / "page.md")]) == 1
    assert started == ["vision-dense-seed0"] and "call again to go on" in capsys.readouterr().out


def test_finished_trainings_are_not_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(Train, "__call__", lambda self: 1 / 0)
    write_run(tmp_path, Trial("vision", "dense", 0))
    page = tmp_path / "page.md"
    words = ["--workloads", "vision", "--algorithms", "dense", "--seeds", "0", "--runs", str(tmp_path)]
    assert main(["results", *words, "--out", str(page)]) == 0
    assert "| dense | 0.9 | 1 |" in page.read_text()


def test_unknown_names_are_refused(capsys):
    assert main(["results", "--workloads", "visoin"]) == 2
    assert main(["results", "--algorithms", "dens"]) == 2
    assert main(["results", "--seeds", "a"]) == 2
    assert "Did you mean 'vision'" in capsys.readouterr().err
