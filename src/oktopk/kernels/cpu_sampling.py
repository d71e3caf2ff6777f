"""The compiled samples that tell a threshold: one cache line of each equal stretch. Keys are those of `cpu_loops`."""

from __future__ import annotations

from typing import Any

import numpy as np

from oktopk.kernels.compiling import jit
from oktopk.kernels.cpu_loops import magnitude_mask
from oktopk.kernels.cpu_simd import array_at, prefetch
from oktopk.kernels.cpu_sizes import LINE


@jit
def sample(bits: Any, seed: int, keys: Any) -> Any:
    """Keys of one cache line of each equal stretch, at a seeded place in it; how many keys that gave."""
    lines = bits.size // LINE
    wanted = min(keys.size // LINE, lines)
    state, magnitude, ratio = np.uint64(seed), magnitude_mask(bits), lines / max(1, wanted)
    for stretch in range(wanted):
        state = _scramble(state)
        at = _line_in(stretch, ratio, lines, state) * LINE
        line, to = bits[at : at + LINE], keys[stretch * LINE : (stretch + 1) * LINE]
        for i in range(LINE):
            to[i] = line[i] & magnitude
    return wanted * LINE


@jit
def sample_sum(residual: Any, addresses: Any, ends: Any, sign: int, seed: int, sums: Any) -> Any:
    """residual + sign * pieces (see `add_compact`) on the lines that `sample` would take."""
    lines = residual.size // LINE
    wanted = min(sums.size // LINE, lines)
    ratio = lines / max(1, wanted)
    _prefetch_sample(residual, addresses, ends, wanted, ratio, seed)
    state, piece = np.uint64(seed), 0
    for stretch in range(wanted):
        state = _scramble(state)
        at = _line_in(stretch, ratio, lines, state) * LINE
        to = sums[stretch * LINE : (stretch + 1) * LINE]
        for i in range(LINE):
            while ends[piece] <= at + i:
                piece += 1
            base = ends[piece - 1] if piece else 0
            to[i] = residual[at + i] + sign * array_at(addresses[piece], ends[piece] - base, residual)[at + i - base]
    return wanted * LINE


@jit
def _prefetch_sample(residual: Any, addresses: Any, ends: Any, wanted: int, ratio: float, seed: int) -> Any:
    """Ask for all that `sample_sum` is going to read."""
    state, piece = np.uint64(seed), 0
    for stretch in range(wanted):
        state = _scramble(state)
        at = _line_in(stretch, ratio, residual.size // LINE, state) * LINE
        while ends[piece] <= at:
            piece += 1
        base = ends[piece - 1] if piece else 0
        prefetch(residual, at)
        prefetch(array_at(addresses[piece], ends[piece] - base, residual), at - base)


@jit
def _scramble(state: Any) -> Any:
    """Marsaglia's xorshift with 64 bits."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


@jit
def _line_in(stretch: int, ratio: float, lines: int, state: Any) -> Any:
    """A line between stretch * ratio and the next multiple of ratio."""
    fraction = np.float64(state >> np.uint64(11)) * 2.0**-53
    return min(np.int64((stretch + fraction) * ratio), lines - 1)
