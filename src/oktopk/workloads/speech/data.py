"""Utterances in memory, everything that is wrong with a corpus said at once, and batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from oktopk.errors import DataError
from oktopk.workloads.speech.audio import SAMPLE_RATE, read_audio
from oktopk.workloads.speech.features import frame_count
from oktopk.workloads.speech.manifest import Entry
from oktopk.workloads.speech.text import encode, frames_needed, unknown

KEPT_SAMPLES = 2**28  # samples of a corpus kept in memory (half a gigabyte, 4.6 h); beyond that files are read anew
SHOWN = 10  # problems spelled out in one message


@dataclass(frozen=True)
class Utterance:
    """One usable utterance."""

    path: Path
    text: str
    labels: tuple[int, ...]
    length: int  # samples
    samples: Tensor | None  # int16, [length]; None: too many to keep, read when needed
    fastest: float  # tempo beyond which the network would have too few steps for the transcript

    def load(self) -> Tensor:
        return read_audio(self.path) if self.samples is None else self.samples


@dataclass(frozen=True)
class Batch:
    """Utterances side by side, padded with zeros."""

    inputs: Tensor  # float32, [batch, size, steps]
    lengths: Tensor  # int64, [batch]: steps of each
    labels: Tensor  # int64, all labels one after another
    label_lengths: Tensor  # int64, [batch]
    texts: tuple[str, ...]

    def to(self, device: torch.device) -> Batch:
        return replace(
            self,
            inputs=self.inputs.to(device),
            lengths=self.lengths.to(device),
            labels=self.labels.to(device),
            label_lengths=self.label_lengths.to(device),
        )


@dataclass(frozen=True)
class Loaded:
    """What of a list of entries can be used, and what is wrong with the rest."""

    utterances: tuple[Utterance, ...]
    problems: tuple[str, ...]


def load(entries: Iterable[Entry], stride: int) -> Loaded:
    """Decode every file once, so that training never meets a bad one. `stride`: frames per output step."""
    utterances: list[Utterance] = []
    problems: list[str] = []
    kept = 0
    for entry in entries:
        try:
            utterance = _utterance(entry, stride, keep=kept < KEPT_SAMPLES)
        except DataError as error:
            problems.append(str(error))
        else:
            utterances.append(utterance)
            kept += utterance.length
    return Loaded(tuple(utterances), tuple(problems))


def require(parts: Mapping[str, Loaded], source: str, skip: bool) -> None:
    """One error that lists what is wrong with all parts; `skip` forgives bad files, not an empty part."""
    problems = [problem for loaded in parts.values() for problem in loaded.problems]
    if problems and not skip:
        counts = ", ".join(
            f"{len(loaded.problems)} of {len(loaded.problems) + len(loaded.utterances)} {part}"
            for part, loaded in parts.items()
        )
        raise DataError(
            f"{source}: {counts} utterances cannot be used:\n{listed(problems)}\n"
            "Repair them, or leave them out with --on-bad-audio skip."
        )
    for part, loaded in parts.items():
        if not loaded.utterances:
            skipped = f" after skipping {len(loaded.problems)}:\n{listed(loaded.problems)}" if loaded.problems else ""
            raise DataError(f"{source}: the {part} set is empty{skipped}; give a corpus with utterances in both parts.")


def listed(problems: Sequence[str], limit: int = SHOWN) -> str:
    """The problems, one per line, cut after `limit`."""
    lines = [f"  {problem}" for problem in problems[:limit]]
    if len(problems) > limit:
        lines.append(f"  ... and {len(problems) - limit} more; `oktopk data check` lists all.")
    return "\n".join(lines)


def collate(inputs: Sequence[Tensor], utterances: Sequence[Utterance]) -> Batch:
    """One batch of features, each [size, steps]."""
    labels = [torch.tensor(utterance.labels) for utterance in utterances]
    return Batch(
        inputs=pad_sequence([x.T for x in inputs], batch_first=True).transpose(1, 2),
        lengths=torch.tensor([x.shape[1] for x in inputs]),
        labels=torch.cat(labels),
        label_lengths=torch.tensor([len(label) for label in labels]),
        texts=tuple(utterance.text for utterance in utterances),
    )


def _utterance(entry: Entry, stride: int, keep: bool) -> Utterance:
    if entry.problem:
        raise DataError(entry.problem)
    if not entry.text:
        raise DataError(f"{entry.path}: its transcript is empty; remove it from the manifest.")
    if strange := unknown(entry.text):
        raise DataError(
            f"{entry.path}: transcript {entry.text!r} has characters outside A-Z, apostrophe and space: "
            f"{' '.join(map(repr, strange))}; spell them out."
        )
    samples = read_audio(entry.path)
    labels = encode(entry.text)
    frames, needed = frame_count(len(samples)), stride * (frames_needed(labels) - 1) + 1
    if frames < needed:
        raise DataError(
            f"{entry.path}: {len(samples) / SAMPLE_RATE:.2f} s of audio are too short for the {len(labels)} characters "
            f"of {entry.text!r} (at least {needed / 100:.2f} s); is it the right transcript?"
        )
    return Utterance(entry.path, entry.text, tuple(labels), len(samples), samples if keep else None, frames / needed)
