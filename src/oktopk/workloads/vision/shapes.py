"""Embedded images: ten kinds of shape drawn at any place, size and angle, bent, over clutter and noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
NAMES = ("disc", "square", "triangle", "star", "cross", "ring", "crescent", "bars", "half disc", "corner")
SIZE = 32
_CHUNK = 500  # images drawn at once: keeps the working set in the caches


def draw(count: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """`count` images [count, 32, 32, 3] and their labels, classes equally often, the same for the same seed."""
    labels = np.random.default_rng([seed, 0]).permutation(np.arange(count) % len(NAMES))
    pixels = np.empty((count, SIZE, SIZE, 3), dtype=np.uint8)
    for number, first in enumerate(range(0, count, _CHUNK)):
        part = slice(first, first + _CHUNK)
        pixels[part] = _draw_chunk(labels[part], np.random.default_rng([seed, 1, number]))
    return pixels, labels


def _draw_chunk(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.uint8]:
    count = len(labels)
    image = _background(count, rng)
    for _ in range(2):
        _paint_(image, _debris(count, rng), _colours(count, rng))
    mask = np.zeros((count, SIZE, SIZE), dtype=bool)
    u, v = _coordinates(count, rng, scale=(7.5, 12.0), shift=4.0)
    for label, inside in enumerate(_INSIDE):
        chosen = labels == label
        mask[chosen] = inside(u[chosen], v[chosen])
    _paint_(image, mask, _colours(count, rng, low=130))
    _paint_(image, _debris(count, rng), _colours(count, rng))
    image += 12 * rng.standard_normal(image.shape, dtype=np.float32)
    return np.clip(image, 0, 255).astype(np.uint8)


def _background(count: int, rng: np.random.Generator) -> Array:
    """A slope from one dark colour to another, with soft blotches."""
    u, v = _coordinates(count, rng, scale=(20.0, 30.0), shift=0.0)
    slope = (u[..., None] + 1) / 2
    first, second = _colours(count, rng, high=130), _colours(count, rng, high=130)
    blotches = np.sin(3 * u + rng.uniform(0, 6, (count, 1, 1))) * np.sin(4 * v + rng.uniform(0, 6, (count, 1, 1)))
    image = first[:, None, None] * (1 - slope) + second[:, None, None] * slope + 20 * blotches[..., None]
    return np.asarray(image, dtype=np.float32)


def _coordinates(count: int, rng: np.random.Generator, scale: tuple[float, float], shift: float) -> tuple[Array, Array]:
    """Pixel places as each shape sees them: moved, turned, stretched, sheared and bent, [count, 32, 32] each."""
    y, x = np.mgrid[:SIZE, :SIZE].astype(np.float32) - (SIZE - 1) / 2

    def one_each(low: float, high: float) -> Array:
        return rng.uniform(low, high, (count, 1, 1)).astype(np.float32)

    angle, size = one_each(0, 2 * np.pi), one_each(*scale)
    x, y = x - one_each(-shift, shift), y - one_each(-shift, shift)
    u = (np.cos(angle) * x + np.sin(angle) * y) / (size * one_each(0.8, 1.2))
    v = (np.cos(angle) * y - np.sin(angle) * x) / size
    u = u + one_each(-0.2, 0.2) * v
    bent_u = u + 0.06 * np.sin(4 * v + one_each(0, 6))
    bent_v = v + 0.06 * np.sin(4 * u + one_each(0, 6))
    return bent_u, bent_v


def _debris(count: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """A small blot or a thin line in each image."""
    u, v = _coordinates(count, rng, scale=(1.5, 3.0), shift=14.0)
    line = (np.abs(v) < 0.35) & (np.abs(u) < 4)
    blot = u * u + v * v < 1
    return np.where(rng.random((count, 1, 1)) < 0.5, line, blot)


def _colours(count: int, rng: np.random.Generator, low: float = 20, high: float = 235) -> Array:
    return rng.uniform(low, high, (count, 3)).astype(np.float32)


def _paint_(image: Array, mask: NDArray[np.bool_], colours: Array) -> None:
    np.copyto(image, colours[:, None, None, :], where=mask[..., None])


def _polar(u: Array, v: Array) -> tuple[Array, Array]:
    return np.hypot(u, v), np.arctan2(v, u)


def _star(u: Array, v: Array) -> NDArray[np.bool_]:
    radius, angle = _polar(u, v)
    inside: NDArray[np.bool_] = radius < 0.7 + 0.35 * np.cos(5 * angle)
    return inside


def _triangle(u: Array, v: Array) -> NDArray[np.bool_]:
    return (v > -0.6) & (1.732 * u + v < 1.1) & (-1.732 * u + v < 1.1)


_INSIDE: tuple[Callable[[Array, Array], NDArray[np.bool_]], ...] = (
    lambda u, v: u * u + v * v < 0.9,
    lambda u, v: np.maximum(np.abs(u), np.abs(v)) < 0.82,
    _triangle,
    _star,
    lambda u, v: (np.minimum(np.abs(u), np.abs(v)) < 0.3) & (np.maximum(np.abs(u), np.abs(v)) < 1.0),
    lambda u, v: np.abs(u * u + v * v - 0.68) < 0.38,
    lambda u, v: (u * u + v * v < 1.0) & ((u - 0.5) ** 2 + v * v > 0.65),
    lambda u, v: (np.abs(u) < 0.95) & (np.abs(np.abs(v) - 0.6) < 0.28),
    lambda u, v: (u * u + v * v < 1.1) & (v > 0),
    lambda u, v: (np.maximum(np.abs(u), np.abs(v)) < 0.9) & (np.minimum(u, v) < -0.3),
)
