"""The `vision` workload: image classification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oktopk.errors import ConfigError, nearest
from oktopk.workloads.base import Metric, Recipe
from oktopk.workloads.order import evaluating, rank_batches, shard, steps_per_epoch
from oktopk.workloads.vision.data import EMBEDDED, Images, augment, fit, load_images, prefetched, to_tensor
from oktopk.workloads.vision.model import build

Batch = tuple[Tensor, Tensor]  # float32 [n, channels, height, width], int64 [n]
_VALID_BATCH = 100


@dataclass(frozen=True)
class Preset:
    """What a network reads, and how it is trained."""

    size: int  # pixels per side
    channels: int
    recipe: Recipe


# The paper's schedule for VGG-16 on CIFAR-10: warm-up over 10 epochs from lr / P, decay at 81, 122 and 155.
_VGG = Recipe(
    optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=5e-4, batch_size=16, epochs=160, lr_steps=(81, 122, 155),
    lr_warmup_epochs=10, density=0.02, warmup_steps=512,
)  # fmt: skip
_RESNET = replace(_VGG, weight_decay=1e-4, batch_size=32)
_IMAGENET = replace(_VGG, weight_decay=1e-4, batch_size=32, epochs=90, lr_steps=(30, 60, 80), lr_warmup_epochs=5)
_SMALL = Recipe(
    optimizer="sgd", lr=0.03, momentum=0.9, weight_decay=5e-4, batch_size=16, epochs=3, lr_linear_decay=True,
    density=0.02, warmup_steps=64, reduce="updates",
)  # fmt: skip
PRESETS = {
    "small": Preset(32, 3, _SMALL),
    "vgg11": Preset(32, 3, _VGG),
    "vgg16": Preset(32, 3, _VGG),
    "vgg19": Preset(32, 3, _VGG),
    "resnet20": Preset(32, 3, _RESNET),
    "resnet56": Preset(32, 3, _RESNET),
    "resnet110": Preset(32, 3, _RESNET),
    "resnet50": Preset(224, 3, _IMAGENET),
    "alexnet": Preset(224, 3, replace(_IMAGENET, lr=0.01)),
    "mnistnet": Preset(28, 1, replace(_SMALL, lr=0.01, reduce="gradients")),
}


@dataclass(frozen=True)
class VisionConfig:
    """Image classification."""

    preset: str = "small"  # small, vgg11, vgg16 (the paper's), vgg19, resnet20/56/110, resnet50, alexnet, mnistnet
    data: str = (
        EMBEDDED  # 'shapes', CIFAR-10's archive or folder, a folder of MNIST files, or train/ and val/ of images
    )
    batch_size: int | None = None  # per rank; larger = fewer, steadier steps
    resize: bool = False  # image folders: decode while training, crop and scale images of any size (ImageNet)
    verify: bool = True  # CIFAR-10: compare the published checksums; off for a set of your own in that format

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigError(f"unknown vision preset {self.preset!r}. {nearest(self.preset, PRESETS)}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"batch_size must be 1 or more, got {self.batch_size}.")


class VisionWorkload:
    """Model, batches, loss and accuracy."""

    name = "vision"
    metric = Metric("accuracy", lower_is_better=False)

    def __init__(self, config: VisionConfig, seed: int, images: Images | None = None) -> None:
        self.config = config
        self.preset = config.preset
        self._preset = PRESETS[config.preset]
        self._seed = seed
        recipe = self._preset.recipe
        self.recipe = replace(recipe, batch_size=config.batch_size or recipe.batch_size)
        self.notices: tuple[str, ...] = ()
        self.images = images or load_images(config.data, self._preset.size, config.resize, config.verify)

    def model(self) -> nn.Module:
        return build(self.preset, len(self.images.classes))

    def steps_per_epoch(self, world_size: int) -> int:
        return steps_per_epoch(len(self.images.train), self.recipe.batch_size, world_size, self.config.data)

    def batches(self, epoch: int, rank: int, world_size: int, start: int = 0) -> Iterator[Batch]:
        images = self.images.train
        order = rank_batches(len(images), self.recipe.batch_size, self._seed, epoch, rank, world_size, start)
        mirror = self.images.layout != "MNIST"  # a mirrored digit is no digit
        for pixels, labels, rng in prefetched((images, numbers, rng) for numbers, rng in order):
            yield self._tensors(augment(pixels, rng, flip=mirror), labels)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        device = next(model.parameters()).device
        images, labels = (part.to(device, non_blocking=True) for part in batch)
        loss: Tensor = cross_entropy(model(images), labels)
        return loss

    def evaluate(self, model: nn.Module, rank: int, world_size: int) -> dict[str, float]:
        totals = {"loss_sum": 0.0, "correct": 0.0, "correct_top5": 0.0, "images": 0.0}
        device = next(model.parameters()).device
        with torch.no_grad(), evaluating(model):
            for numbers in shard(len(self.images.valid), rank, world_size, _VALID_BATCH):
                images, labels = self._tensors(*self.images.valid.take(numbers, None))
                logits = model(images.to(device))
                _add_(totals, logits, labels.to(device))
        return totals

    def summarize(self, totals: Mapping[str, float]) -> dict[str, float]:
        count = totals["images"]
        if not count:
            return {}
        summary = {"loss": totals["loss_sum"] / count, "accuracy": totals["correct"] / count}
        return summary | ({"top5": totals["correct_top5"] / count} if len(self.images.classes) > 5 else {})

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is carried from batch to batch."""

    def _tensors(self, pixels: np.ndarray, labels: np.ndarray) -> Batch:
        fitted = fit(pixels, self._preset.size, self._preset.channels)
        return to_tensor(fitted), torch.from_numpy(np.array(labels, dtype=np.int64))


def _add_(totals: dict[str, float], logits: Tensor, labels: Tensor) -> None:
    best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    totals["loss_sum"] += cross_entropy(logits, labels, reduction="sum").item()
    totals["correct"] += best[:, 0].sum().item()
    totals["correct_top5"] += best.sum().item()
    totals["images"] += len(labels)
