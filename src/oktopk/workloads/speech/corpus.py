"""Where a corpus keeps its utterances: AN4 as distributed, folders of audio, manifests, the embedded one.

Every layout ends as two lists of entries, training and validation.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from oktopk.errors import DataError
from oktopk.workloads.cache import cached_folder, fingerprint
from oktopk.workloads.speech import synth
from oktopk.workloads.speech.audio import SUFFIXES
from oktopk.workloads.speech.manifest import Entry, read_manifest
from oktopk.workloads.speech.text import normalise

ARCHIVES = (".tar.gz", ".tgz", ".tar")


@dataclass(frozen=True)
class Corpus:
    """Utterances to learn from and to be judged by."""

    source: str
    train: tuple[Entry, ...]
    validation: tuple[Entry, ...]


def find_corpus(data: str, validation: str | None = None, progress: synth.Progress | None = None) -> Corpus:
    """The corpus that `data` names: `synth-an4`, a folder, an archive of AN4, or a manifest.

    A manifest holds one part only; `validation` names the manifest of the other.
    """
    if data == synth.NAME or data.startswith(synth.NAME + ":"):
        folder = synth.synth_an4(synth.parse_name(data), progress)
        found = _in_folder(folder, data)
    else:
        found = _in_path(Path(data).expanduser(), validation)
    held_out = read_manifest(Path(validation).expanduser()) if validation else found.validation
    return Corpus(found.source, found.train, tuple(held_out))


_OF_A_SPEAKER = re.compile(r"^[^-]+-(?P<speaker>[^-]+)-[^-]+$")  # AN4's names: an251-fash-b


def for_tuning(corpus: Corpus, speakers: int) -> Corpus:
    """The training part alone, `speakers` of whom judge instead of the validation part, which nobody looks at.

    Which ones follows from their names: spread evenly over the sorted list.
    """
    spoken_by = [_speaker(entry, corpus.source) for entry in corpus.train]
    everyone = sorted(set(spoken_by) - {""})
    if not 0 < speakers < len(everyone):
        raise DataError(f"{corpus.source}: {speakers} speakers for tuning, expected 1 to {len(everyone) - 1}.")
    chosen = {everyone[(2 * i + 1) * len(everyone) // (2 * speakers)] for i in range(speakers)}
    said = list(zip(corpus.train, spoken_by, strict=True))
    learned = tuple(entry for entry, speaker in said if speaker not in chosen)
    return Corpus(corpus.source, learned, tuple(entry for entry, speaker in said if speaker in chosen))


def _speaker(entry: Entry, source: str) -> str:
    """Who says it, by the file's name; nobody, if the entry is one that cannot be used anyway."""
    match = _OF_A_SPEAKER.match(entry.path.stem)
    if match is None and not entry.problem:
        raise DataError(
            f"{source}: the speaker of {entry.path.name!r} cannot be told; AN4's files are named like an251-fash-b. "
            "Put utterances for tuning into a manifest of their own."
        )
    return "" if match is None else match["speaker"]


def parts_of(data: str, progress: synth.Progress | None = None) -> list[tuple[str, tuple[Entry, ...]]]:
    """(name, entries) of each part that `data` holds: one of a manifest, two of a corpus."""
    path = Path(data).expanduser()
    if path.is_file() and not path.name.endswith(ARCHIVES):
        return [(path.name, tuple(read_manifest(path)))]
    corpus = find_corpus(data, progress=progress)
    return [("training", corpus.train), ("validation", corpus.validation)]


def _in_path(path: Path, validation: str | None) -> Corpus:
    if not path.exists():
        raise DataError(f"{path}: no such folder, archive or manifest; without --data the embedded synth-an4 is used.")
    if path.name.endswith(ARCHIVES):
        return _in_folder(_extracted(path), str(path))
    if path.is_dir():
        return _in_folder(path, str(path))
    if validation is None:
        raise DataError(f"{path}: a manifest holds the training part only; name another with --validation MANIFEST.")
    return Corpus(str(path), tuple(read_manifest(path)), ())


def _in_folder(folder: Path, source: str) -> Corpus:
    for root in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        for layout in (_manifests, _sphere, _tables, _pairs):
            parts = layout(root)
            if parts is not None:
                return Corpus(source, tuple(parts[0]), tuple(parts[1]))
    raise DataError(
        f"{source}: not an AN4 corpus. Expected one of: etc/an4_train.transcription and etc/an4_test.transcription "
        "with wav/ (AN4 as distributed); train_transcripts.tsv and test_transcripts.tsv (file, text); train.csv and "
        "validation.csv (manifests `wav,txt`); train/ and test/ with an audio file and a .txt file per utterance."
    )


_Parts = tuple[list[Entry], list[Entry]]


def _two_parts(read: Callable[[Path], list[Entry]], *pairs: tuple[Path, Path]) -> _Parts | None:
    """The first pair that exists, read; None when no layout of that kind is here."""
    for train, held_out in pairs:
        if train.exists() and held_out.exists():
            return read(train), read(held_out)
    return None


def _manifests(root: Path) -> _Parts | None:
    names = ("validation", "valid", "val", "test")
    return _two_parts(read_manifest, *((root / "train.csv", root / f"{name}.csv") for name in names))


def _sphere(root: Path) -> _Parts | None:
    """AN4 as distributed: `etc/an4_train.{fileids,transcription}` and audio under `wav/`."""
    etc = root / "etc"
    return _two_parts(_sphere_part, (etc / "an4_train.transcription", etc / "an4_test.transcription"))


_LINE = re.compile(r"^(?P<text>.*?)\s*\((?P<id>[^()\s]+)\)\s*$")


def _sphere_part(transcription: Path) -> list[Entry]:
    files = _file_ids(transcription.with_suffix(".fileids"))
    audio = transcription.parent.parent / "wav"
    return [_sphere_entry(transcription, line, audio, files) for line in _lines(transcription)]


def _sphere_entry(transcription: Path, line: str, audio: Path, files: dict[str, str]) -> Entry:
    match = _LINE.match(line)
    if match is None or match["id"] not in files:
        wanted = f"`TEXT (ID)` with an ID of {transcription.stem}.fileids"
        return Entry(audio, "", f"{transcription}: expected {wanted}, got {line!r}; fetch the corpus again.")
    words = [word for word in match["text"].split() if word not in ("<s>", "</s>", "<sil>")]
    return Entry(_audio_file(audio / files[match["id"]]), normalise(" ".join(words)))


def _file_ids(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise DataError(f"{path}: missing, although its transcription is there; fetch the corpus again.")
    return {line.rsplit("/", 1)[-1]: line for line in _lines(path)}


def _audio_file(stem: Path) -> Path:
    """The file with this name and any known ending; the distributed one if there is none yet."""
    candidates = (stem.with_name(stem.name + suffix) for suffix in SUFFIXES)
    return next((path for path in candidates if path.is_file()), stem.with_name(stem.name + ".sph"))


def _tables(root: Path) -> _Parts | None:
    names = ("validation", "test")
    table = "{}_transcripts.tsv"
    return _two_parts(_table, *((root / table.format("train"), root / table.format(name)) for name in names))


def _table(path: Path) -> list[Entry]:
    header, *rows = [line.split("\t") for line in _lines(path)] or [[]]
    if "file" not in header or "text" not in header:
        raise DataError(f"{path}: the first line must name the columns `file` and `text`, got {header!r}.")
    file, text = header.index("file"), header.index("text")
    return [
        Entry(path.parent / row[file], normalise(row[text]))
        if len(row) == len(header)
        else Entry(path, "", f"{path}: expected {len(header)} columns, got {row!r}; repair that line.")
        for row in rows
    ]


def _pairs(root: Path) -> _Parts | None:
    found = _two_parts(_pairs_in, *((root / "train", root / name) for name in ("validation", "valid", "val", "test")))
    return found if found and found[0] else None


def _pairs_in(folder: Path) -> list[Entry]:
    """Audio files with a transcript of the same name beside them, or in `txt/` beside their folder."""
    audio = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    return [_pair(path) for path in audio]


def _pair(path: Path) -> Entry:
    choices = (path.with_suffix(".txt"), path.parent.parent / "txt" / f"{path.stem}.txt")
    text = next((choice for choice in choices if choice.is_file()), None)
    if text is None:
        return Entry(path, "", f"{path}: no transcript {choices[0].name} beside it; add one, or write a manifest.")
    return Entry(path, normalise(" ".join(_lines(text))))


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error}); fetch the corpus again.") from error


def _extracted(archive: Path) -> Path:
    """The archive's content in the cache; members that would leave their folder are refused."""

    def fill(folder: Path) -> None:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")

    try:
        return cached_folder("an4-archive", fingerprint(archive), fill)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{archive}: not a readable tar archive ({error}); fetch it again.") from error
