"""Sound files to 16 kHz mono samples, with every way they can be wrong said in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oktopk.errors import DataError, UnsupportedError

SAMPLE_RATE = 16_000
SHORTEST = 0.1  # seconds; AN4's shortest utterance has 0.7
SUFFIXES = (".sph", ".wav", ".flac", ".ogg", ".aiff", ".raw")


def read_audio(path: Path) -> Tensor:
    """Samples of one mono 16 kHz file, int16, [samples]."""
    if not path.is_file():
        raise DataError(f"{path}: no such audio file; `oktopk data relocate` repairs manifests that moved.")
    samples, rate = _decode(path)
    if rate != SAMPLE_RATE:
        raise DataError(
            f"{path}: sample rate must be {SAMPLE_RATE} Hz, got {rate}; convert it, e.g. `sox IN -r {SAMPLE_RATE} OUT`."
        )
    if samples.ndim != 1:
        raise DataError(f"{path}: one channel is expected, got {samples.shape[1]}; convert it to mono.")
    if len(samples) < SHORTEST * SAMPLE_RATE:
        raise DataError(
            f"{path}: audio of {len(samples) / SAMPLE_RATE:.3f} s is too short, at least {SHORTEST} s are needed; "
            "remove it from the manifest."
        )
    return torch.from_numpy(samples)


def write_audio(path: Path, samples: Any) -> None:
    """A 16 kHz mono WAV file from int16 samples."""
    soundfile().write(str(path), np.asarray(samples, dtype=np.int16), SAMPLE_RATE, subtype="PCM_16")


def resample(samples: np.ndarray[Any, Any], rate: int) -> np.ndarray[Any, Any]:
    """Float samples at a higher `rate` brought to 16 kHz, the spectrum faded out below the new limit."""
    length = round(len(samples) * SAMPLE_RATE / rate)
    spectrum = np.fft.rfft(samples)[: length // 2 + 1]
    fade = len(spectrum) // 20 + 1  # a sharp edge would ring at both ends
    spectrum[-fade:] *= np.cos(np.linspace(0, np.pi / 2, fade))
    return np.fft.irfft(spectrum, length) * (length / len(samples))


def soundfile() -> Any:
    """The soundfile module, or a clear word on how to get it."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise UnsupportedError(f"reading audio needs soundfile: pip install 'oktopk[speech]' ({error}).") from error
    return soundfile


def _decode(path: Path) -> tuple[np.ndarray[Any, Any], int]:
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty; fetch it again or remove it from the manifest.")
    if path.suffix.lower() == ".raw":
        return _headerless(path), SAMPLE_RATE
    try:
        with soundfile().SoundFile(str(path)) as file:
            expected, rate = file.frames, file.samplerate
            samples = file.read(dtype="int16")
    except RuntimeError as error:  # soundfile's own errors are RuntimeErrors
        raise DataError(f"{path}: cannot be decoded ({error}); fetch it again or remove it.") from error
    if len(samples) < expected:
        raise DataError(f"{path}: cut off after {len(samples)} of {expected} samples; fetch it again or remove it.")
    return samples, rate


def _headerless(path: Path) -> np.ndarray[Any, Any]:
    """AN4's raw archives: 16-bit samples and nothing else, in either byte order."""
    data = path.read_bytes()
    big, little = (np.frombuffer(data[: len(data) & ~1], dtype=order).astype(np.int16) for order in (">i2", "<i2"))
    # Speech read in the wrong order is noise: its neighbouring samples lie much further apart.
    return min(big, little, key=lambda samples: float(np.abs(np.diff(samples.astype(np.int32))).sum()))
