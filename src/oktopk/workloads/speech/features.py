"""Samples to what the networks see, and the seeded distortions of training.

Tempo is changed by reading the spectrogram faster or slower, which leaves the pitch alone; gain and noise act on the
samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from oktopk.workloads.speech.audio import SAMPLE_RATE

HOP = SAMPLE_RATE // 100  # 10 ms
WINDOW = SAMPLE_RATE // 50  # 20 ms


@dataclass(frozen=True)
class Augment:
    """How far training may distort an utterance."""

    tempo: tuple[float, float] = (0.85, 1.15)  # speed factor; above 1 is faster
    gain: tuple[float, float] = (-6.0, 8.0)  # decibels
    noise: tuple[float, float] | None = None  # signal-to-noise ratio of white noise in decibels; None: no noise
    mask_bands: int = 0  # bands of the spectrum silenced per utterance; more = harder, against overfitting
    mask_spans: int = 0  # spans of time silenced per utterance


@dataclass(frozen=True)
class Spectrogram:
    """log(1 + magnitude), 161 bins: the input of the paper's network."""

    stack: int = 1
    size: int = WINDOW // 2 + 1

    def compress(self, magnitude: Tensor) -> Tensor:
        bins = torch.log1p(magnitude)
        return (bins - bins.mean()) / (bins.std() + 1e-5)


@dataclass(frozen=True)
class LogMel:
    """Logarithm of mel bands, several frames side by side: fewer and richer steps for a small network."""

    stack: int = 4  # frames per step; more = faster, less time resolution
    bands: int = 40

    @property
    def size(self) -> int:
        return self.stack * self.bands

    def compress(self, magnitude: Tensor) -> Tensor:
        # Each band by itself, so that the microphone and the voice's colour drop out.
        bands = torch.log(mel_matrix(self.bands) @ magnitude.square() + 1e-7)
        return (bands - bands.mean(1, keepdim=True)) / (bands.std(1, keepdim=True) + 1e-2)


FrontEnd = Spectrogram | LogMel


def features(
    samples: Tensor,
    front: FrontEnd,
    augment: Augment | None = None,
    generator: torch.Generator | None = None,
    fastest: float = math.inf,
) -> Tensor:
    """Normalised features of one utterance, float32, [size, steps]; its tempo never exceeds `fastest`."""
    wave = samples.float() / 32768
    if augment is not None:
        wave = _gain_and_noise(wave, augment, generator)
    magnitude = _magnitude(wave)
    if augment is not None:
        magnitude = _stretch(magnitude, min(fastest, _uniform(augment.tempo, generator)))
    bands = front.compress(magnitude)
    if augment is not None:
        _mask_(bands, augment, generator)
    return _stacked(bands, front.stack)


def frame_count(samples: int) -> int:
    """Frames of an utterance before stacking and without augmentation."""
    return samples // HOP + 1


@cache
def mel_matrix(bands: int) -> Tensor:
    """Triangular filters, evenly spaced on the mel scale from 20 Hz to 8 kHz, float32, [bands, bins]."""
    top = SAMPLE_RATE / 2
    mels = torch.linspace(_mel(20.0), _mel(top), bands + 2, dtype=torch.float64)
    edges = 700.0 * (torch.exp(mels / 1127.0) - 1.0)
    hertz = torch.linspace(0.0, top, WINDOW // 2 + 1, dtype=torch.float64)
    rising = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0.0).float()


def _mel(hertz: float) -> float:
    return 1127.0 * math.log1p(hertz / 700.0)


def _magnitude(wave: Tensor) -> Tensor:
    window = torch.hamming_window(WINDOW, periodic=False)
    return torch.stft(wave, WINDOW, HOP, window=window, pad_mode="constant", return_complex=True).abs()


def _gain_and_noise(wave: Tensor, augment: Augment, generator: torch.Generator | None) -> Tensor:
    wave = wave * 10 ** (_uniform(augment.gain, generator) / 20)
    if augment.noise is not None:
        level = wave.square().mean().sqrt() * 10 ** (-_uniform(augment.noise, generator) / 20)
        wave = wave + level * torch.randn(wave.shape, generator=generator)
    return wave


def _stretch(magnitude: Tensor, tempo: float) -> Tensor:
    size = max(1, round(magnitude.shape[1] / tempo))
    return F.interpolate(magnitude[None], size=size, mode="linear", align_corners=False)[0]


def _mask_(bands: Tensor, augment: Augment, generator: torch.Generator | None) -> None:
    for _ in range(augment.mask_bands):
        start, width = _span(bands.shape[0], bands.shape[0] // 5, generator)
        bands[start : start + width] = 0.0
    for _ in range(augment.mask_spans):
        start, width = _span(bands.shape[1], min(12, bands.shape[1] // 8), generator)
        bands[:, start : start + width] = 0.0


def _span(size: int, widest: int, generator: torch.Generator | None) -> tuple[int, int]:
    width = int(torch.randint(0, widest + 1, (1,), generator=generator))
    start = int(torch.randint(0, size - width + 1, (1,), generator=generator))
    return start, width


def _stacked(bands: Tensor, stack: int) -> Tensor:
    bands = F.pad(bands, (0, -bands.shape[1] % stack))
    return bands.reshape(bands.shape[0], -1, stack).permute(2, 0, 1).reshape(stack * bands.shape[0], -1)


def _uniform(limits: tuple[float, float], generator: torch.Generator | None) -> float:
    low, high = limits
    return low + (high - low) * float(torch.rand(1, generator=generator))
