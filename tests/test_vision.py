"""The vision workload: networks, embedded images, augmentation, batches, sums."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

from oktopk.errors import ConfigError, DataError
from oktopk.workloads import workload_classes
from oktopk.workloads.vision import shapes
from oktopk.workloads.vision.data import ArrayImages, Images, augment, fit
from oktopk.workloads.vision.model import build
from oktopk.workloads.vision.workload import PRESETS, VisionConfig, VisionWorkload
from workload_checks import assert_shards_add_up, losses_of

torch.set_num_threads(1)  # tests run side by side: more threads than cores only wait for each other

COUNTS = {  # preset: (classes, parameters), the published figures where there are some
    "vgg16": (10, 14_728_266),
    "vgg11": (10, 9_231_114),
    "vgg19": (10, 20_040_522),
    "resnet20": (10, 269_722),
    "resnet56": (10, 853_018),
    "resnet110": (10, 1_727_962),
    "resnet50": (1000, 25_557_032),
    "alexnet": (1000, 61_100_840),
    "mnistnet": (10, 21_840),
    "small": (10, 137_194),
}


@pytest.mark.parametrize("name", COUNTS)
def test_every_preset_has_its_number_of_parameters(name):
    classes, expected = COUNTS[name]
    with torch.device("meta"):
        model = build(name, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert set(COUNTS) == set(PRESETS)


@pytest.mark.parametrize("name", ["vgg16", "resnet20", "resnet50", "alexnet", "mnistnet", "small"])
def test_every_kind_of_network_takes_the_images_of_its_preset(name):
    preset = PRESETS[name]
    logits = build(name, 10).eval()(torch.zeros(1, preset.channels, preset.size, preset.size))
    assert logits.shape == (1, 10)


def test_shapes_are_the_same_for_the_same_seed_and_others_for_another():
    pixels, labels = shapes.draw(700, seed=3)
    again, same_labels = shapes.draw(700, seed=3)
    other, _ = shapes.draw(700, seed=4)
    assert pixels.shape == (700, 32, 32, 3) and pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, again)
    np.testing.assert_array_equal(labels, same_labels)
    assert (pixels != other).mean() > 0.9
    assert np.bincount(labels).tolist() == [70] * 10


@pytest.mark.slow
def test_a_linear_model_stays_below_half_on_shapes():
    pixels, labels = shapes.draw(4000, seed=1)
    inputs = np.concatenate([pixels.reshape(4000, -1) / 128.0 - 1.0, np.ones((4000, 1))], axis=1)
    train, test = slice(0, 3200), slice(3200, 4000)
    targets = np.eye(10)[labels]
    gram = inputs[train] @ inputs[train].T
    # Ridge regression in its dual form, over a wide range of strengths: the best of all linear fits counts.
    for strength in (1e1, 1e3, 1e5):
        weights = inputs[train].T @ np.linalg.solve(gram + strength * np.eye(3200), targets[train])
        accuracy = ((inputs[test] @ weights).argmax(1) == labels[test]).mean()
        assert accuracy < 0.5


def test_augmented_images_are_crops_of_the_padded_image_or_its_mirror():
    rng = np.random.default_rng(0)
    pixels = rng.integers(1, 255, (20, 8, 8, 3), dtype=np.uint8)
    shifted = augment(pixels, np.random.default_rng(1), pad=2)
    padded = np.pad(pixels, ((0, 0), (2, 2), (2, 2), (0, 0)))
    mirrored = 0
    for image, candidates, result in zip(pixels, padded, shifted, strict=True):
        assert image.shape == result.shape
        crops = [candidates[y : y + 8, x : x + 8] for y in range(5) for x in range(5)]
        plain = any(np.array_equal(crop, result) for crop in crops)
        mirror = any(np.array_equal(crop[:, ::-1], result) for crop in crops)
        assert plain or mirror
        mirrored += mirror and not plain
    assert 3 < mirrored < 17  # 20 fair coins; outside has probability below 1e-3


def test_fit_pads_cuts_enlarges_and_changes_colour():
    grey = np.full((2, 28, 28, 1), 7, np.uint8)
    colour = np.full((2, 32, 32, 3), 9, np.uint8)
    assert fit(grey, 32, 3).shape == (2, 32, 32, 3)
    assert fit(colour, 28, 1).shape == (2, 28, 28, 1) and (fit(colour, 28, 1) == 9).all()
    assert fit(colour, 224, 3).shape == (2, 224, 224, 3)
    for height, width, size in ((28, 28, 225), (28, 30, 28), (31, 31, 32)):
        with pytest.raises(DataError, match=rf"{width}x{height} cannot be fitted to the {size}x{size}.*resize"):
            fit(np.zeros((1, height, width, 3), np.uint8), size, 3)


def small(count: int = 64, seed: int = 0, batch_size: int = 4) -> VisionWorkload:
    train, valid = shapes.draw(count, 1), shapes.draw(37, 2)
    images = Images("shapes", ArrayImages(*train), ArrayImages(*valid), shapes.NAMES, 32, 3)
    return VisionWorkload(VisionConfig(batch_size=batch_size), seed, images)


def test_batches_do_not_depend_on_when_they_are_asked_for():
    workload = small()
    whole = list(workload.batches(epoch=1, rank=1, world_size=2))
    resumed = list(small().batches(epoch=1, rank=1, world_size=2, start=5))
    assert len(whole) == workload.steps_per_epoch(2) == 8 and len(resumed) == 3
    for (images, labels), (same, same_labels) in zip(whole[5:], resumed, strict=True):
        assert torch.equal(images, same) and torch.equal(labels, same_labels)


def test_ranks_share_an_epoch_and_epochs_differ():
    labels = [torch.cat([batch[1] for batch in small().batches(0, rank, 2)]) for rank in (0, 1)]
    together = torch.cat(labels)
    assert torch.equal(together.sort().values, torch.from_numpy(shapes.draw(64, 1)[1]).sort().values)
    first = next(small().batches(0, 0, 2))[0]
    assert not torch.equal(first, next(small().batches(1, 0, 2))[0])
    assert not torch.equal(first, next(small(seed=1).batches(0, 0, 2))[0])


def test_evaluation_sums_are_the_same_over_any_number_of_ranks():
    workload = small()
    torch.manual_seed(0)
    model = workload.model()
    alone = assert_shards_add_up(workload, model, (3,))
    summary = workload.summarize(alone)
    assert set(summary) == {"loss", "accuracy", "top5"} and 0 <= summary["accuracy"] <= summary["top5"] <= 1
    assert model.training
    assert workload.summarize(dict.fromkeys(alone, 0.0)) == {}


def test_a_few_steps_lower_the_loss():
    workload = small(count=128, batch_size=32)
    torch.manual_seed(0)
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    batches = chain.from_iterable(workload.batches(epoch % 2, 0, 1) for epoch in range(6))
    losses = losses_of(workload, model, optimizer, batches)
    assert np.mean(losses[-4:]) < 0.95 * np.mean(losses[:4])


def test_too_few_images_say_what_to_do():
    with pytest.raises(DataError, match="fewer than one batch of 4 for each of 20 ranks"):
        small().steps_per_epoch(20)


def test_wrong_presets_are_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'vgg161'.*'vgg16'"):
        VisionConfig(preset="vgg161")
    with pytest.raises(ConfigError, match="batch_size"):
        VisionConfig(batch_size=0)


def test_the_workload_is_registered():
    assert workload_classes("vision") == (VisionConfig, VisionWorkload)
