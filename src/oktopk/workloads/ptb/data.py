"""Words as numbers: a vocabulary by frequency, and long streams cut into columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oktopk.errors import DataError
from oktopk.workloads.cache import cached_folder
from oktopk.workloads.text import TextFiles, find_text, read_lines

EOS, UNKNOWN = "<eos>", "<unk>"


@dataclass(frozen=True)
class Words:
    """A prepared corpus."""

    layout: str
    vocabulary: tuple[str, ...]  # most frequent first
    train: Tensor  # int64, [tokens]
    valid: Tensor  # int64, [tokens]


def load_words(data: str, vocabulary: int) -> Words:
    """The corpus as published or embedded, with at most `vocabulary` words, from the cache after the first time."""
    files = find_text(data)
    if not files.valid:
        raise DataError(
            f"{data} is one text without a validation part: name two files train.txt and valid.txt in one folder."
        )
    key = (2, *files.fingerprints(), vocabulary)
    folder = cached_folder("words", key, lambda into: _prepare(files, vocabulary, into))
    words = tuple((folder / "vocabulary.txt").read_text(encoding="utf-8").split("\n"))
    train, valid = (torch.from_numpy(np.load(folder / f"{part}.npy").astype(np.int64)) for part in ("train", "valid"))
    return Words(files.layout, words, train, valid)


def columns(stream: Tensor, count: int) -> Tensor:
    """The stream cut into `count` columns that are each read from top to bottom: [rows, count]."""
    rows = len(stream) // count
    return stream[: rows * count].view(count, rows).t()


def windows(table: Tensor, steps: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets), each [steps, columns], from window `start` on; the last may be short."""
    for first in range(start * steps, len(table) - 1, steps):
        rows = min(steps, len(table) - 1 - first)
        yield table[first : first + rows].contiguous(), table[first + 1 : first + 1 + rows].contiguous()


def _prepare(files: TextFiles, size: int, into: Path) -> None:
    counts: Counter[str] = Counter()
    for path in files.train:
        counts.update(_words(path))
    if not set(counts) - {EOS}:
        raise DataError(f"{files.train[0]} holds no words: give a text file that is not empty.")
    words = _most_frequent(counts, size)
    number = {word: index for index, word in enumerate(words)}
    np.save(into / "train.npy", _numbered(files.train, number))
    np.save(into / "valid.npy", _numbered(files.valid, number))
    (into / "vocabulary.txt").write_text("\n".join(words), encoding="utf-8")


def _most_frequent(counts: Counter[str], size: int) -> list[str]:
    """By frequency, then by letters; the two special words are always there."""
    for special in (EOS, UNKNOWN):
        counts[special] += 0
    ranked = sorted(counts, key=lambda word: (word not in (EOS, UNKNOWN), -counts[word], word))
    return sorted(ranked[:size], key=lambda word: (-counts[word], word))


def _words(path: Path) -> Iterator[str]:
    """Every line ends with <eos>, blank ones too: so the published counts are made."""
    for line in read_lines(path):
        yield from line.split()
        yield EOS


def _numbered(paths: tuple[Path, ...], number: dict[str, int]) -> NDArray[np.int32]:
    unknown = number[UNKNOWN]
    stream = [number.get(word, unknown) for path in paths for word in _words(path)]
    if len(set(stream)) < 2:
        raise DataError(f"{paths[0]} holds no words: give a text file that is not empty.")
    return np.array(stream, dtype=np.int32)
