"""Sentence pairs with masked words, made batch by batch from a tokenised corpus on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oktopk.errors import DataError
from oktopk.workloads.bert.tokenizer import Pieces, read_vocabulary, train_vocabulary
from oktopk.workloads.cache import cached_folder, fingerprint
from oktopk.workloads.text import TextFiles, documents, find_text

IGNORED = -100  # label of positions that are not predicted
_HELD_OUT_EVERY = 20  # without a validation file, one document of so many is held out
_SPECIAL_PER_PAIR = 3  # [CLS] first [SEP] second [SEP]
_BLOCK = 512  # documents tokenised at once
_HIDDEN, _MASKED, _RANDOM = 0.15, 0.8, 0.1  # hidden; of those: shown as [MASK], as a random piece; the rest as they are


@dataclass(frozen=True)
class Batch:
    """Pairs ready for the network."""

    pieces: Tensor  # int64, [n, length]
    segments: Tensor  # int64, [n, length]: 0 first sentence, 1 second
    present: Tensor  # bool, [n, length]: False is padding
    labels: Tensor  # int64, [n, length]: the hidden piece, or IGNORED
    unrelated: Tensor  # int64, [n]: 1 when the second sentence comes from elsewhere

    def to(self, device: torch.device) -> Batch:
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


class Corpus:
    """Tokenised text on disk, mapped, and its cut into passages of about one pair each."""

    def __init__(self, folder: Path, part: str, length: int) -> None:
        self._tokens = np.load(folder / f"{part}.tokens.npy", mmap_mode="r")  # [pieces]
        self._starts = np.load(folder / f"{part}.sentences.npy")  # int64, [sentences + 1]
        self._documents = np.load(folder / f"{part}.documents.npy")  # int64, [documents + 1], in sentences
        self.skipped = int(np.load(folder / f"{part}.skipped.npy"))  # documents of one sentence
        self._room = length - _SPECIAL_PER_PAIR
        self.first, self.last, self._document = _passages(self._starts, self._documents, self._room)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def counts(self) -> dict[str, int]:
        """What there is, for people."""
        return {
            "documents": len(self._documents) - 1,
            "sentences": len(self._starts) - 1,
            "pieces": len(self._tokens),
            "passages": len(self),
        }

    def pair(self, number: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
        """Two stretches of text, and whether the second does not follow the first: true half of the time."""
        first, last = self.first[number], self.last[number]
        middle = int(rng.integers(first + 1, last))
        unrelated = bool(rng.random() < 0.5)
        second = self._elsewhere(number, rng) if unrelated else (middle, last)
        return *self._trimmed(self._stretch(first, middle), self._stretch(*second)), unrelated

    def _elsewhere(self, number: int, rng: np.random.Generator) -> tuple[int, int]:
        """Sentences of another document."""
        other = number
        while self._document[other] == self._document[number]:
            other = int(rng.integers(len(self)))
        return int(rng.integers(self.first[other], self.last[other])), int(self.last[other])

    def _stretch(self, first: int, last: int) -> NDArray[np.int64]:
        return np.asarray(self._tokens[self._starts[first] : self._starts[last]], dtype=np.int64)

    def _trimmed(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Both cut at the end so that they fit together, the longer one first."""
        excess = max(0, len(a) + len(b) - self._room)
        from_a = min(excess, max(0, len(a) - self._room // 2))
        from_b = excess - from_a
        return a[: len(a) - from_a], b[: len(b) - from_b]


def load_corpus(data: str, vocabulary: str | None, size: int) -> tuple[Path, Pieces]:
    """The tokenised corpus folder and its pieces, from the cache after the first time."""
    files = find_text(data)
    given = None if vocabulary is None else Path(vocabulary).expanduser()
    key = (3, *files.fingerprints(), size if given is None or not given.is_file() else fingerprint(given))

    def fill(into: Path) -> None:
        pieces = _trained(files, size) if given is None else read_vocabulary(given)
        (into / "vocab.txt").write_text("\n".join(pieces.vocabulary) + "\n", encoding="utf-8")
        for part in ("train", "valid"):
            _tokenise(_documents_of(files, part), pieces, into, part, data)

    if given is not None and not given.is_file():
        read_vocabulary(given)  # raises, before any work
    folder = cached_folder("bert", key, fill)
    return folder, read_vocabulary(folder / "vocab.txt")


def make_batch(
    corpus: Corpus, numbers: NDArray[np.int64], rng: np.random.Generator, pieces: Pieces, length: int
) -> Batch:
    """The pairs of some passages, masked: the same for the same numbers and generator."""
    shape = (len(numbers), length)
    tokens, segments = np.full(shape, pieces.pad, np.int64), np.zeros(shape, np.int64)
    candidates, present = np.zeros(shape, bool), np.zeros(shape, bool)
    unrelated = np.zeros(len(numbers), np.int64)
    for row, number in enumerate(numbers):
        a, b, unrelated[row] = corpus.pair(number, rng)
        end = len(a) + len(b) + _SPECIAL_PER_PAIR
        tokens[row, :end] = np.concatenate([[pieces.cls], a, [pieces.sep], b, [pieces.sep]])
        segments[row, len(a) + 2 : end] = 1
        present[row, :end] = candidates[row, :end] = True
        candidates[row, [0, len(a) + 1, end - 1]] = False
    shown, labels = _masked(tokens, candidates, rng, pieces)
    return Batch(*(torch.from_numpy(array) for array in (shown, segments, present, labels, unrelated)))


def _masked(
    tokens: NDArray[np.int64], candidates: NDArray[np.bool_], rng: np.random.Generator, pieces: Pieces
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What the network sees, and what it must say: 15% hidden, at least one per pair, as 80/10/10."""
    score = np.where(candidates, rng.random(tokens.shape), 2.0)
    count = np.maximum(1, np.rint(_HIDDEN * candidates.sum(1))).astype(int)
    limit = np.take_along_axis(np.sort(score, axis=1), count[:, None] - 1, axis=1)
    hidden = (score <= limit) & candidates
    fate = rng.random(tokens.shape)
    random_pieces = np.array(pieces.ordinary)[rng.integers(0, len(pieces.ordinary), tokens.shape)]
    shown = np.where(hidden & (fate < _MASKED), pieces.mask, tokens)
    shown = np.where(hidden & (fate >= _MASKED) & (fate < _MASKED + _RANDOM), random_pieces, shown)
    return shown, np.where(hidden, tokens, IGNORED)


def _passages(
    starts: NDArray[np.int64], document_starts: NDArray[np.int64], room: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(first, last, document) of each passage, in sentences: as long as a pair, two sentences or more, one document."""
    count = np.diff(document_starts)
    document = np.repeat(np.arange(len(count)), count)
    place = starts[:-1] - starts[document_starts[document]]  # pieces before this sentence in its document
    group = place // room
    new = np.ones(len(document), bool)
    new[1:] = (document[1:] != document[:-1]) | (group[1:] != group[:-1])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(document))
    owner = document[first]
    # A lone sentence borrows the next one of its document, or the one before.
    alone = last - first == 1
    borrow_next = alone & (last < document_starts[owner + 1])
    last = last + borrow_next
    first = first - (alone & ~borrow_next & (first > document_starts[owner]))
    good = last - first > 1
    return first[good], last[good], owner[good]


def _trained(files: TextFiles, size: int) -> Pieces:
    return train_vocabulary(lambda: chain.from_iterable(_documents_of(files, "train")), size)


def _documents_of(files: TextFiles, part: str) -> Iterator[list[str]]:
    if files.valid:
        yield from documents(files.train if part == "train" else files.valid)
        return
    for number, document in enumerate(documents(files.train)):
        if (number % _HELD_OUT_EVERY == 1) == (part == "valid"):
            yield document


def _tokenise(texts: Iterable[list[str]], pieces: Pieces, into: Path, part: str, source: str) -> None:
    """Write the documents that can make a pair, block by block; only the borders stay in memory."""
    lengths: list[int] = []  # of sentences, in pieces
    counts: list[int] = []  # of documents, in sentences
    singles = 0
    dtype = np.uint16 if len(pieces) <= 2**16 else np.int32
    iterator = iter(texts)
    with open(into / f"{part}.tokens", "wb") as file:
        while block := list(islice(iterator, _BLOCK)):
            for encoded in _encoded(block, pieces):
                singles += len(encoded) == 1
                if len(encoded) > 1:
                    file.write(np.concatenate(encoded, dtype=dtype, casting="unsafe").tobytes())
                    lengths += map(len, encoded)
                    counts.append(len(encoded))
    _require_pairs(len(counts), singles, part, source)
    _as_npy(into / f"{part}.tokens", dtype)
    np.save(into / f"{part}.skipped.npy", singles)
    np.save(into / f"{part}.sentences.npy", np.cumsum([0, *lengths], dtype=np.int64))
    np.save(into / f"{part}.documents.npy", np.cumsum([0, *counts], dtype=np.int64))


def _encoded(block: list[list[str]], pieces: Pieces) -> Iterator[list[list[int]]]:
    """Documents as lists of non-empty sentences of numbers."""
    flat = iter(pieces.encode([sentence for document in block for sentence in document]))
    for document in block:
        yield [numbers for numbers in islice(flat, len(document)) if numbers]


def _as_npy(path: Path, dtype: type) -> None:
    """The raw file as an array file that can be mapped."""
    raw = np.memmap(path, dtype=dtype, mode="r")
    np.save(path.with_name(path.name + ".npy"), raw)
    del raw
    path.unlink()


def _require_pairs(pairs: int, singles: int, part: str, source: str) -> None:
    if pairs == 0 and singles == 0:
        raise DataError(
            f"{source}: the {part} text is empty: give sentences, one per line, blank lines between documents."
        )
    if pairs < 2:
        raise DataError(
            f"{source}: {pairs} {part} documents have two sentences or more and {singles} have one: pairs need "
            "at least two such documents. Put one sentence per line and blank lines only between documents."
        )
