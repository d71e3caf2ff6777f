"""`oktopk data ...`: prepare, repair and check corpora."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from oktopk.cli.console import console
from oktopk.training.environment import world_rank

COMMANDS: dict[str, str] = {
    "an4": "oktopk.cli.data:An4",
    "relocate": "oktopk.cli.data:Relocate",
    "check": "oktopk.cli.data:Check",
    "images": "oktopk.cli.data_sets:Images",
    "text": "oktopk.cli.data_sets:Text",
}


@dataclass(frozen=True)
class An4:
    """Write manifests (train.csv, validation.csv) for a speech corpus.

    DIR is AN4 as distributed (the folder, or the archive), a folder of WAV or FLAC files with transcripts, a folder
    with manifests, or the name of the embedded corpus, synth-an4. Exit code 1: some utterances were left out.

    To tune without a look at the test part, let some training speakers judge: --tuning-speakers 10.

    Example:
      oktopk data an4 synth-an4:40 --out manifests
    """

    dir: Annotated[str, tyro.conf.Positional]  # folder or archive of the corpus, or synth-an4
    out: Path = Path("manifests")  # folder the manifests are written to
    absolute: bool = False  # write absolute paths; by default they are relative to the manifest
    tuning_speakers: int = 0  # so many of AN4's training speakers become validation.csv, and the test part is left out

    def __call__(self) -> int:
        from oktopk.workloads.speech.corpus import find_corpus, for_tuning
        from oktopk.workloads.speech.manifest import write_manifest

        corpus = find_corpus(self.dir, progress=speaking())
        if self.tuning_speakers:
            corpus = for_tuning(corpus, self.tuning_speakers)
        for name, entries in (("train", corpus.train), ("validation", corpus.validation)):
            path = self.out / f"{name}.csv"
            good = [entry for entry in entries if not entry.problem]
            write_manifest(path, good, self.absolute)
            _say(f"{path}: {len(good)} utterances")
        problems = [entry.problem for entry in (*corpus.train, *corpus.validation) if entry.problem]
        _say("\n".join([*(f"left out: {problem}" for problem in problems), f"Next: oktopk data check {self.out}"]))
        return 1 if problems else 0


@dataclass(frozen=True)
class Relocate:
    """Point a manifest with someone else's paths at the files on this machine.

    Example:
      oktopk data an4 synth-an4:40 --out manifests
      oktopk data relocate manifests/train.csv --root ~/.cache/oktopk
    """

    manifest: Annotated[Path, tyro.conf.Positional]  # CSV file of `wav,txt` rows
    root: Path  # folder that holds the audio files now, at any depth

    def __call__(self) -> int:
        from oktopk.workloads.speech.manifest import relocate

        changed, total = relocate(self.manifest, self.root)
        _say(f"{self.manifest}: {changed} of {total} rows changed")
        return 0


@dataclass(frozen=True)
class Check:
    """Verify every utterance of a manifest or corpus, and list all that is wrong at once.

    A file must exist, decode completely, have 16 kHz and one channel, and last long enough for its transcript; the
    transcript must be spelled in A-Z, apostrophe and space. Exit code 0: all good; 1: something is wrong.

    Example:
      oktopk data check synth-an4:40
    """

    manifest: Annotated[str, tyro.conf.Positional]  # manifest, or whatever `oktopk train --data` takes
    preset: str = "small"  # network whose time resolution the transcripts must fit

    def __call__(self) -> int:
        from oktopk.workloads.speech.corpus import parts_of
        from oktopk.workloads.speech.data import load

        problems, good, seconds = 0, 0, 0.0
        for part, entries in parts_of(self.manifest, speaking()):
            loaded = load(entries, _stride(self.preset))
            for problem in loaded.problems:
                _say(f"{part}: {problem}")
            problems, good = problems + len(loaded.problems), good + len(loaded.utterances)
            seconds += sum(utterance.length for utterance in loaded.utterances) / 16_000
        _say(f"{self.manifest}: {good} utterances good ({seconds / 60:.1f} min), {problems} bad")
        return 1 if problems or not good else 0


def speaking() -> Callable[[int, int], None]:
    """A progress line for the making of synth-an4, on rank 0 only."""
    screen = console()

    def show(done: int, total: int) -> None:
        if done == 1 and world_rank() == 0:
            screen.print(f"making synth-an4: espeak-ng speaks {total} sentences, once; they are kept in the cache")

    return show


def _stride(preset: str) -> int:
    from oktopk.workloads.speech.workload import PRESETS, SpeechConfig

    return PRESETS[SpeechConfig(preset=preset).preset].stride


def _say(text: str) -> None:
    console().print(text, markup=False)
