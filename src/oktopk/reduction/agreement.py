"""Do all ranks mean the same thing? Checked before any data moves, in one small message."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from hashlib import blake2b

import torch

from oktopk.errors import MismatchError, NonFiniteError, OkTopkError, PeerError, UnsupportedError
from oktopk.reduction.communication import Agreed
from oktopk.reduction.gradient import Gradient, Layout
from oktopk.transport.base import Transport
from oktopk.transport.sharing import first_error, share_error

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_FIELDS = ("names", "shapes", "dtype or device", "step", "k (density)", "configuration")


@dataclass(frozen=True)
class Terms:
    """What one rank is about to reduce."""

    layout: Layout
    dtype: torch.dtype
    step: int
    k: int
    configuration: str
    finite: bool
    fault: OkTopkError | None  # why this rank cannot take part
    unused: frozenset[str] = frozenset()  # names that took no part in this rank's backward
    notice: int = 0  # what this rank tells the others besides
    choice: Sequence[int] = ()  # what it tells of its choice, which travels with the terms
    device: str = ""  # of what kind it must be on all ranks; "": of any

    def words(self, room: int = 0) -> list[int]:
        """With `room` words for what is told of the choice."""
        compared = [
            *_digests(self.layout),
            _kind(self.dtype, self.device),
            self.step,
            self.k,
            digest(self.configuration),
        ]
        refused = _REFUSED if self.fault is not None else 0
        told = [*self.choice, *[0] * (room - len(self.choice))]
        return [*compared, *told, int(bool(self.unused)), int(self.finite), self.notice * _NOTICES + refused]

    def describe(self, field: str) -> str:
        shown = {
            "names": [name for name, _ in self.layout],
            "shapes": [numel for _, numel in self.layout],
            "dtype or device": f"{self.dtype} {self.device}".rstrip(),
            "step": self.step,
            "k (density)": self.k,
            "configuration": self.configuration,
        }
        return f"{field} here: {_short(shown[field])}"


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after comparing their terms."""

    skip: bool  # some gradient is not finite, and the policy is to skip
    unused: frozenset[str] = frozenset()  # names that took no part on any rank
    notice: int = 0  # the greatest that a rank told
    told: Sequence[list[int]] = ()  # what each rank told of its choice, if all of them did


_REFUSED, _ENDED, _NOTICES = 1, 2, 4  # in the last word: what is in the way of this rank, and its notice times 4


def agreement_words(room: int) -> int:
    """How many words each rank tells, whatever it is about to reduce: ranks that differ must understand each other."""
    return len(_FIELDS) + room + 3


def refusal(gradient: Gradient) -> OkTopkError | None:
    """Why this cannot be reduced, if so. Returned, not raised: the other ranks must hear of it first."""
    layout, dtypes = gradient.layout, {piece.dtype for piece in gradient.pieces}
    if not dtypes <= set(FLOATING):
        return UnsupportedError(
            f"cannot reduce {layout[0][0] if layout else 'a tensor'!r} of dtype {gradient.dtype}: only float32, "
            "float16, bfloat16 and float64 can be sparsified. Use torch.distributed.all_reduce for integers, and "
            "torch.view_as_real for complex tensors."
        )
    if len(dtypes) > 1:
        return UnsupportedError(f"one vector cannot have several dtypes, got {sorted(map(str, dtypes))}.")
    devices = {piece.device for piece in gradient.pieces}
    if len(devices) > 1:
        return UnsupportedError(f"one vector must be on one device, got pieces on {sorted(map(str, devices))}.")
    total = sum(numel for _, numel in layout)
    if total != gradient.numel:
        return UnsupportedError(f"the layout names {total} entries, but the tensor has {gradient.numel}.")
    if gradient.is_scattered and [numel for _, numel in layout] != [piece.numel() for piece in gradient.pieces]:
        return UnsupportedError("several tensors must be one for each parameter of the layout, of its size.")
    return None


def check_terms(mine: Terms, transport: Transport, on_nonfinite: str, room: int) -> Agreement:
    """Compare terms; raises the same kind of error on every rank when the reduction cannot be done.

    All ranks must leave the same `room` for what they tell of their choices.
    """
    everyone = transport.agree(mine.words(room))
    _check_taking_part(everyone, mine.fault, transport)
    for position, field in enumerate(_FIELDS):
        differing = [rank for rank, words in enumerate(everyone) if words[position] != everyone[0][position]]
        if differing:
            raise MismatchError(
                f"{_ranks(differing)} differ from rank 0 in {field}; {mine.describe(field)}. "
                "Every rank must reduce the same tensors in the same order with the same settings."
            )
    skip = _check_finite(everyone, on_nonfinite)
    unused: frozenset[str] = frozenset()
    if any(words[-3] for words in everyone):
        unused = said_by_all([name for name, _ in mine.layout], mine.unused, transport)
    told = [words[len(_FIELDS) : -3] for words in everyone]
    notice = max(words[-1] // _NOTICES for words in everyone)
    return Agreement(skip, unused, notice, told if all(map(any, told)) else ())


def end_together(error: Exception, transport: Transport, room: int) -> None:
    """Take part in the next agreement of the others by saying that this rank ends, and why."""
    everyone = transport.agree([0] * (agreement_words(room) - 1) + [_ENDED])
    _check_taking_part(everyone, error, transport)


def _check_taking_part(everyone: list[list[int]], fault: Exception | None, transport: Transport) -> None:
    """Raise on every rank if one of them cannot take part: its own error there, what it says on the others."""
    said = [words[-1] % _NOTICES for words in everyone]
    if not any(said):
        return
    texts = share_error(fault, transport)
    is_final = _ENDED in said
    error = first_error(fault, texts, PeerError if is_final else MismatchError)
    assert error is not None
    raise Agreed(error, is_final)


def said_by_all(names: Sequence[str], said: Collection[str], transport: Transport) -> frozenset[str]:
    """Of `names`, which all ranks know, those that every rank says."""
    bits = [sum(1 << bit for bit, name in enumerate(part) if name in said) for part in _chunks(names)]
    everyone = transport.agree(bits)
    common = [reduce(int.__and__, words) for words in zip(*everyone, strict=True)]
    return frozenset(
        name
        for part, word in zip(_chunks(names), common, strict=True)
        for bit, name in enumerate(part)
        if word >> bit & 1
    )


def _chunks(names: Sequence[str], size: int = 62) -> list[Sequence[str]]:
    return [names[start : start + size] for start in range(0, len(names), size)]


def _check_finite(everyone: list[list[int]], on_nonfinite: str) -> bool:
    bad = [rank for rank, words in enumerate(everyone) if not words[-2]]
    if bad and on_nonfinite == "raise":
        raise NonFiniteError(
            f"the gradient of {_ranks(bad)} holds NaN or Inf, or overflows together with what is owed; residuals are "
            "untouched. Lower the learning rate or clip gradients, or pass on_nonfinite='skip' when a GradScaler is to "
            "skip such steps."
        )
    return bool(bad)


@lru_cache(maxsize=1024)  # as many layouts: the same buckets come again in every step
def _digests(layout: Layout) -> tuple[int, int]:
    """Of its names and of its sizes."""
    return digest("\0".join(name for name, _ in layout)), digest(",".join(str(numel) for _, numel in layout))


def _kind(dtype: torch.dtype, device: str) -> int:
    index = FLOATING.index(dtype) if dtype in FLOATING else -1
    return digest(f"{index} {device}") if device else index


@lru_cache(maxsize=64)
def digest(text: str) -> int:
    """One word that tells texts apart."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _short(value: object, limit: int = 200) -> str:
    text = str(value)
    return text if len(text) <= limit else text[:limit] + "..."
