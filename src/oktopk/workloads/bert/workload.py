"""The `bert` workload: pre-training on masked words and next sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oktopk.errors import ConfigError, nearest
from oktopk.workloads.base import Metric, Recipe
from oktopk.workloads.bert.data import IGNORED, Batch, Corpus, load_corpus, make_batch
from oktopk.workloads.bert.model import Bert, Shape
from oktopk.workloads.order import evaluating, rank_batches, shard, steps_per_epoch
from oktopk.workloads.text import EMBEDDED

_VALID_BATCH = 32
_VALID_SEED = 1  # validation hides the same words every time


@dataclass(frozen=True)
class Preset:
    """A network, the length of its input, and how it is trained."""

    shape: Shape
    length: int  # pieces per pair
    recipe: Recipe


_PAPER = Recipe(
    optimizer="adamw", lr=2e-4, weight_decay=0.01, batch_size=8, epochs=3, lr_warmup_epochs=0.2, lr_linear_decay=True,
    norm_clip=1.0, density=0.01,
)  # fmt: skip
# With gradients more than half is dense: a sparse entry comes about 100 steps late, which is much in 2,000.
_SMALL = replace(
    _PAPER, optimizer="lamb", lr=6e-3, epochs=6, lr_warmup_epochs=0.5, warmup_steps=1200, reduce="updates"
)  # fmt: skip
PRESETS = {
    "tiny": Preset(Shape(hidden=64, layers=2, heads=2, vocabulary=2_000, dropout=0.0), 48, _SMALL),
    "small": Preset(Shape(hidden=96, layers=2, heads=2, vocabulary=3_000, dropout=0.0), 48, _SMALL),
    "base": Preset(Shape(hidden=768, layers=12, heads=12, vocabulary=30_522), 128, _PAPER),
    "large": Preset(Shape(hidden=1024, layers=24, heads=16, vocabulary=30_522), 128, _PAPER),
}


@dataclass(frozen=True)
class BertConfig:
    """BERT pre-training."""

    preset: str = "small"  # tiny, small, base (110 M parameters), large
    data: str = EMBEDDED  # 'docstrings', a text file, a folder of .txt files, or WikiText as published
    vocabulary: str | None = None  # a vocab.txt of WordPiece; trained on the corpus when absent
    batch_size: int | None = None  # pairs per rank; larger = fewer, steadier steps
    length: int | None = None  # pieces per pair; longer = more context, more work
    tied: bool = True  # decoder shares the embedding; off adds vocabulary x hidden parameters, as in the paper

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigError(f"unknown bert preset {self.preset!r}. {nearest(self.preset, PRESETS)}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"batch_size must be 1 or more, got {self.batch_size}.")
        if self.length is not None and not 8 <= self.length <= 512:
            raise ConfigError(f"length must be in 8..512, got {self.length}: it counts the pieces of a pair.")


class BertWorkload:
    """Model, batches, loss and perplexity of the hidden words."""

    name = "bert"
    metric = Metric("perplexity", lower_is_better=True)

    def __init__(self, config: BertConfig, seed: int) -> None:
        self.config = config
        self.preset = config.preset
        self._preset = PRESETS[config.preset]
        self._length = config.length or self._preset.length
        self._seed = seed
        recipe = self._preset.recipe
        self.recipe = replace(recipe, batch_size=config.batch_size or recipe.batch_size)
        folder, self.pieces = load_corpus(config.data, config.vocabulary, self._preset.shape.vocabulary)
        self.train, self.valid = (Corpus(folder, part, self._length) for part in ("train", "valid"))
        self.notices = _notices(self.train.skipped + self.valid.skipped)

    def model(self) -> nn.Module:
        shape = self._preset.shape
        return Bert(replace(shape, vocabulary=max(shape.vocabulary, len(self.pieces))), self.config.tied)

    def steps_per_epoch(self, world_size: int) -> int:
        return steps_per_epoch(len(self.train), self.recipe.batch_size, world_size, self.config.data)

    def batches(self, epoch: int, rank: int, world_size: int, start: int = 0) -> Iterator[Batch]:
        order = rank_batches(len(self.train), self.recipe.batch_size, self._seed, epoch, rank, world_size, start)
        for numbers, rng in order:
            yield make_batch(self.train, numbers, rng, self.pieces, self._length)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean over hidden words plus mean over pairs, as in BERT."""
        batch = batch.to(next(model.parameters()).device)
        wanted = batch.labels != IGNORED
        words, related = model(batch.pieces, batch.segments, batch.present, wanted)
        loss: Tensor = cross_entropy(words, batch.labels[wanted]) + cross_entropy(related, batch.unrelated)
        return loss

    def evaluate(self, model: nn.Module, rank: int, world_size: int) -> dict[str, float]:
        totals = {"loss_sum": 0.0, "words": 0.0, "correct": 0.0, "pairs_correct": 0.0, "pairs": 0.0}
        with torch.no_grad(), evaluating(model):
            for numbers in shard(len(self.valid), rank, world_size, _VALID_BATCH):
                rng = np.random.default_rng([_VALID_SEED, int(numbers[0])])
                _add_(totals, model, make_batch(self.valid, numbers, rng, self.pieces, self._length))
        return totals

    def summarize(self, totals: Mapping[str, float]) -> dict[str, float]:
        if not totals["words"]:
            return {}
        loss = totals["loss_sum"] / totals["words"]
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),  # 700: exp overflows soon after
            "mlm_accuracy": totals["correct"] / totals["words"],
            "nsp_accuracy": totals["pairs_correct"] / totals["pairs"],
        }

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is carried from batch to batch."""


def _notices(skipped: int) -> tuple[str, ...]:
    return (f"{skipped} documents of one sentence make no pair and are left out.",) if skipped else ()


def _add_(totals: dict[str, float], model: nn.Module, batch: Batch) -> None:
    batch = batch.to(next(model.parameters()).device)
    wanted = batch.labels != IGNORED
    words, related = model(batch.pieces, batch.segments, batch.present, wanted)
    labels = batch.labels[wanted]
    totals["loss_sum"] += cross_entropy(words, labels, reduction="sum").item()
    totals["words"] += len(labels)
    totals["correct"] += (words.argmax(1) == labels).sum().item()
    totals["pairs_correct"] += (related.argmax(1) == batch.unrelated).sum().item()
    totals["pairs"] += len(batch.unrelated)
