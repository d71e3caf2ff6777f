"""Log-probabilities to text: the best label of each step, or the best prefix over all paths."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from oktopk.errors import ConfigError
from oktopk.workloads.speech.text import BLANK, spell

Decoder = Callable[[Tensor], str]  # log-probabilities of one utterance, [steps, labels]
CUTOFF = -9.0  # labels less likely than exp(-9) at a step are not followed


def decoder(name: str, beam_width: int = 16) -> Decoder:
    """The decoder of that name."""
    if name == "greedy":
        return greedy
    if name == "beam":
        return lambda log_probs: prefix_beam(log_probs, beam_width)
    raise ConfigError(f"decoder must be 'greedy' or 'beam', got {name!r}.")


def greedy(log_probs: Tensor) -> str:
    """The likeliest path, repeats and blanks dropped."""
    path = log_probs.argmax(-1).unique_consecutive()
    return _tidy(spell(path[path != BLANK].tolist()))


def prefix_beam(log_probs: Tensor, width: int = 16) -> str:
    """The likeliest text among `width` prefixes kept at each step, summed over all paths that spell it."""
    beams: _Beams = {(): (0.0, -math.inf)}
    for step in log_probs.tolist():
        beams = _best(_extended(beams, step), width)
    prefix, _ = max(beams.items(), key=lambda item: _add(*item[1]))
    return _tidy(spell(prefix))


# Prefix -> log-probability of its paths that end in a blank, and of those that end in its last label.
_Beams = dict[tuple[int, ...], tuple[float, float]]


def _extended(beams: _Beams, step: list[float]) -> _Beams:
    likely = [(label, score) for label, score in enumerate(step) if label != BLANK and score > CUTOFF]
    grown: _Beams = {}
    for prefix, (blank, label_end) in beams.items():
        last = prefix[-1] if prefix else BLANK
        both = _add(blank, label_end)
        repeated = label_end + step[last] if prefix else -math.inf
        _gain(grown, prefix, both + step[BLANK], repeated)
        for label, score in likely:
            # The same label again is a new letter only after a blank.
            _gain(grown, (*prefix, label), -math.inf, score + (blank if label == last else both))
    return grown


def _gain(beams: _Beams, prefix: tuple[int, ...], blank: float, label_end: float) -> None:
    old_blank, old_label = beams.get(prefix, (-math.inf, -math.inf))
    beams[prefix] = (_add(old_blank, blank), _add(old_label, label_end))


def _best(beams: _Beams, width: int) -> _Beams:
    ranked = sorted(beams.items(), key=lambda item: _add(*item[1]), reverse=True)
    return dict(ranked[:width])


def _add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    low, high = min(a, b), max(a, b)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


def _tidy(text: str) -> str:
    return " ".join(text.split())
