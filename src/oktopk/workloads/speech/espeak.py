"""espeak-ng from the wheel `espeakng-loader`, driven through ctypes in its synchronous mode."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np

from oktopk.errors import DataError, UnsupportedError
from oktopk.workloads.speech.audio import resample

_SYNCHRONOUS = 2
_RATE, _PITCH, _RANGE, _WORD_GAP = 1, 3, 4, 7
_UTF8, _PHONEMES = 1, 0x100
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class Manner:
    """How a sentence is spoken."""

    voice: str
    words_per_minute: int = 160
    pitch: int = 50  # 0 to 100
    pitch_range: int = 50  # 0 is monotone
    word_gap: int = 1  # 10 ms units


class Speaker:
    """A synthesiser of its own: the same sentences in the same order always give the same samples."""

    def __init__(self) -> None:
        self._library, data = _load()
        self._rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data.encode(), 0)
        if self._rate <= 0:
            raise UnsupportedError(f"espeak-ng did not start from {data}: reinstall 'oktopk[speech]'.")
        self._chunks: list[np.ndarray[Any, Any]] = []
        self._callback = _CALLBACK(self._collect)  # kept alive as long as the library may call it
        self._library.espeak_SetSynthCallback(self._callback)

    def say(self, text: str, manner: Manner) -> np.ndarray[Any, Any]:
        """The sentence as int16 samples at 16 kHz."""
        self._adopt(manner)
        self._chunks.clear()
        spoken = " ".join(_PRONUNCIATION.get(word, word) for word in text.split()).encode()
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(1))  # breathy voices; by default it is the time of day
        code = self._library.espeak_Synth(spoken, len(spoken) + 1, 0, 0, 0, _UTF8 | _PHONEMES, None, None)
        if code != 0 or not self._chunks:
            raise DataError(f"espeak-ng could not speak {text!r} (code {code}): reinstall 'oktopk[speech]'.")
        samples = resample(np.concatenate(self._chunks).astype(np.float64), self._rate)
        rounded: np.ndarray[Any, Any] = np.clip(np.rint(samples), -32768, 32767).astype(np.int16)
        return rounded

    def _adopt(self, manner: Manner) -> None:
        # A refused voice would silently leave the previous one in place.
        if self._library.espeak_SetVoiceByName(manner.voice.encode()) != 0:
            raise DataError(f"espeak-ng has no voice {manner.voice!r}: reinstall 'oktopk[speech]'.")
        for parameter, value in (
            (_RATE, manner.words_per_minute),
            (_PITCH, manner.pitch),
            (_RANGE, manner.pitch_range),
            (_WORD_GAP, manner.word_gap),
        ):
            self._library.espeak_SetParameter(parameter, value, 0)

    def _collect(self, samples: Any, count: int, _events: Any) -> int:
        if samples and count > 0:
            self._chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0


_PRONUNCIATION = {"A": "[[eI]]"}  # alone, espeak-ng would read the article


def _load() -> tuple[Any, str]:
    try:
        import espeakng_loader

        return _fresh_copy(espeakng_loader.get_library_path()), str(espeakng_loader.get_data_path())
    except (ImportError, OSError) as error:
        raise UnsupportedError(
            f"the embedded corpus synth-an4 needs espeak-ng: pip install 'oktopk[speech]' ({error})."
        ) from error


def _fresh_copy(library: str) -> ctypes.CDLL:
    """The library loaded from a copy: its sound depends on all it has said before, even across its own restart."""
    folder = tempfile.mkdtemp(prefix="oktopk-espeak-")
    # Not before exit: a file that takes over the inode of a deleted one would be taken for the library still loaded.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return ctypes.CDLL(shutil.copy(library, folder))
