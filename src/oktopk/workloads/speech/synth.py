"""The embedded corpus `synth-an4`: AN4's kinds of sentence, spoken by espeak-ng on first use and cached.

Validation voices are never heard in training. The corpus is a smoke corpus: its error rates say nothing about AN4's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from oktopk.errors import ConfigError
from oktopk.workloads.cache import cached_folder
from oktopk.workloads.speech.audio import write_audio
from oktopk.workloads.speech.espeak import Manner, Speaker
from oktopk.workloads.speech.manifest import Entry, write_manifest
from oktopk.workloads.speech.sentences import sentence

NAME = "synth-an4"
VERSION = 1  # part of the cache's name: raise it whenever the sound or the sentences change
TRAINING_VOICES = (
    "en-us", "en-us+m1", "en-us+m2", "en-us+m3", "en-us+m5", "en-us+m6", "en-us+m7", "en-us+f1", "en-us+f2",
    "en-us+f4", "en-us+f5", "en-us+klatt2", "en-us+max", "en-us+belinda", "en-us+john", "en-us+quincy", "en-us+linda",
    "en-us+Andy",
)  # fmt: skip
VALIDATION_VOICES = ("en-us+m4", "en-us+f3", "en-us+m8", "en-us+steph")

Progress = Callable[[int, int], None]  # utterances done, utterances in all


@dataclass(frozen=True)
class Size:
    """Utterances of each part."""

    train: int = 1200
    validation: int = 120

    @property
    def total(self) -> int:
        return self.train + self.validation


def parse_name(name: str) -> Size:
    """`synth-an4`, or `synth-an4:40` for a corpus with 40 training utterances."""
    _, colon, count = name.partition(":")
    if not colon:
        return Size()
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"expected {NAME} or {NAME}:COUNT with COUNT at least 1, got {name!r}.")
    return Size(int(count), max(4, int(count) // 8))


def synth_an4(size: Size, progress: Progress | None = None) -> Path:
    """The folder with `train.csv` and `validation.csv`, made now if the cache has none."""
    return cached_folder(NAME, (VERSION, size), lambda folder: _speak_all(folder, size, progress))


def _speak_all(work: Path, size: Size, progress: Progress | None) -> None:
    speaker, done = Speaker(), 0
    for part, count, voices in (
        ("train", size.train, TRAINING_VOICES),
        ("validation", size.validation, VALIDATION_VOICES),
    ):
        (work / part).mkdir()
        entries = []
        for number in range(count):
            entries.append(_speak(speaker, work, part, number, voices))
            done += 1
            if progress is not None:
                progress(done, size.total)
        write_manifest(work / f"{part}.csv", entries)


def _speak(speaker: Speaker, work: Path, part: str, number: int, voices: tuple[str, ...]) -> Entry:
    rng = Random(f"{NAME} {VERSION} {part} {number}")
    text = sentence(rng)
    path = work / part / f"{number:04d}.wav"
    write_audio(path, speaker.say(text, _manner(rng, voices[number % len(voices)])))
    return Entry(path, text)


def _manner(rng: Random, voice: str) -> Manner:
    return Manner(voice, rng.randint(120, 180), rng.randint(30, 70), rng.randint(30, 70), rng.randint(0, 4))
