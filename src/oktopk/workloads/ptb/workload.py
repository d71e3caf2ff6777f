"""The `ptb` workload: word-level language modelling with a carried hidden state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oktopk.errors import ConfigError, DataError, nearest
from oktopk.workloads.base import Metric, Recipe
from oktopk.workloads.order import evaluating
from oktopk.workloads.ptb.data import Words, columns, load_words, windows
from oktopk.workloads.ptb.model import Hidden, WordLSTM, zero_state
from oktopk.workloads.text import EMBEDDED

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64, [steps, columns]
_VALID_COLUMNS = 16  # fixed, so that the figure does not depend on the number of ranks


@dataclass(frozen=True)
class Preset:
    """A network and how it is trained."""

    hidden: int
    layers: int
    dropout: float
    vocabulary: int  # words kept; the others become <unk>
    steps: int  # words per back-propagation
    recipe: Recipe


_PAPER = Recipe(
    optimizer="sgd", lr=20.0, momentum=0.0, batch_size=20, epochs=40, lr_decay=0.95, norm_clip=0.25, density=0.02,
    warmup_steps=128,
)  # fmt: skip
PRESETS = {
    # The paper's network on PTB: 66,034,000 parameters with 10,000 words.
    "ptb": Preset(hidden=1500, layers=2, dropout=0.65, vocabulary=10_000, steps=35, recipe=_PAPER),
    # The same on WikiText-2, whose published vocabulary has 33,278 words.
    "wikitext2": Preset(hidden=1500, layers=2, dropout=0.65, vocabulary=33_278, steps=35, recipe=_PAPER),
    "small": Preset(
        hidden=128, layers=1, dropout=0.2, vocabulary=4_000, steps=35,
        # Means over senders: of 4 workers one has seen a rare word. Every 4 steps a perplexity of 76.9 instead of 96.0.
        recipe=replace(
            _PAPER, batch_size=10, epochs=4, lr_decay=0.7, warmup_steps=32, reduce="updates", mean_over="senders",
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class PtbConfig:
    """A word-level LSTM language model."""

    preset: str = "small"  # small, ptb (2 x 1500, the paper's), wikitext2
    data: str = EMBEDDED  # 'docstrings', or a folder or archive of PTB or WikiText as published
    batch_size: int | None = None  # columns per rank; larger = fewer, steadier steps
    vocabulary: int | None = None  # words kept; larger = fewer <unk>, a larger decoder

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigError(f"unknown ptb preset {self.preset!r}. {nearest(self.preset, PRESETS)}")
        for name in ("batch_size", "vocabulary"):
            value = getattr(self, name)
            if value is not None and value < 2 - (name == "batch_size"):
                raise ConfigError(f"{name} is too small: {value}.")


class PtbWorkload:
    """Model, batches, loss and perplexity; the hidden state of this rank is carried from batch to batch."""

    name = "ptb"
    metric = Metric("perplexity", lower_is_better=True)

    def __init__(self, config: PtbConfig, seed: int) -> None:
        self.config = config
        self.preset = config.preset
        self._preset = PRESETS[config.preset]
        recipe = self._preset.recipe
        self.recipe = replace(recipe, batch_size=config.batch_size or recipe.batch_size)
        self.notices: tuple[str, ...] = ()
        self.words: Words = load_words(config.data, config.vocabulary or self._preset.vocabulary)
        self._hidden: Hidden | None = None

    def model(self) -> nn.Module:
        preset = self._preset
        size = self.config.vocabulary or preset.vocabulary
        return WordLSTM(max(size, len(self.words.vocabulary)), preset.hidden, preset.layers, preset.dropout)

    def steps_per_epoch(self, world_size: int) -> int:
        rows = len(self.words.train) // (self.recipe.batch_size * world_size)
        steps = (rows - 1) // self._preset.steps
        if steps < 1:
            raise DataError(
                f"{self.config.data} has {len(self.words.train)} training words, too few for {world_size} ranks of "
                f"{self.recipe.batch_size} columns: lower batch_size, use fewer workers, or give more text."
            )
        return steps

    def batches(self, epoch: int, rank: int, world_size: int, start: int = 0) -> Iterator[Batch]:
        """The text in its own order: shuffling would break the carried state, which starts at zero every epoch."""
        size = self.recipe.batch_size
        if start == 0:
            self._hidden = None
        table = columns(self.words.train, size * world_size)[:, rank * size : (rank + 1) * size]
        count = self.steps_per_epoch(world_size) - start
        for _, batch in zip(range(count), windows(table, self._preset.steps, start), strict=False):
            yield batch

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        device = next(model.parameters()).device
        inputs, targets = (part.to(device, non_blocking=True) for part in batch)
        logits, hidden = model(inputs, self._carried(inputs.shape[1], device))
        self._hidden = (hidden[0].detach(), hidden[1].detach())
        loss: Tensor = cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss

    def evaluate(self, model: nn.Module, rank: int, world_size: int) -> dict[str, float]:
        table = columns(self.words.valid, _VALID_COLUMNS)[:, rank::world_size]
        totals = {"loss_sum": 0.0, "words": 0.0}
        if table.numel() == 0:
            return totals
        device = next(model.parameters()).device
        hidden = self._zeros(table.shape[1], device)
        with torch.no_grad(), evaluating(model):
            for inputs, targets in windows(table.to(device), self._preset.steps):
                logits, hidden = model(inputs, hidden)
                totals["loss_sum"] += cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
                totals["words"] += targets.numel()
        return totals

    def summarize(self, totals: Mapping[str, float]) -> dict[str, float]:
        if not totals["words"]:
            return {}
        loss = totals["loss_sum"] / totals["words"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # 700: exp overflows soon after

    def state_dict(self) -> dict[str, Any]:
        return {} if self._hidden is None else {"hidden": self._hidden[0].clone(), "cell": self._hidden[1].clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._hidden = (state["hidden"], state["cell"]) if "hidden" in state else None

    def _carried(self, width: int, device: torch.device) -> Hidden:
        """The state of the batch before; zeros at the start, or when a resumed run has other columns."""
        if self._hidden is None or self._hidden[0].shape[1] != width:
            return self._zeros(width, device)
        return self._hidden[0].to(device), self._hidden[1].to(device)

    def _zeros(self, width: int, device: torch.device) -> Hidden:
        hidden, cell = zero_state(self._preset.layers, width, self._preset.hidden)
        return hidden.to(device), cell.to(device)
