"""The `gpt` workload: predicting the next token of any text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oktopk.errors import ConfigError, DataError, nearest
from oktopk.workloads.base import Metric, Recipe
from oktopk.workloads.gpt.data import Batch, Text, load_text, make_batch, windows
from oktopk.workloads.gpt.model import Decoder, Shape
from oktopk.workloads.gpt.tokens import Kind
from oktopk.workloads.order import evaluating, rank_batches, shard, steps_per_epoch
from oktopk.workloads.text import EMBEDDED

_VALID_BATCH = 32
_LEAST_VOCABULARY = {"characters": 2, "bpe": 257}  # an unknown and a known one; every byte and the end of a text


@dataclass(frozen=True)
class Preset:
    """A network, the text it reads, and how it is trained."""

    shape: Shape  # its vocabulary is that of `tokens`
    recipe: Recipe
    tokens: Kind = "characters"
    pieces: int = 2_000  # vocabulary when characters are exchanged for byte pairs
    epoch_steps: int = 100  # steps that count as an epoch; 0: as many as the text has


# The settings of nanoGPT for characters on a CPU. Gradients need a dense third: AdamW damps what comes late.
_SMALL = Recipe(
    optimizer="adamw", lr=1e-3, weight_decay=0.1, beta2=0.99, batch_size=12, epochs=6, lr_warmup_epochs=1.0,
    lr_warmup_from=0.0, lr_cosine_to=0.1, norm_clip=1.0, density=0.05, warmup_steps=200,
    reduce="updates",
)  # fmt: skip
_GPT2 = replace(_SMALL, lr=6e-4, beta2=0.95, batch_size=8, epochs=4, lr_warmup_epochs=0.1, density=0.01)
_CHARACTERS = 128  # all but 1 in 10,000 of WikiText-2's
PRESETS = {
    "tiny": Preset(Shape(hidden=64, layers=2, heads=2, length=32, vocabulary=_CHARACTERS), replace(_SMALL, epochs=3)),
    "small": Preset(Shape(hidden=128, layers=4, heads=4, length=64, vocabulary=_CHARACTERS), _SMALL),
    # The smallest GPT-2: 124,439,808 parameters.
    "124m": Preset(
        Shape(hidden=768, layers=12, heads=12, length=1024, vocabulary=50_257, dropout=0.1, bias=True),
        _GPT2, tokens="bpe", pieces=50_257, epoch_steps=0,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class GptConfig:
    """A decoder that predicts the next token of a text."""

    preset: str = "small"  # tiny, small (0.8 M parameters), 124m (the shape of the smallest GPT-2)
    data: str = EMBEDDED  # 'docstrings', a text file, a folder of .txt files, or WikiText or PTB as published
    tokens: Kind | None = None  # characters, or bpe: byte pairs trained on the text; None: the preset's
    vocabulary: int | None = None  # tokens kept; larger = shorter texts (bpe) or fewer unknown (characters)
    length: int | None = None  # tokens per example; longer = more context, more work
    batch_size: int | None = None  # examples per rank; larger = fewer, steadier steps
    epoch_steps: int | None = None  # steps that count as one epoch; 0: as many as the text has
    valid_windows: int = 2_048  # validation examples scored, spread evenly over the text; 0: all

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigError(f"unknown gpt preset {self.preset!r}. {nearest(self.preset, PRESETS)}")
        for name, least in (("batch_size", 1), ("length", 1), ("epoch_steps", 0), ("valid_windows", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be {least} or more, got {value}.")
        if self.kind not in _LEAST_VOCABULARY:
            raise ConfigError(f"unknown tokens {self.kind!r}. {nearest(self.kind, _LEAST_VOCABULARY)}")
        least = _LEAST_VOCABULARY[self.kind]
        if self.vocabulary is not None and self.vocabulary < least:
            raise ConfigError(f"vocabulary must be {least} or more with tokens {self.kind!r}, got {self.vocabulary}.")

    @property
    def kind(self) -> Kind:
        """What a token is, with the preset's answer if none was given."""
        return self.tokens or PRESETS[self.preset].tokens

    @property
    def shape(self) -> Shape:
        """The network with what was given in the preset's place."""
        preset = PRESETS[self.preset]
        size = self.vocabulary or (preset.pieces if self.kind == "bpe" else _CHARACTERS)
        return replace(preset.shape, vocabulary=size, length=self.length or preset.shape.length)


class GptWorkload:
    """Model, batches, loss and perplexity of the next token."""

    name = "gpt"
    metric = Metric("perplexity", lower_is_better=True)

    def __init__(self, config: GptConfig, seed: int) -> None:
        self.config = config
        self.preset = config.preset
        self._shape = config.shape
        self._length = self._shape.length
        self._seed = seed
        preset = PRESETS[config.preset]
        self._epoch_steps = preset.epoch_steps if config.epoch_steps is None else config.epoch_steps
        self.recipe = replace(preset.recipe, batch_size=config.batch_size or preset.recipe.batch_size)
        self.notices: tuple[str, ...] = ()
        self.text: Text = load_text(config.data, config.kind, self._shape.vocabulary)
        self._scored = self._validation_starts()

    def model(self) -> nn.Module:
        return Decoder(self._shape)

    def steps_per_epoch(self, world_size: int) -> int:
        steps = steps_per_epoch(self._examples, self.recipe.batch_size, world_size, self.config.data)
        return min(steps, self._epoch_steps or steps)

    def batches(self, epoch: int, rank: int, world_size: int, start: int = 0) -> Iterator[Batch]:
        """Every part of the text at most once an epoch, each time cut at other places."""
        order = rank_batches(self._examples, self.recipe.batch_size, self._seed, epoch, rank, world_size, start)
        for numbers, rng in islice(order, self.steps_per_epoch(world_size) - start):
            starts = numbers * self._length + rng.integers(self._length, size=len(numbers))
            yield make_batch(self.text.train, starts, self._length)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._cross_entropy(model, batch, "mean")

    def evaluate(self, model: nn.Module, rank: int, world_size: int) -> dict[str, float]:
        totals = {"loss_sum": 0.0, "tokens": 0.0}
        with torch.no_grad(), evaluating(model):
            for numbers in shard(len(self._scored), rank, world_size, _VALID_BATCH):
                batch = make_batch(self.text.valid, self._scored[numbers], self._length)
                totals["loss_sum"] += self._cross_entropy(model, batch, "sum").item()
                totals["tokens"] += batch[1].numel()
        return totals

    def summarize(self, totals: Mapping[str, float]) -> dict[str, float]:
        """'loss' in nats per token."""
        if not totals["tokens"]:
            return {}
        loss = totals["loss_sum"] / totals["tokens"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # 700: exp overflows soon after

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is carried from batch to batch."""

    @property
    def _examples(self) -> int:
        """One fewer than fit, so that each may begin up to a whole length later."""
        return max(0, windows(self.text.train, self._length) - 1)

    def _validation_starts(self) -> NDArray[np.int64]:
        count = windows(self.text.valid, self._length)
        if count == 0:
            raise DataError(
                f"{self.config.data} has {len(self.text.valid)} validation tokens, fewer than one example of "
                f"{self._length} and the token after it: lower length, or give more text."
            )
        wanted = min(count, self.config.valid_windows or count)
        return np.linspace(0, count - 1, wanted).astype(np.int64) * self._length

    def _cross_entropy(self, model: nn.Module, batch: Batch, reduction: str) -> Tensor:
        device = next(model.parameters()).device
        inputs, targets = (part.to(device, non_blocking=True) for part in batch)
        loss: Tensor = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction=reduction)
        return loss
