"""What a token is: a character, or a piece of byte-pair encoding trained on the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from oktopk.errors import UnsupportedError

Kind = Literal["characters", "bpe"]
UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # stands for every character that is too rare to be kept
_END = "<|endoftext|>"  # of GPT-2: the last of its 50,257 pieces


class Tokens(Protocol):
    """Text to numbers and back."""

    def __len__(self) -> int: ...

    def encode(self, text: str) -> NDArray[np.int64]: ...

    def decode(self, numbers: Iterable[int]) -> str: ...

    def save(self, path: Path) -> None: ...


class Characters:
    """The characters of a text, most frequent first."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._codes = _codes(characters)
        self._order = np.argsort(self._codes)
        self._unknown = characters.index(UNKNOWN)

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> NDArray[np.int64]:
        codes = _codes(text)
        found = self._order[np.searchsorted(self._codes, codes, sorter=self._order).clip(max=len(self) - 1)]
        return np.where(self._codes[found] == codes, found, self._unknown)

    def decode(self, numbers: Iterable[int]) -> str:
        return "".join(self.characters[number] for number in numbers)

    def save(self, path: Path) -> None:
        path.write_text(self.characters, encoding="utf-8", newline="")


class Pieces:
    """Byte-pair encoding as GPT-2 has it: over bytes, so that nothing is unknown."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.array(self._tokenizer.encode(text).ids, dtype=np.int64)

    def decode(self, numbers: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(numbers), skip_special_tokens=False))

    def save(self, path: Path) -> None:
        self._tokenizer.save(str(path))


def train_tokens(kind: Kind, texts: Callable[[], Iterable[str]], size: int) -> Tokens:
    """At most `size` tokens that fit the texts: the same for the same text."""
    return _trained_characters(texts(), size) if kind == "characters" else _trained_pieces(texts(), size)


def load_tokens(kind: Kind, path: Path) -> Tokens:
    """What `save` has written."""
    if kind == "characters":
        return Characters(path.read_bytes().decode("utf-8"))
    return Pieces(_tokenizers().Tokenizer.from_file(str(path)))


def _trained_characters(texts: Iterable[str], size: int) -> Characters:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    counts.pop(UNKNOWN, None)
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    return Characters("".join([*ranked[: size - 1], UNKNOWN]))


def _trained_pieces(texts: Iterable[str], size: int) -> Pieces:
    library = _tokenizers()
    bytes_first = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = bytes_first
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=sorted(bytes_first.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([_END])
    return Pieces(tokenizer)


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "tokens 'bpe' need the module 'tokenizers': pip install 'oktopk[bert]', or train on 'characters'."
        ) from error
    return tokenizers
