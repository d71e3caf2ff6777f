"""`oktopk data images` and `oktopk data text`: what a data set is, whether it is whole, and its place in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from oktopk.cli.console import console


@dataclass(frozen=True)
class Images:
    """Check an image set and prepare it for `oktopk train vision`.

    DATA is 'shapes' (embedded), the CIFAR-10 python archive or its folder, a folder with MNIST's IDX files, or a folder
    with train/CLASS/ and val/CLASS/ of images. What is missing or damaged is named, with where to get it.

    To tune without a look at the validation part, let some training images judge: --tuning FOLDER, then train on it.

    Example:
      oktopk data images shapes
    """

    data: Annotated[str, tyro.conf.Positional] = "shapes"  # name or path of the set
    size: int = 32  # pixels per side that images of a folder must have
    resize: bool = False  # images of a folder may have any size: they are cropped and scaled while training
    verify: bool = True  # compare CIFAR-10 with the published checksums
    tuning: Path | None = None  # folder for a copy in which one training image in twelve judges, and no other does

    def __call__(self) -> int:
        from oktopk.workloads.vision.data import load_images, write_for_tuning

        images = load_images(self.data, self.size, self.resize, self.verify)
        colours = "colour" if images.channels == 3 else "grey"
        _say(f"{self.data}: {images.layout}, {len(images.classes)} classes, {images.size}x{images.size}, {colours}")
        _say(f"  training   {len(images.train):>7} images")
        _say(f"  validation {len(images.valid):>7} images")
        if self.tuning:
            write_for_tuning(images, self.tuning)
        return _ready(f"oktopk train vision --data {self.tuning or self.data}")


@dataclass(frozen=True)
class Text:
    """Check a text corpus and prepare it for `oktopk train ptb`, `oktopk train bert` and `oktopk train gpt`.

    DATA is 'docstrings' (embedded), a folder or the original archive of PTB or WikiText, or plain text: for bert
    with one sentence per line and blank lines between documents, for gpt any.
    To tune without a look at the validation part, let some training documents judge: --tuning FOLDER, then train on it.

    Example:
      oktopk data text docstrings
    """

    data: Annotated[str, tyro.conf.Positional] = "docstrings"  # name or path of the corpus
    words: int = 4_000  # vocabulary of the word model: 4000 small, 10000 ptb, 33278 wikitext2
    pieces: int = 3_000  # WordPiece vocabulary to train: 3000 small, 30522 base
    vocabulary: str | None = None  # a vocab.txt to use instead of training one
    length: int = 48  # pieces per pair of bert
    tokens: Literal["characters", "bpe"] = "characters"  # what gpt reads, as its small preset does
    tuning: Path | None = None  # folder for a copy in which one training document in twelve judges, and no other does

    def __call__(self) -> int:
        from oktopk.workloads.text import find_text, write_for_tuning

        files = find_text(self.data)
        _say(f"{self.data}: {files.layout}, {len(files.train)} training files, {len(files.valid)} validation files")
        if files.valid:
            self._prepare_words()
        else:
            _say("  ptb  needs a validation part: name two files train.txt and valid.txt in one folder")
        self._prepare_tokens()
        self._prepare_pairs()
        if self.tuning:
            write_for_tuning(self.data, self.tuning)
        return _ready(f"oktopk train bert --data {self.tuning or self.data}")

    def _prepare_words(self) -> None:
        from oktopk.workloads.ptb.data import load_words

        words = load_words(self.data, self.words)
        _say(f"  ptb  {len(words.train)} training words, {len(words.valid)} validation words, "
             f"vocabulary {len(words.vocabulary)}")  # fmt: skip

    def _prepare_tokens(self) -> None:
        from oktopk.workloads.gpt.workload import GptConfig, GptWorkload

        text = GptWorkload(GptConfig(data=self.data, tokens=self.tokens), 0).text
        _say(f"  gpt  {len(text.train)} training {self.tokens}, {len(text.valid)} validation {self.tokens}, "
             f"vocabulary {len(text.tokens)}")  # fmt: skip

    def _prepare_pairs(self) -> None:
        try:
            from oktopk.workloads.bert.data import Corpus, load_corpus
        except ModuleNotFoundError as error:
            _say(f"  bert needs the module {error.name!r}: pip install 'oktopk[bert]'")
            return
        folder, pieces = load_corpus(self.data, self.vocabulary, self.pieces)
        for part in ("train", "valid"):
            corpus = Corpus(folder, part, self.length)
            counts = ", ".join(f"{count} {what}" for what, count in corpus.counts.items())
            _say(f"  bert {part}: {counts}; {corpus.skipped} documents of one sentence left out")
        _say(f"  bert vocabulary {len(pieces)}")


def _ready(command: str) -> int:
    from oktopk.workloads.cache import cache_root

    _say(f"Ready, prepared in {cache_root()}. Train with: {command}")
    return 0


def _say(text: str) -> None:
    console().print(text, markup=False, soft_wrap=True)
