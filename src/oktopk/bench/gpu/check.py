"""Runs all that needs a GPU, and writes one Markdown page about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from oktopk.bench.cluster import Cluster
from oktopk.bench.gpu.agreement import SIZES, cases, disagreements
from oktopk.bench.host import describe_machine
from oktopk.bench.kernels import NUMEL
from oktopk.bench.kernels_device import measure_on, traffic_rows
from oktopk.bench.markdown import markdown_table
from oktopk.bench.overlap import OverlapBench, bench_overlap
from oktopk.bench.processes import Record, run_ranks
from oktopk.errors import OkTopkError
from oktopk.kernels import choose
from oktopk.reducer import Reducer
from oktopk.training.devices import GpuMemory, Place, find_place
from oktopk.transport import ThreadWorld

Say = Callable[[str], None]
_MOST_LOST = 1e-6  # of the largest entry: float32 rounding of a few additions
_TRAININGS = {
    "float32": (),
    "bfloat16": ("--precision", "bfloat16"),
    "float16": ("--precision", "float16"),
    "updates, float16": ("--precision", "float16", "--reduce", "updates"),
}


@dataclass(frozen=True)
class Trial:
    """Where, and how thoroughly. On the CPU the procedure itself is tried."""

    device: Literal["cpu", "cuda"]
    quick: bool = False

    @property
    def place(self) -> Place:
        return find_place(self.device, 0)

    @property
    def numel(self) -> int:
        return 20_000 if self.quick else NUMEL


@dataclass(frozen=True)
class Finding:
    """What one part came to."""

    title: str
    ok: bool
    lines: Sequence[str]
    seconds: float


def check(trial: Trial, path: Path, say: Say) -> bool:
    """Run every part, also after one has failed, and write the page; whether all was as it should be."""
    findings = []
    for title, work in PARTS.items():
        say(title)
        findings.append(_find(title, work, trial))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(trial, findings), encoding="utf-8")
    return all(finding.ok for finding in findings)


def page(trial: Trial, findings: Sequence[Finding]) -> str:
    """Everything in Markdown, for people and to send in."""
    ok = sum(finding.ok for finding in findings)
    where = trial.place.name if trial.device == "cuda" else "the CPU: a trial of the procedure, not of a GPU"
    lines = [f"# oktopk on {where}", "", f"{ok} of {len(findings)} parts are as they should be.", ""]
    for finding in findings:
        verdict = "as it should be" if finding.ok else "FAILED"
        lines += [f"## {finding.title}", "", f"{verdict}, {finding.seconds:.0f} s", "", *finding.lines, ""]
    return "\n".join(lines)


def _find(title: str, work: Callable[[Trial], Sequence[str]], trial: Trial) -> Finding:
    started = perf_counter()
    try:
        lines, ok = work(trial), True
    except Exception:  # whatever goes wrong on somebody's card is what the page is for
        lines, ok = ["```text", *traceback.format_exc().splitlines(), "```"], False
    return Finding(title, ok, lines, perf_counter() - started)


# -- parts -------------------------------------------------------------------------------------------------------


def _machine(trial: Trial) -> Sequence[str]:
    choice = choose(trial.place.device)
    rows: dict[str, Any] = {**describe_machine(), "kernels": choice.kernels.name, "why": choice.reason}
    rows["oktopk"] = importlib.metadata.version("oktopk")
    if importlib.util.find_spec("triton") is not None:
        rows["triton"] = importlib.metadata.version("triton")
    if trial.device == "cuda":
        found = torch.cuda.get_device_properties(trial.place.device)
        rows |= {
            "capability": f"{found.major}.{found.minor}",
            "memory of the GPU": f"{found.total_memory / 1e9:.0f} GB",
        }
        if choice.kernels.name != "triton":
            raise OkTopkError(f"gradients on this GPU are not selected by compiled kernels: {choice.reason}.")
    return markdown_table({"what": name, "found": value} for name, value in rows.items())


def _kernels_agree(trial: Trial) -> Sequence[str]:
    """Every kernel against plain torch on the host."""
    kernels, device, count = choose(trial.place.device).kernels, trial.place.device, 0
    for case in cases(SIZES[:2] if trial.quick else SIZES):
        different = disagreements(kernels, device, case)
        if different:
            raise OkTopkError(f"{case}: {', '.join(different)} differ from plain torch on the host.")
        count += 1
    return [f"{count} inputs, each flat, in pieces and as updates: the bits of plain torch on the host."]


def _two_ranks(trial: Trial) -> Sequence[str]:
    """Reductions and trainings of two processes, which share the GPU if there is one only."""
    arguments = {"numel": trial.numel, "device": trial.device}
    ranks = run_ranks(Cluster(2), "oktopk.bench.gpu.ranks:measure", arguments, timeout=900.0)
    rows = [_rank_row(records) for records in zip(*ranks, strict=True)]
    wrong = [str(row["what"]) for row in rows if "no" in row.values()]
    if wrong:
        raise OkTopkError("\n".join([f"wrong: {', '.join(wrong)}", *markdown_table(rows)]))
    return markdown_table(rows)


def _rank_row(records: Sequence[Record]) -> dict[str, str]:
    """One way to reduce or to train, over ranks."""
    return {
        "what": records[0]["what"],
        "replicas equal": _said([record["digest"] == records[0]["digest"] for record in records]),
        "bits of the host": _said([record.get("same_as_host") for record in records]),
        "nothing lost": _said([record["lost"] <= _MOST_LOST for record in records if "lost" in record]),
        "finite": _said([record.get("finite") for record in records]),
    }


def _said(answers: Sequence[bool | None]) -> str:
    """What all ranks say; nothing where it is not asked."""
    known = [answer for answer in answers if answer is not None]
    return "" if not known else "yes" if all(known) else "no"


def _overlap(trial: Trial) -> Sequence[str]:
    small = {"numel": 20_000, "batch": 4, "bucket_cap_mb": 0.05, "steps": 2}
    large = {"numel": 20_000_000, "batch": 512, "bucket_cap_mb": 8.0, "steps": 12}
    options: Mapping[str, Any] = small if trial.quick else large
    result = bench_overlap(Cluster(2), OverlapBench(device=trial.device, **options))
    row = {name: f"{1e3 * getattr(result, name):.1f} ms" for name in ("overlapped", "serialised", "floor")}
    return markdown_table([row | {"buckets": result.buckets, "hidden by backward": f"{result.hidden:.0%}"}])


def _memory(trial: Trial) -> Sequence[str]:
    """What a reducer keeps and takes beside the gradient, in gradients."""
    if trial.device == "cpu":
        return ["Nobody counts the memory of tensors on the CPU."]
    gradient = torch.randn(trial.numel, device=trial.place.device)
    ways = {"in one tensor": [gradient], "in pieces": list(gradient.tensor_split(20))}
    return markdown_table({"gradient": name, **_footprint(trial.place, parts)} for name, parts in ways.items())


def _footprint(place: Place, parts: Sequence[Tensor]) -> dict[str, str]:
    layout, whole = [(str(n), part.numel()) for n, part in enumerate(parts)], sum(part.nbytes for part in parts)
    used: list[GpuMemory] = [place.memory()]
    with Reducer(density=0.01, group=ThreadWorld(1).transports()[0]) as reducer:
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats(place.device)
            reducer.submit(layout, parts[0] if len(parts) == 1 else parts).wait()
            place.finish()
            used.append(place.memory())
    before, first, second = used
    kept = (first.gpu_allocated_bytes or 0) - (before.gpu_allocated_bytes or 0)
    most = (second.gpu_peak_bytes or 0) - (before.gpu_allocated_bytes or 0)
    return {"kept": f"{kept / whole:.3f}", "at most, in a step": f"{most / whole:.3f}"}


def _speed(trial: Trial) -> Sequence[str]:
    sizes = (trial.numel,) if trial.quick else (trial.numel, 4 * trial.numel)
    lines: list[str] = []
    for numel in sizes:
        result = measure_on(trial.place, numel, 1 if trial.quick else 20)
        lines += [f"{numel:,} entries", "", *markdown_table(traffic_rows(result)), ""]
        if result.extra_memory is not None:
            lines += [f"A selection takes {result.extra_memory:.1%} of the gradient more.", ""]
    return lines


def _trainings(trial: Trial) -> Sequence[str]:
    """The trainer itself, with two workers."""
    chosen = ["bfloat16"] if trial.quick else list(_TRAININGS)
    steps = "4" if trial.quick else "60"
    with tempfile.TemporaryDirectory() as folder:
        rows = [_train(Path(folder), name, trial.device, steps) for name in chosen]
    return markdown_table(rows)


def _train(folder: Path, name: str, device: str, steps: str) -> dict[str, Any]:
    words = ["train", "gpt", "--preset", "tiny", "--workers", "2", "--device", device, "--max-steps", steps]
    words += ["--warmup-steps", "2", "--runs", str(folder), "--name", name, "--quiet", *_TRAININGS[name]]
    done = subprocess.run([sys.executable, "-m", "oktopk.cli", *words], capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise OkTopkError(f"oktopk {' '.join(words)} ended with code {done.returncode}:\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (folder / name / "steps.jsonl").read_text().splitlines()]
    memory = {
        f"{word} MB": f"{rows[-1].get(f'gpu_{word}_bytes', 0) / 1e6:.0f}" for word in ("allocated", "peak", "reserved")
    }
    losses = {"first loss": f"{rows[0]['loss']:.3f}", "last loss": f"{rows[-1]['loss']:.3f}"}
    return {"training": name, "steps": len(rows), **losses, **(memory if device == "cuda" else {})}


PARTS: dict[str, Callable[[Trial], Sequence[str]]] = {
    "Machine": _machine,
    "Kernels against plain torch": _kernels_agree,
    "Two ranks": _two_ranks,
    "Overlap": _overlap,
    "Memory": _memory,
    "Speed of kernels": _speed,
    "Trainings": _trainings,
}
