"""The compiled loops over sparse vectors: what is done with the few entries that were chosen.

Indices ascend. "Keys" and "bits" are those of `cpu_loops`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oktopk.kernels.compiling import jit
from oktopk.kernels.cpu_loops import append_places, magnitude_mask
from oktopk.kernels.cpu_simd import (
    are_same,
    array_at,
    copy_run,
    is_run,
    move_run,
    prefetch,
    publish,
    stream_line,
    subtract_run,
)
from oktopk.kernels.cpu_sizes import LINE_BYTES, RUN, TILE, WINDOW, WORD

AHEAD = 128  # scattered accesses asked for in advance; runs are asked for twice as far ahead

_ONE = np.uint64(1)
_NONE = np.int64(-(2**63))
_LAST = np.int64(2**63 - 1)


@jit
def histogram(bits: Any, shift: int, first: int, counts: Any) -> Any:
    """Add to counts[i + 1] how many keys, shifted right by `shift`, are first + i; zeros and others to both ends.

    Without a branch: whether a key lies inside is a coin toss.
    """
    magnitude, last = magnitude_mask(bits), np.int64(counts.size - 1)
    for i in range(bits.size):
        key = bits[i] & magnitude
        place = np.int64(key >> np.uint64(shift)) - first + 1
        counts[min(max(place, 0), last) * (key > 0)] += 1


@jit
def sum_windows(
    places: Any, contents: Any, sizes: Any, cursors: Any, sums: Any, touched: Any, to_indices: Any, to_values: Any
) -> Any:
    """Sum ascending lists: list s has its sizes[s] indices at address places[s], its values at contents[s].

    Returns the length of the union, -1 if a list does not ascend. The index space is crossed in windows whose sums fit
    the cache, each list adding in turn, so every sum is formed in the order of the lists. `cursors`, one
    per list, must come zero; so must `sums` [WINDOW] and `touched` [WINDOW / WORD], which are left so. to_indices and
    to_values need room for a word more than is needed.
    """
    count = 0
    while True:
        base = _next_index(places, sizes, cursors, to_indices)
        if base < 0:
            return count if base == _NONE else -1
        base -= base % WORD
        words: Any = 0
        for source in range(sizes.size):
            here = array_at(places[source], sizes[source], to_indices)
            there = array_at(contents[source], sizes[source], to_values)
            at, place = cursors[source], np.int64(-1)
            while at < here.size and here[at] < base + WINDOW:
                before, place = place, np.int64(here[at]) - base
                if place <= before:
                    return -1
                sums[place] += there[at]
                touched[place >> 6] |= _ONE << np.uint64(place & 63)
                at += 1
            cursors[source] = at
            words = max(words, (place >> 6) + 1)
        count = _flush(base, words, sums, touched, to_indices, to_values, count)


@jit
def _next_index(places: Any, sizes: Any, cursors: Any, like: Any) -> Any:
    lowest = _LAST
    for source in range(sizes.size):
        if cursors[source] < sizes[source]:
            lowest = min(lowest, np.int64(array_at(places[source], sizes[source], like)[cursors[source]]))
    return lowest if lowest < _LAST else _NONE


@jit
def _flush(base: int, words: int, sums: Any, touched: Any, to_indices: Any, to_values: Any, count: int) -> Any:
    """Append the sums of a window, and leave it zero. Needs room for a word more than there are."""
    first = count
    for i in range(words):
        count = append_places(touched[i], base + i * WORD, to_indices, count)
        touched[i] = 0
    for i in range(first, count):
        place = to_indices[i] - base
        to_values[i] = sums[place]
        sums[place] = 0
    return count


@jit
def common(indices: Any, values: Any, others: Any, to_indices: Any, to_values: Any) -> Any:
    """Copy the entries whose index is in `others` too; both ascending. There is room for one more than all of them."""
    i, j, count = 0, 0, 0
    while i < indices.size and j < others.size:
        left, right = indices[i], others[j]
        to_indices[count] = left
        to_values[count] = values[i]
        count += left == right
        i += left <= right
        j += right <= left
    return count


@jit
def keep_at_least(indices: Any, bits: Any, key: Any, low: Any, ties: int, to_indices: Any, to_bits: Any) -> Any:
    """Copy the entries whose key reaches `key`, and the first `ties` that only reach `low`; room is for one more."""
    magnitude, count = magnitude_mask(bits), 0
    for i in range(bits.size):
        own = bits[i] & magnitude
        tied = (own >= low) & (own < key) & (ties > 0)
        to_indices[count] = indices[i]
        to_bits[count] = bits[i]
        count += (own >= key) | tied
        ties -= tied
    return count


@jit
def pick(values: Any, indices: Any, out: Any) -> Any:
    """out = values[indices]; False if an index is out of bounds."""
    i = 0
    while i < indices.size:
        at = indices[i]
        if _begins_run(indices, i, values.size):
            _prefetch_run(values, indices, i, 0)
            copy_run(out, i, values, at)
            i += RUN
            continue
        prefetch(values, indices[min(i + AHEAD, indices.size - 1)])
        if not 0 <= at < values.size:
            return False
        out[i] = values[at]
        i += 1
    return True


@jit
def _begins_run(indices: Any, i: int, end: int) -> Any:
    """Whether the RUN indices from i on are neighbours that lie below `end`. Most that are not are told by the last."""
    if i + RUN > indices.size or indices[i + RUN - 1] - indices[i] != RUN - 1:
        return False
    return indices[i] >= 0 and indices[i] + RUN <= end and is_run(indices, i)


@jit
def _prefetch_run(values: Any, indices: Any, i: int, base: int) -> Any:
    """Both ends of what lies ahead: a run may begin in the middle of a cache line."""
    ahead = indices[min(i + 2 * AHEAD, indices.size - 1)] - base
    prefetch(values, ahead)
    prefetch(values, ahead + RUN - 1)


@jit
def _piece_with(at: int, addresses: Any, ends: Any, like: Any) -> Any:
    """The piece in which an entry lies: its number, where it starts, and itself."""
    piece = np.searchsorted(ends, at, side="right")
    base = ends[piece - 1] if piece else 0
    return piece, base, array_at(addresses[piece], ends[piece] - base, like)


@jit
def pick_difference(shared: Any, addresses: Any, ends: Any, indices: Any, out: Any) -> Any:
    """out = shared - pieces (as in `cpu_loops.add_compact`) at these indices; False if one is out of bounds."""
    piece, base, i = 0, 0, 0
    own = array_at(addresses[0], ends[0], shared)
    while i < indices.size:
        at = indices[i]
        if not 0 <= at < shared.size:
            return False
        if not base <= at < ends[piece]:
            piece, base, own = _piece_with(at, addresses, ends, shared)
        if _begins_run(indices, i, ends[piece]):
            _prefetch_run(shared, indices, i, 0)
            _prefetch_run(own, indices, i, base)
            subtract_run(out, i, shared, at, own, at - base)
            i += RUN
            continue
        ahead = indices[min(i + AHEAD, indices.size - 1)]
        prefetch(shared, ahead)
        prefetch(own, ahead - base)
        out[i] = shared[at] - own[at - base]
        i += 1
    return True


@jit
def subtract_at(residual: Any, indices: Any, values: Any) -> Any:
    """residual[indices] -= values; the change of its sum of squares, NaN if an index is out of bounds."""
    change = 0.0
    for i in range(indices.size):
        prefetch(residual, indices[min(i + AHEAD, indices.size - 1)])
        at = indices[i]
        if not 0 <= at < residual.size:
            return np.nan
        before = residual[at]
        after = before - values[i]
        residual[at] = after
        change += np.float64(after) * np.float64(after) - np.float64(before) * np.float64(before)
    return change


@jit
def move(
    shared: Any, addresses: Any, ends: Any, indices: Any, values: Any, sent: Any, sent_values: Any, rests: Any,
    extras: Any,
) -> Any:  # fmt: skip
    """shared[indices] -= values, the same of pieces (as in `add_compact`), and pieces[sent] += sent_values.

    Indices ascend; `sent` may be two lists that do, one after the other. Returns how many of `indices` it could place,
    where the second list begins, how far it came in the first and in the second, and how the sum of squares of
    shared - pieces changed: it stops where one is out of bounds, and does not take what is not among `indices`.
    `rests` and `extras` [TILE] are to work with.
    """
    second, change, start, placed = _second_list(sent), 0.0, 0, 0
    first, other = 0, second
    while placed == start < indices.size:
        stop = min(start + TILE, indices.size)
        first = _take(indices, values, start, stop, sent, sent_values, first, second, rests)
        twice = other < sent.size
        if twice:
            other = _take_more(indices, start, stop, sent, sent_values, other, extras)
        placed, more = _move_tile(shared, addresses, ends, indices, values, start, stop, rests, extras, twice)
        change += more
        start = stop
    return placed, second, first, other, change


@jit
def _take(
    indices: Any, values: Any, start: int, stop: int, sent: Any, sent_values: Any, place: int, end: int, rests: Any
) -> Any:
    """rests = values - sent_values where `sent` names the same index, else values; how far it came up to `end`.

    Without a branch: who sent an entry is a coin toss.
    """
    last = end - 1
    if last < 0:
        for i in range(start, stop):
            rests[i - start] = values[i]
        return place
    i = start
    while i < stop:
        if i + RUN <= stop and place + RUN <= end and are_same(indices, i, sent, place):
            subtract_run(rests, i - start, values, i, sent_values, place)
            i += RUN
            place += RUN
            continue
        here = min(place, last)
        hit = (sent[here] == indices[i]) & (place < end)
        rests[i - start] = values[i] - (sent_values[here] if hit else sent_values.dtype.type(0))
        place += hit
        i += 1
    return place


@jit
def _take_more(indices: Any, start: int, stop: int, sent: Any, sent_values: Any, place: int, extras: Any) -> Any:
    """extras = sent_values where `sent` names the same index, else what adds nothing; how far it came."""
    last, nothing = sent.size - 1, -sent_values.dtype.type(0)
    for i in range(start, stop):
        here = min(place, last)
        hit = (sent[here] == indices[i]) & (place <= last)
        extras[i - start] = sent_values[here] if hit else nothing
        place += hit
    return place


@jit
def _move_tile(
    shared: Any, addresses: Any, ends: Any, indices: Any, values: Any, start: int, stop: int, rests: Any, extras: Any,
    twice: bool,
) -> Any:  # fmt: skip
    """shared -= values and pieces -= rests at some indices, and then pieces += extras; how far it came.

    Also how the sum of squares of shared - pieces changed.
    """
    base, end, change, i = 0, 0, 0.0, start
    own = array_at(addresses[0], ends[0], shared)
    while i < stop:
        at = indices[i]
        if not base <= at < end:
            if not 0 <= at < shared.size:
                break
            piece, base, own = _piece_with(at, addresses, ends, shared)
            end = ends[piece]
        if not twice and i + RUN <= stop and _begins_run(indices, i, end):
            _prefetch_run(shared, indices, i, 0)
            _prefetch_run(own, indices, i, base)
            change += move_run(shared, at, own, at - base, values, i, rests, i - start)
            i += RUN
            continue
        ahead = indices[min(i + AHEAD, indices.size - 1)]
        prefetch(shared, ahead)
        prefetch(own, ahead - base)
        theirs, mine = shared[at], own[at - base]
        after, left = theirs - values[i], mine - rests[i - start]
        if twice:
            left += extras[i - start]
        shared[at] = after
        own[at - base] = left
        before, still = np.float64(theirs) - np.float64(mine), np.float64(after) - np.float64(left)
        change += still * still - before * before
        i += 1
    return i, change


@jit
def _second_list(sent: Any) -> Any:
    """Where indices that ascend begin anew."""
    for i in range(1, sent.size):
        if sent[i] <= sent[i - 1]:
            return i
    return sent.size


@jit
def take_from_difference(shared: Any, addresses: Any, ends: Any, indices: Any, values: Any) -> Any:
    """pieces[indices] += values, in any order: so much less is shared - pieces. How the sum of squares of that
    changed, NaN if an index is out of bounds."""
    piece, base, change = 0, 0, 0.0
    own = array_at(addresses[0], ends[0], shared)
    for i in range(indices.size):
        ahead = indices[min(i + AHEAD, indices.size - 1)]
        prefetch(shared, ahead)
        prefetch(own, ahead - base)
        at = indices[i]
        if not 0 <= at < shared.size:
            return np.nan
        if not base <= at < ends[piece]:
            piece, base, own = _piece_with(at, addresses, ends, shared)
        before = np.float64(shared[at]) - np.float64(own[at - base])
        own[at - base] += values[i]
        after = np.float64(shared[at]) - np.float64(own[at - base])
        change += after * after - before * before
    return change


@jit
def fill(addresses: Any, ends: Any, indices: Any, values: Any, tile: Any) -> Any:
    """Pieces (as in `cpu_loops.add_compact`) = values at ascending indices, zero elsewhere; how many it could place.

    `tile` [TILE] must come zero, and is left so.
    """
    at, base = 0, 0
    for piece in range(ends.size):
        out = array_at(addresses[piece], ends[piece] - base, values)
        lead = -addresses[piece] % LINE_BYTES
        at = _fill_piece(out, base, lead // values.itemsize, indices, values, at, tile)
        base = ends[piece]
    publish()
    return at


@jit
def _fill_piece(out: Any, base: int, lead: int, indices: Any, values: Any, at: int, tile: Any) -> Any:
    """Write a piece past the caches, which spares reading it first: it is all replaced. `lead` entries come before its
    first cache line. `tile` comes zero, and is left so. Returns how many values are placed then."""
    line, start = LINE_BYTES // out.itemsize, 0
    while start < out.size:
        length, first = min(TILE, out.size - start) if start else min(lead or TILE, out.size), at
        while at < indices.size and 0 <= indices[at] - base - start < length:
            tile[indices[at] - base - start] = values[at]
            at += 1
        whole = length // line * line if start or not lead else 0
        for i in range(0, whole, line):
            stream_line(out, start + i, tile, i)
        for i in range(whole, length):
            out[start + i] = tile[i]
        for i in range(first, at):
            tile[indices[i] - base - start] = 0
        start += length
    return at
