"""The speech recogniser as a workload: configuration, presets, batches, loss and word error rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oktopk.errors import ConfigError, nearest
from oktopk.workloads.base import Metric, Recipe
from oktopk.workloads.order import evaluating
from oktopk.workloads.speech.corpus import find_corpus
from oktopk.workloads.speech.data import Batch, Utterance, collate, load, require
from oktopk.workloads.speech.decode import decoder
from oktopk.workloads.speech.features import Augment, FrontEnd, LogMel, Spectrogram, features
from oktopk.workloads.speech.model import PaperNet, SmallNet
from oktopk.workloads.speech.sampler import LengthSampler
from oktopk.workloads.speech.score import error_rates, error_sums
from oktopk.workloads.speech.synth import Progress

EVALUATION_BATCH = 16


@dataclass(frozen=True)
class Preset:
    """A network, what it sees, and how it is trained."""

    network: Callable[[], nn.Module]
    front: FrontEnd
    stride: int  # 10 ms frames per output step, over front end and network
    augment: Augment
    recipe: Recipe


_SMALL_FRONT = LogMel(stack=4, bands=40)

PRESETS: dict[str, Preset] = {
    "small": Preset(
        network=lambda: SmallNet(_SMALL_FRONT.size),
        front=_SMALL_FRONT,
        stride=_SMALL_FRONT.stack,
        augment=Augment(mask_bands=1, mask_spans=1),
        recipe=Recipe(
            optimizer="adamw",
            lr=4e-3,
            batch_size=8,
            epochs=6,
            lr_warmup_epochs=0.5,
            lr_linear_decay=True,
            norm_clip=0.5,  # a batch of single letters has ten times the loss per character of others
            density=0.02,
            warmup_steps=60,
            reduce="updates",
            keep_owed=1.0,  # every 4 steps, 4 workers, training speakers: a WER of 0.260; with a quarter kept 0.280
        ),
    ),
    "lstman4": Preset(
        network=PaperNet,
        front=Spectrogram(),
        stride=2,
        augment=Augment(),
        recipe=Recipe(
            optimizer="sgd",
            lr=0.01,
            momentum=0.9,
            batch_size=8,
            epochs=100,
            lr_decay=1 / 1.01,
            norm_clip=400.0,
            density=0.02,
            warmup_steps=128,
        ),
    ),
}


@dataclass(frozen=True)
class SpeechConfig:
    """What the speech workload is told."""

    preset: str = "small"  # small (1 M parameters, learns in minutes on 2 cores) or lstman4 (the paper's 27.6 M)
    data: str = "synth-an4"  # synth-an4, synth-an4:COUNT, a folder or archive of AN4, or a manifest `wav,txt`
    batch_size: int | None = None  # utterances per worker; None: the preset's
    validation: str | None = None  # manifest to validate on; None: the corpus's own part
    on_bad_audio: Literal["error", "skip"] = "error"  # skip: leave unusable utterances out, and say how many
    augment: bool = True  # distort training utterances: tempo 0.85-1.15, gain -6 to 8 dB
    noise: float | None = None  # white noise in training, this many dB below the speech or up to 20 more; None: none
    decoder: Literal["greedy", "beam"] = "greedy"  # beam: sums over paths, slower, slightly better
    beam_width: int = 16  # texts kept by decoder beam; more = slower, slightly better

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigError(f"unknown preset {self.preset!r} of speech. {nearest(self.preset, PRESETS)}")
        if self.on_bad_audio not in ("error", "skip"):
            raise ConfigError(f"on_bad_audio must be 'error' or 'skip', got {self.on_bad_audio!r}.")
        for name in ("batch_size", "beam_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be 1 or more, got {value}.")


class SpeechWorkload:
    """Trains a recogniser with CTC and judges it by its word error rate."""

    name = "speech"
    metric = Metric("WER", lower_is_better=True)

    def __init__(self, config: SpeechConfig, seed: int = 0, progress: Progress | None = None) -> None:
        preset = PRESETS[config.preset]
        self.preset = config.preset
        self.recipe = replace(preset.recipe, batch_size=config.batch_size or preset.recipe.batch_size)
        self._network, self._front = preset.network, preset.front
        self._augment = _augmentation(config, preset.augment)
        self._decode = decoder(config.decoder, config.beam_width)
        self._seed = seed
        self._load(config, preset.stride, progress)

    def model(self) -> nn.Module:
        return self._network()

    def steps_per_epoch(self, world_size: int) -> int:
        return self._sampler.steps(world_size)

    def batches(self, epoch: int, rank: int, world_size: int, start: int = 0) -> Iterator[Batch]:
        for chosen in self._sampler.batches(epoch, rank, world_size)[start:]:
            yield self._batch([self._train[index] for index in chosen], [self._rng(epoch, i) for i in chosen])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Negative log-likelihood per character, averaged over utterances."""
        batch = batch.to(_device(model))
        log_probs, lengths = model(batch.inputs, batch.lengths)
        return self._losses(log_probs, lengths, batch).mean()

    def evaluate(self, model: nn.Module, rank: int, world_size: int) -> dict[str, float]:
        loss = 0.0
        references: list[str] = []
        hypotheses: list[str] = []
        mine = sorted(self._validation, key=lambda utterance: utterance.length)[rank::world_size]
        with evaluating(model), torch.no_grad():
            for first in range(0, len(mine), EVALUATION_BATCH):
                batch = self._batch(mine[first : first + EVALUATION_BATCH]).to(_device(model))
                log_probs, lengths = model(batch.inputs, batch.lengths)
                loss += float(self._losses(log_probs, lengths, batch).sum())
                references += batch.texts
                hypotheses += [self._decode(x[:n]) for x, n in zip(log_probs, lengths.tolist(), strict=True)]
        return {"loss": loss, "utterances": float(len(mine)), **error_sums(references, hypotheses)}

    def summarize(self, totals: Mapping[str, float]) -> dict[str, float]:
        if not totals.get("utterances"):
            return {}
        return {"loss": totals["loss"] / totals["utterances"], **error_rates(totals)}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def _load(self, config: SpeechConfig, stride: int, progress: Progress | None) -> None:
        corpus = find_corpus(config.data, config.validation, progress)
        parts = {"training": load(corpus.train, stride), "validation": load(corpus.validation, stride)}
        require(parts, corpus.source, skip=config.on_bad_audio == "skip")
        self._train, self._validation = parts["training"].utterances, parts["validation"].utterances
        self.notices = tuple(_notice(part, loaded.problems) for part, loaded in parts.items() if loaded.problems)
        self._sampler = LengthSampler([u.length for u in self._train], self.recipe.batch_size, self._seed)

    def _batch(self, utterances: Sequence[Utterance], rngs: Sequence[torch.Generator] = ()) -> Batch:
        """Features of the utterances; distorted if there is a generator for each."""
        augment = self._augment if rngs else None
        inputs = [
            features(utterance.load(), self._front, augment, rngs[i] if rngs else None, utterance.fastest)
            for i, utterance in enumerate(utterances)
        ]
        return collate(inputs, utterances)

    def _rng(self, epoch: int, index: int) -> torch.Generator:
        """A generator of that utterance's own in that epoch: a resumed run hears the same distortions."""
        mixed = ((self._seed * 1_000_003 + epoch) * 1_000_003 + index) % 2**63
        return torch.Generator().manual_seed(mixed)

    def _losses(self, log_probs: Tensor, lengths: Tensor, batch: Batch) -> Tensor:
        losses = F.ctc_loss(log_probs.transpose(0, 1), batch.labels, lengths, batch.label_lengths, reduction="none")
        return losses / batch.label_lengths


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _augmentation(config: SpeechConfig, base: Augment) -> Augment | None:
    if not config.augment:
        return None
    return base if config.noise is None else replace(base, noise=(config.noise, config.noise + 20.0))


def _notice(part: str, problems: Sequence[str]) -> str:
    return f"skipped {len(problems)} {part} utterances that cannot be used, e.g. {problems[0]}"
