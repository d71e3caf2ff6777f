"""The 29 labels of the recogniser, and text as the labels can spell it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

ALPHABET = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "  # position = label; 0 is CTC's blank, which no transcript contains
BLANK = 0
_LABELS = {character: label for label, character in enumerate(ALPHABET) if label != BLANK}


def normalise(text: str) -> str:
    """Upper case, single spaces; nothing is dropped, so `unknown` can report what does not fit."""
    return " ".join(text.upper().split())


def unknown(text: str) -> list[str]:
    """Characters that no label spells, each once, in order."""
    return sorted({character for character in text if character not in _LABELS})


def encode(text: str) -> list[int]:
    return [_LABELS[character] for character in text]


def spell(labels: Iterable[int]) -> str:
    """Labels back to text."""
    return "".join(ALPHABET[label] for label in labels)


def frames_needed(labels: Sequence[int]) -> int:
    """The least number of output frames CTC can spell these labels in: a blank must part two equal neighbours."""
    return len(labels) + sum(a == b for a, b in pairwise(labels))
