"""Text as one long row of numbers on disk, and the windows that batches are cut from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oktopk.errors import DataError
from oktopk.workloads.cache import cached_folder
from oktopk.workloads.gpt.tokens import Kind, Tokens, load_tokens, train_tokens
from oktopk.workloads.text import TextFiles, find_text, read_blocks

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64, [n, length]
Stream = NDArray[np.integer]  # [tokens], mapped from disk
_HELD_OUT = 10  # without a validation file, the last tenth is held out


@dataclass(frozen=True)
class Text:
    """A prepared corpus."""

    layout: str
    tokens: Tokens
    train: Stream
    valid: Stream


def load_text(data: str, kind: Kind, size: int) -> Text:
    """The text in at most `size` tokens, from the cache after the first time."""
    files = find_text(data)
    key = (1, *files.fingerprints(), kind, size)
    folder = cached_folder("gpt", key, lambda into: _prepare(files, kind, size, into))
    train = np.load(folder / "train.npy", mmap_mode="r")
    if files.valid:
        return Text(files.layout, load_tokens(kind, folder / "tokens"), train, np.load(folder / "valid.npy", "r"))
    cut = len(train) - len(train) // _HELD_OUT
    return Text(files.layout, load_tokens(kind, folder / "tokens"), train[:cut], train[cut:])


def windows(stream: Stream, length: int) -> int:
    """How many pieces of `length` tokens, each followed by one more, lie side by side."""
    return max(0, (len(stream) - 1) // length)


def make_batch(stream: Stream, starts: NDArray[np.int64], length: int) -> Batch:
    """The windows that begin at `starts`, and the same one token later."""
    rows = torch.from_numpy(stream[starts[:, None] + np.arange(length + 1)].astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _prepare(files: TextFiles, kind: Kind, size: int, into: Path) -> None:
    tokens = train_tokens(kind, lambda: _blocks(files.train), size)
    tokens.save(into / "tokens")
    for part, paths in (("train", files.train), ("valid", files.valid)):
        if paths:
            np.save(into / f"{part}.npy", _numbered(paths, tokens))


def _numbered(paths: tuple[Path, ...], tokens: Tokens) -> Stream:
    dtype = np.uint16 if len(tokens) <= 2**16 else np.int32
    parts = [tokens.encode(text).astype(dtype) for text in _blocks(paths)]
    if not parts:
        raise DataError(f"{paths[0]} is empty: give a text file that is not.")
    return np.concatenate(parts)


def _blocks(paths: tuple[Path, ...]) -> Iterator[str]:
    for path in paths:
        yield from read_blocks(path)
