"""Reports: what is read from a run, what is drawn from it, and that nothing missing breaks the page."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from oktopk.cli import main
from oktopk.errors import ConfigError, DataError
from oktopk.plotting.scales import Scale, plain, say, scale_for
from oktopk.report import latest_run, read_run, write_report
from oktopk.report.figures import kind_of, sections
from oktopk.report.numbers import parts, progress, smooth, switch, thin, totals, world_size
from run_directories import PARAMETERS, write_lines, write_run

FIGURES = (
    "loss-step", "loss-time", "loss-bytes", "metric-step", "metric-time", "metric-bytes", "sparsity", "counts",
    "thresholds", "residual", "imbalance", "kinds", "bounds", "spent", "messages", "phases",
    "communication", "mean-phases", "memory", "histogram", "overlap", "xi",
)  # fmt: skip
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Checker(HTMLParser):
    """Every element is closed, every id is unique, nothing points outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            self.ids += [value] if name == "id" and value else []
            self.outside += (
                [value] if name in ("src", "href") and value and not value.startswith(("#", "data:")) else []
            )

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(*runs: Path) -> str:
    text = write_report(runs, runs[0].parent / "page.html").read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert checker.outside == []
    shown = re.sub(r"<head>.*?</head>|<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf|infinity|none|null|undefined)\b", shown, flags=re.IGNORECASE)
    return text


def drawn(text: str) -> set[str]:
    return set(re.findall(r'<figure id="([\w-]+)">', text))


def test_a_complete_run_has_every_figure(tmp_path: Path) -> None:
    assert drawn(page_of(write_run(tmp_path / "run"))) == set(FIGURES)


def test_the_memory_of_a_gpu_is_shown_where_one_was_used_and_nowhere_else(tmp_path: Path) -> None:
    plain_run, on_gpu = (write_run(tmp_path / name, steps=60, warmup=20) for name in ("plain", "on-gpu"))
    lines = [json.loads(line) for line in (on_gpu / "steps.jsonl").read_text().splitlines()]
    memory = {
        "gpu_allocated_bytes": 2_000_000_000,
        "gpu_peak_bytes": 7_000_000_000,
        "gpu_reserved_bytes": 9_000_000_000,
    }
    write_lines(on_gpu / "steps.jsonl", [line | memory for line in lines])
    alone, without, compared = page_of(on_gpu), page_of(plain_run), page_of(plain_run, on_gpu)
    assert "gpu-memory" in drawn(alone) & drawn(compared)
    assert re.search(
        r"Peak GPU memory</h2><p class=.value.>7(\.0)? GB</p><p class=.note.>rank 0; 9(\.0)? GB reserved", alone
    )
    assert "GPU" not in without
    assert "peak GPU memory</th>" in compared


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        ({"analyze_every": 0}, {"histogram", "overlap", "xi", "kinds"}),
        ({"validate_every": 0}, {"metric-step", "metric-time", "metric-bytes"}),
        ({"algorithm": "dense"}, {"counts", "thresholds", "imbalance", "histogram", "overlap", "xi", "kinds"}),
        ({"warmup": 10_000}, {"counts", "thresholds", "imbalance", "histogram", "overlap", "xi", "kinds"}),
        ({"warmup": 0}, set()),
        ({"steps": 1, "warmup": 0}, {"phases", "communication"}),
        ({"steps": 2, "warmup": 1}, set()),
        ({"steps": 0}, set(FIGURES)),
        ({"world_size": 2, "steps": 3000, "steps_per_epoch": 300}, set()),
        ({"world_size": 1}, {"loss-bytes", "metric-bytes", "bounds", "messages"}),
    ],
    ids=[
        "no analysis",
        "no validation",
        "dense",
        "all warm-up",
        "sparse at once",
        "1 step",
        "2 steps",
        "0 steps",
        "long",
        "alone",
    ],
)
def test_what_a_run_lacks_is_said_and_nothing_breaks(tmp_path: Path, options: dict[str, Any], absent: set[str]) -> None:
    text = page_of(write_run(tmp_path / "run", **options))
    assert set(FIGURES) - drawn(text) == absent
    assert len(re.findall(r'<p class="absent">\w', text)) == len(absent)


def test_a_run_with_only_a_configuration_has_a_page(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"algorithm": "oktopk"}')
    assert "No steps were recorded yet" in page_of(run)


def test_a_run_that_never_left_warm_up_says_so(tmp_path: Path) -> None:
    assert "All 20 steps were dense" in page_of(write_run(tmp_path / "run", steps=20, warmup=100))


def test_the_transition_is_marked_at_the_first_sparse_step(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", warmup=40))
    assert switch(run) == 40
    descriptions = {f.id: f.drawing.description for s in sections([run]) for f in s.figures if f.drawing}
    for name in ("loss-step", "metric-step", "sparsity", "bounds", "spent", "phases"):
        assert "dense → sparse at 40" in descriptions[name]
    sent = progress(run).sent[40]
    assert f"dense → sparse at {plain(sent)}" in descriptions["loss-bytes"]


def test_there_is_no_transition_in_runs_of_one_phase(tmp_path: Path) -> None:
    assert switch(read_run(write_run(tmp_path / "dense", algorithm="dense"))) is None
    assert switch(read_run(write_run(tmp_path / "sparse", warmup=0))) is None


def test_totals_agree_with_the_records(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", steps=50, warmup=20))
    found = totals(run)
    records = [step.reduce for step in run.steps if step.reduce]
    assert (found.dense_steps, found.sparse_steps) == (20, 30)
    assert found.sent == sum(record.bytes_sent for record in records)
    assert found.saving == pytest.approx(sum(record.dense_bytes for record in records) / found.sent)
    assert found.metric == "WER"
    assert found.best == min(epoch.validation["WER"] for epoch in run.epochs)


def test_the_world_size_is_found_without_a_configuration(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", world_size=8)
    (run / "config.json").write_text("{}")
    assert world_size(read_run(run)) == 8


def test_the_bounds_are_those_of_the_paper(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", world_size=4, numel=1_000_000, density=0.01))
    bounds = next(f for s in sections([run]) for f in s.figures if f.id == "bounds")
    assert bounds.drawing is not None
    series = {one["name"]: one["y"][0] for one in bounds.drawing.hover["series"]}
    assert series["6k bound of Ok-Topk"] == 6 * 10_000 * 3 / 4 * 4
    assert series["2k lower bound"] == 2 * 10_000 * 3 / 4 * 4


def test_several_runs_are_compared_in_one_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, algorithm=name, seed=n) for n, name in enumerate(("dense", "topka", "oktopk"))]
    text = page_of(*runs)
    for name in ("dense", "topka", "oktopk"):
        assert f"</i>{name}</th>" in text
    assert {"loss-step", "bounds", "messages-0", "messages-2", "phases-1", "histogram-2"} <= drawn(text)
    assert "speed-up" in text
    assert '<tr class="differs"><th scope="row">algorithm</th>' in text


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent / "oktopk", steps=4, warmup=1) for parent in ("a", "b")]
    text = write_report(runs, tmp_path / "page.html").read_text()
    assert "a/oktopk" in text
    assert "b/oktopk" in text


def test_steps_logged_again_after_a_resume_count_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=10, warmup=2)
    lines = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    again = json.loads(lines[8]) | {"loss": 0.125}
    (run / "steps.jsonl").write_text("".join([*lines, json.dumps(again) + "\n", '{"step": 11, "lo']))
    steps = read_run(run).steps
    assert [step.step for step in steps] == list(range(10))
    assert steps[8].loss == 0.125


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=30, warmup=10)
    text = (run / "steps.jsonl").read_text().splitlines()
    text[4] = re.sub(r'"loss": [\d.]+', '"loss": NaN', text[4])
    (run / "steps.jsonl").write_text("\n".join(text) + "\n")
    assert read_run(run).steps[4].loss is None
    page_of(run)


def test_damage_in_the_middle_of_a_file_is_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=5, warmup=1)
    lines = (run / "steps.jsonl").read_text().splitlines()
    (run / "steps.jsonl").write_text("\n".join([lines[0], "{{{", *lines[2:]]))
    with pytest.raises(DataError, match=r"steps\.jsonl line 2"):
        write_report([run])


def test_names_with_markup_stay_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=30, warmup=10)
    name = "<script>alert(1)</script>"
    (run / "config.json").write_text(json.dumps({"workload": name, "note": name}))
    write_lines(run / "analysis.jsonl", [{"step": 12, "density_by_parameter": {name: 0.5}}])
    text = page_of(run)
    assert name not in text
    assert "&lt;script&gt;alert(1)" in text


def test_a_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=8_000, warmup=500, steps_per_epoch=1000, analyze_every=1000)
    assert len(page_of(run)) < 400_000


def test_the_command_writes_where_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "runs" / "first", steps=4, warmup=1)
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").exists()
    assert str(run / "report.html") in capsys.readouterr().out
    other = write_run(tmp_path / "runs" / "second", steps=4, warmup=1)
    assert main(["report", "first", "second", "--runs", str(tmp_path / "runs")]) == 0
    assert (tmp_path / "runs" / "comparison.html").exists()
    assert (
        main(["report", "--latest", "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "deep/x.html")]) == 0
    )
    assert "<h1>second</h1>" in (tmp_path / "deep/x.html").read_text()
    assert latest_run(tmp_path / "runs") == other


def test_the_command_helps_with_wrong_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "speech-oktopk", steps=4, warmup=1)
    assert main(["report", "speech-okotpk", "--runs", str(tmp_path)]) == 2
    assert "Did you mean 'speech-oktopk'?" in capsys.readouterr().err.replace("\n", " ")
    assert main(["report", "--latest", "--runs", str(tmp_path / "nowhere")]) == 2
    assert main(["report"]) == 2
    with pytest.raises(ConfigError, match="at least one"):
        write_report([])


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0, "bytes", "0 B"), (1_930_000, "bytes", "1.93 MB"), (0.0412, "seconds", "41.2 ms"), (90, "seconds", "90 s"),
        (150, "seconds", "2.5 min"), (0.98, "share", "98 %"), (0.9803, "share", "98 %"), (1234, "number", "1,234"),
        (3e-7, "number", "3e-7"), (0.00042, "number", "0.00042"),
    ],
)  # fmt: skip
def test_numbers_read_well(value: float, unit: Any, words: str) -> None:
    assert say(value, unit) == words


@pytest.mark.parametrize(
    "scale", [Scale(0, 159), Scale(1e-9, 3e-9), Scale(0.0, 1e12), Scale(-4.2, 3.3), Scale(0.97, 1.03)]
)
def test_ticks_are_few_and_inside(scale: Scale) -> None:
    ticks = scale.ticks("number")
    assert 2 <= len(ticks) <= 8
    assert all(scale.low - 1e-12 <= tick <= scale.high * (1 + 1e-9) for tick in ticks)


@pytest.mark.parametrize("values", [[1e-8, 1.0], [0.0011, 0.0013], [5.0], [1.0, 1e6], [0.9, 11.0]])
def test_logarithmic_ticks_are_few_and_inside(values: list[float]) -> None:
    scale = scale_for(values, log=True)
    ticks = scale.ticks("number")
    assert 1 <= len(ticks) <= 9
    assert all(scale.low * 0.99 <= tick <= scale.high * 1.01 for tick in ticks)


def test_thinning_and_smoothing_keep_the_mean_and_the_ends() -> None:
    y = [math.sin(n / 50) for n in range(5000)]
    xs, ys = thin([float(n) for n in range(5000)], y, most=100)
    assert len(xs) == 100
    assert sum(ys) / 100 == pytest.approx(sum(y) / 5000, abs=1e-6)
    assert smooth([2.0] * 7) == [2.0] * 7


def test_kinds_of_parameters() -> None:
    kinds = [kind_of(name) for name in PARAMETERS]
    assert kinds == [
        "linear and other", "bias", "recurrent", "recurrent", "bias", "normalisation", "bias", "linear and other",
    ]  # fmt: skip


def test_the_page_says_where_the_bytes_went(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=160, warmup=40)
    records = [step.reduce for step in read_run(run).steps if step.reduce]
    dense, sparse = (sum(r.bytes_sent for r in records if r.phase == phase) for phase in ("dense", "sparse"))
    said = f"{say(dense / (dense + sparse), 'share')} in the dense start of 40 steps, "
    assert said + f"{say(sparse / (dense + sparse), 'share')} in 120 sparse steps." in page_of(run)
    assert "shorter dense start" in page_of(run)
    widths = [float(found) for found in re.findall(r'<i data-tip="[^"]*" style="width:([\d.]+)%', page_of(run))]
    assert widths == pytest.approx([100 * dense / (dense + sparse), 100 * sparse / (dense + sparse)], abs=0.01)


def test_in_a_comparison_bars_are_on_one_scale(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, algorithm=name) for name in ("dense", "oktopk")]
    sent = [sum(part.sent for part in parts(read_run(run))) for run in runs]
    bars = re.findall(r'<div class="track" role="img".*?</div>', page_of(*runs))
    widths = [sum(float(found) for found in re.findall(r"width:([\d.]+)%", bar)) for bar in bars]
    assert widths == pytest.approx([100, 100 * sent[1] / sent[0]], abs=0.1)


@pytest.mark.parametrize(
    ("phases", "names"),
    [
        ("ddss", ["dense start", "sparse steps"]),
        ("ssss", ["sparse steps"]),
        ("dssd", ["dense start", "sparse steps", "final mean"]),
        ("dsds", ["dense start", "sparse steps", "later dense steps"]),
        ("ssdd", ["sparse steps", "later dense steps"]),
        ("dddd", ["dense steps"]),
        ("", []),
    ],
)
def test_parts_of_a_run_are_told_apart_by_when_they_come(tmp_path: Path, phases: str, names: list[str]) -> None:
    path = write_run(tmp_path / "run", steps=len(phases), warmup=len(phases))
    lines = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    for line, phase in zip(lines, phases, strict=True):
        line["reduce"]["phase"] = {"d": "dense", "s": "sparse"}[phase]
    write_lines(path / "steps.jsonl", lines)
    found = parts(read_run(path))
    assert [part.name for part in found] == names
    assert sum(part.steps for part in found) == len(phases)


def test_a_run_without_sparse_steps_has_no_bar_of_bytes(tmp_path: Path) -> None:
    assert 'id="bytes"' not in page_of(write_run(tmp_path / "run", algorithm="dense"))
    assert 'id="bytes"' not in page_of(write_run(tmp_path / "alone", world_size=1))


def test_what_the_loop_did_not_wait_for_is_hidden(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")  # waits for 60% of its communication
    assert totals(read_run(run)).hidden == pytest.approx(0.4)
    assert '<h2>Hidden communication</h2><p class="value">40 %</p>' in page_of(run)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"norm_clip": 400.0, "parameters": 10**9, "bucket_mb": 25.0}, "clipping by norm waits"),
        ({"norm_clip": 0.0, "parameters": 1_000_000, "bucket_mb": 25.0}, "all gradients are one bucket"),
        ({"norm_clip": 0.0, "parameters": 10_000_000, "bucket_mb": 25.0}, None),
        ({}, None),
    ],
)
def test_a_run_that_cannot_overlap_says_why(tmp_path: Path, settings: dict[str, float], words: str | None) -> None:
    run = write_run(tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | settings))
    found = [said for said in ("clipping by norm waits", "all gradients are one bucket") if said in page_of(run)]
    assert found == ([words] if words else [])


def test_a_wait_longer_than_the_communication_hides_nothing(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=4, warmup=1)
    lines = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    write_lines(path / "steps.jsonl", [line | {"seconds": line["seconds"] | {"wait": 9.0}} for line in lines])
    assert totals(read_run(path)).hidden == 0.0


def test_runs_from_before_waits_were_recorded_still_add_up(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=4, warmup=1)
    lines = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]["wait"]
    write_lines(path / "steps.jsonl", lines)
    found = totals(read_run(path))
    assert found.hidden is None
    assert found.step_seconds == pytest.approx(sum(sum(line["seconds"].values()) for line in lines) / len(lines))
    assert "Hidden communication" not in page_of(path)


def test_a_final_mean_in_the_step_of_a_synchronisation_has_its_own_part(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=6, warmup=2)
    lines = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    before = {part.name: part.sent for part in parts(read_run(path))}
    lines[-1]["reduce"] |= {"bytes_sent": lines[-1]["reduce"]["bytes_sent"] + 5000, "final_bytes": 5000}
    write_lines(path / "steps.jsonl", lines)
    assert {part.name: part.sent for part in parts(read_run(path))} == before | {"final mean": 5000}
    assert "in the final mean" in page_of(path)
