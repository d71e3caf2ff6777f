"""WordPiece: from a vocabulary file, or trained on the corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from oktopk.errors import DataError
from oktopk.workloads.text import read_lines

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Pieces:
    """Sentences to piece numbers, with the numbers of the special pieces at hand."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = tuple(vocabulary)
        numbers = {piece: number for number, piece in enumerate(self.vocabulary)}
        self.pad, self.unknown, self.cls, self.sep, self.mask = (numbers[piece] for piece in SPECIAL)
        self.ordinary = [number for number, piece in enumerate(self.vocabulary) if not _is_reserved(piece)]
        self._tokenizer = _tokenizer(numbers)

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, sentences: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(sentences, add_special_tokens=False)]

    def decode(self, numbers: list[int]) -> str:
        text: str = self._tokenizer.decode(numbers, skip_special_tokens=False)
        return text


def read_vocabulary(path: Path) -> Pieces:
    """A vocab.txt as published with BERT: one piece per line."""
    if not path.is_file():
        raise DataError(f"{path} is no file: give BERT's vocab.txt (one piece per line), or none to train one.")
    pieces = list(read_lines(path))
    while pieces and not pieces[-1]:
        pieces.pop()
    missing = [piece for piece in SPECIAL if piece not in pieces]
    if missing:
        raise DataError(f"{path} ({len(pieces)} pieces) has no {', '.join(missing)}: use a vocabulary made for BERT.")
    return Pieces(pieces)


def train_vocabulary(sentences: Callable[[], Iterable[str]], size: int) -> Pieces:
    """A vocabulary of at most `size` pieces that fits the sentences, read twice: the same for the same text."""
    tokenizer = _tokenizer({"[UNK]": 0})
    trainer = WordPieceTrainer(
        vocab_size=size,
        # Naming the inner characters fixes their numbers, which decide ties: the trainer would find them in any order.
        special_tokens=[*SPECIAL, *_inner_characters(tokenizer, sentences())],
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(), trainer)
    numbers = tokenizer.get_vocab(with_added_tokens=False)
    return Pieces(sorted(numbers, key=lambda piece: numbers[piece]))


def _inner_characters(tokenizer: Tokenizer, lines: Iterable[str]) -> list[str]:
    characters: set[str] = set()
    for line in lines:
        characters.update(tokenizer.normalizer.normalize_str(line))
    return [f"##{character}" for character in sorted(characters) if not character.isspace()]


def _tokenizer(numbers: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.decoder = WordPieceDecoder()
    if set(SPECIAL) <= set(numbers):
        tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _is_reserved(piece: str) -> bool:
    return piece in SPECIAL or piece.startswith("[unused")
