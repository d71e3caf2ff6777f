"""Predicted traffic of every algorithm: words, messages and rounds per rank and step.

The words are upper bounds: what is metered never exceeds them. Symbols: n entries, k kept, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2

from oktopk.config import GaussianKConfig
from oktopk.errors import ConfigError, nearest
from oktopk.primitives.likely import SPARE_ENTRIES
from oktopk.primitives.partition import told_words
from oktopk.primitives.selection import HISTOGRAM_RANKS, HISTOGRAM_WORDS
from oktopk.reduction.agreement import agreement_words
from oktopk.transport.base import SIZE_BYTES
from oktopk.types import index_dtype
from oktopk.wire import HEADER_BYTES

WORD = 4  # bytes
VALUE_BYTES = {
    "float32": 4.0, "float16": 2.0, "bfloat16": 2.0,
    "int8": 1.0 + 4 / 256, "int4": 0.5 + 4 / 128, "codebook2": 0.25 + 4 / 128,
}  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """What one rank receives (and, but for the root of a tree, sends) in one step."""

    payload_words: float  # gradient data
    overhead_bytes: float  # headers, sizes, histograms, agreement
    messages: int  # sent by the busiest rank
    rounds: int  # messages that must follow one another

    @property
    def bytes_received(self) -> float:
        return self.payload_words * WORD + self.overhead_bytes


def predict(algorithm: str, numel: int, k: int, world_size: int, wire: str = "float32", value_bytes: int = 4) -> Cost:
    """An upper bound for one step of `algorithm` with default options.

    `value_bytes` is the size of a value on an exact wire: 8 for float64 gradients.
    """
    if algorithm not in _MODELS:
        raise ConfigError(f"unknown algorithm {algorithm!r}. {nearest(algorithm, _MODELS)}")
    if world_size == 1:
        return Cost(0.0, 0.0, 0, 0)
    shape = _Shape(numel, min(k, numel), world_size, wire, value_bytes)
    words, overhead, messages, rounds = _MODELS[algorithm](shape)
    agreement = 8 * agreement_words(told_words(world_size)) * (world_size - 1)
    return Cost(words, overhead + agreement, messages + world_size - 1, rounds + 1)


@dataclass(frozen=True)
class _Shape:
    n: int
    k: int
    p: int
    wire: str
    value_bytes: int

    @property
    def value_words(self) -> float:
        return (self.value_bytes if self.wire == "float32" else VALUE_BYTES[self.wire]) / WORD

    @property
    def pair_words(self) -> float:
        """An index and a value. Compact indices take less."""
        return self.value_words + index_dtype(self.n).itemsize / WORD

    @property
    def share(self) -> float:
        return (self.p - 1) / self.p

    def message_overhead(self, count: float) -> float:
        # A header, the announced size, and padding to whole blocks of values and words.
        return count * (HEADER_BYTES + 2 * SIZE_BYTES + 64)

    @property
    def has_histograms(self) -> bool:
        """Whether each rank learns the histogram of every other, and with it the sizes of their blocks."""
        return self.p <= HISTOGRAM_RANKS

    @property
    def histogram_bytes(self) -> float:
        return (self.p - 1 if self.has_histograms else 2) * HISTOGRAM_WORDS * index_dtype(self.n).itemsize


def _dense(s: _Shape) -> tuple[float, float, int, int]:
    words = 2 * s.n * s.share * s.value_words
    return words, s.message_overhead(2 * (s.p - 1)), 2 * (s.p - 1), 2 * (s.p - 1)


def _topka(s: _Shape) -> tuple[float, float, int, int]:
    return s.pair_words * s.k * (s.p - 1), s.message_overhead(s.p - 1), s.p - 1, 1


def _topkdsa(s: _Shape) -> tuple[float, float, int, int]:
    # In the worst case all of every rank's choice lies in one region.
    arriving = s.pair_words * min(s.k, ceil(s.n / s.p)) * (s.p - 1)
    union = s.pair_words * min(s.p * s.k, s.n)
    return arriving + union, s.message_overhead(2 * (s.p - 1)), 3 * (s.p - 1), 3


def _gtopk(s: _Shape) -> tuple[float, float, int, int]:
    levels = ceil(log2(s.p))
    return s.pair_words * s.k * (levels + 1), s.message_overhead(levels + 1), 4 * levels, 4 * levels


def _gaussiank(s: _Shape) -> tuple[float, float, int, int]:
    chosen = min(s.n, ceil(s.k * (1 + GaussianKConfig().tolerance)))
    return s.pair_words * chosen * (s.p - 1), s.message_overhead(s.p - 1), s.p - 1, 1


def _randomk(s: _Shape) -> tuple[float, float, int, int]:
    return _dense(replace(s, n=s.k))


def _oktopk(s: _Shape) -> tuple[float, float, int, int]:
    words = 3 * s.pair_words * min(s.k, s.n) * s.share
    # Where the last step told too little of this one: histograms, the sizes of further blocks, and the blocks.
    agreements = 16 * 2 * (s.p - 1)
    spare = (32 + (SPARE_ENTRIES + 1) * s.p) * s.pair_words * WORD
    overhead = s.message_overhead(4 * (s.p - 1)) + s.histogram_bytes + agreements + spare
    return words, overhead, 2 * (s.p - 1), 2  # pairs, blocks


_MODELS = {
    "dense": _dense,
    "topka": _topka,
    "topkdsa": _topkdsa,
    "gtopk": _gtopk,
    "gaussiank": _gaussiank,
    "randomk": _randomk,
    "oktopk": _oktopk,
}
