"""Manifests: CSV files of `wav,txt` rows, by default with paths relative to the manifest."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from oktopk.errors import DataError
from oktopk.workloads.speech.audio import SUFFIXES
from oktopk.workloads.speech.text import normalise


@dataclass(frozen=True)
class Entry:
    """One utterance: where its sound is and what is said."""

    path: Path
    text: str
    problem: str = ""  # why it cannot be used, when the reader of the corpus already knows


def read_manifest(path: Path) -> list[Entry]:
    """The rows of a manifest. The second column is the transcript, or the name of a text file that holds it."""
    return [_entry(path, wav, txt) for wav, txt in _rows(path)]


def write_manifest(path: Path, entries: Iterable[Entry], absolute: bool = False) -> None:
    """Write `entries` so that a reader never sees half a file."""
    root = path.parent.resolve()
    rows = [(_written(entry.path.resolve(), root, absolute), entry.text) for entry in entries]
    _write_rows(path, rows)


def relocate(path: Path, root: Path) -> tuple[int, int]:
    """Point every row of a manifest at the file under `root` that its path ends like; rows changed, rows in all.

    Nothing is written unless every row finds exactly one file.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; --root is where the audio files are now.")
    old, found = _rows(path), _by_name(root)
    new = [(_relocated(path, wav, found), txt) for wav, txt in old]
    missing = [wav for (file, _), (wav, _) in zip(new, old, strict=True) if file is None]
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of {len(old)} files are not under {root}, e.g. {missing[0]}; give the --root that "
            "holds them."
        )
    base = path.parent.resolve()
    rows = [(_written(file, base, False), _moved_text(path, file, txt)) for file, txt in new if file is not None]
    _write_rows(path, rows)
    return sum(a != b for a, b in zip(rows, old, strict=True)), len(rows)


def _relocated(manifest: Path, wav: str, found: dict[str, list[Path]]) -> Path | None:
    """The file of that name which shares the longest tail of the path; none when two share it equally."""
    parts = Path(wav.replace("\\", "/")).parts
    candidates = found.get(parts[-1], [])
    scores = sorted(((_common_tail(parts, path.parts), path) for path in candidates), reverse=True)
    if len(scores) > 1 and scores[0][0] == scores[1][0]:
        raise DataError(f"{manifest}: {wav} could be {scores[0][1]} or {scores[1][1]}; give a narrower --root.")
    return scores[0][1] if scores else None


def _common_tail(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    alike = (x == y for x, y in zip(reversed(a), reversed(b), strict=False))
    return sum(1 for _ in takewhile(bool, alike))


def _by_name(root: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(root.resolve().rglob("*")):
        if path.suffix.lower() in SUFFIXES:
            found.setdefault(path.name, []).append(path)
    return found


def _moved_text(manifest: Path, wav: Path, txt: str) -> str:
    """A transcript kept in a file moved with its audio: beside it, or in `txt/` beside its folder."""
    if not txt.lower().endswith(".txt") or (manifest.parent / txt).is_file():
        return txt
    name = Path(txt.replace("\\", "/")).name
    for folder in (wav.parent, wav.parent.parent / "txt"):
        if (folder / name).is_file():
            return _written((folder / name).resolve(), manifest.parent.resolve(), False)
    raise DataError(f"{manifest}: transcript {txt} is neither there nor beside {wav}; put the text into the manifest.")


def _rows(path: Path) -> list[tuple[str, str]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such manifest; `oktopk data an4 DIR` makes one.") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a readable CSV manifest ({error}); `oktopk data an4 DIR` makes one.") from error
    if rows and [cell.strip().lower() for cell in rows[0]] in (["wav", "txt"], ["wav_filename", "transcript"]):
        rows = rows[1:]
    for number, row in enumerate(rows, start=1):
        if len(row) != 2 or not row[0].strip():
            raise DataError(f"{path}: row {number} must be `wav,txt`, got {row!r}; quote texts that contain commas.")
    return [(wav.strip(), txt.strip()) for wav, txt in rows]


def _entry(manifest: Path, wav: str, txt: str) -> Entry:
    path = manifest.parent / wav
    if not txt.lower().endswith(".txt"):
        return Entry(path, normalise(txt))
    try:
        return Entry(path, normalise((manifest.parent / txt).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        return Entry(path, "", f"{path}: its transcript {txt} cannot be read ({error}); see `oktopk data relocate`.")


def _written(path: Path, root: Path, absolute: bool) -> str:
    return path.as_posix() if absolute else Path(os.path.relpath(path, root)).as_posix()


def _write_rows(path: Path, rows: list[tuple[str, str]]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("wav", "txt"))
            writer.writerows(rows)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise DataError(f"{path}: cannot be written ({error}); choose another place or make room.") from error
