"""The scans behind `TritonKernels`: what one program of a grid does with its block of a vector.

Selection compares bit patterns: without their sign, floats are ordered as their bits are. A "key" is the pattern of a
float32 without its sign; key 1 is the smallest magnitude that is not zero. float16 and bfloat16 are float32 by then.

Programs share a board of int64, zero at first: counters, the radix search, histograms. Only integers are added up
there, so that the order in which programs run changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

DIGITS = 4  # steps of the radix search, of 8 bits each: a histogram of 256 bins fits the registers of a warp
# Places on the board.
COUNT, KEPT, ENERGY, STATE, HISTOGRAMS = 0, 1, 2, 4, 16
KTH = STATE + 2 * DIGITS  # the k-th largest key; how many that equal it are kept comes after it
WORDS = HISTOGRAMS + DIGITS * 256

# The same for kernels, which may use no other globals.
_COUNT, _KEPT, _STATE, _KTH = tl.constexpr(COUNT), tl.constexpr(KEPT), tl.constexpr(STATE), tl.constexpr(KTH)
_HISTOGRAMS, _DIGITS, _BINS = tl.constexpr(HISTOGRAMS), tl.constexpr(DIGITS), tl.constexpr(256)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def scan(
    out, x, grad, starts, addresses, numel, low, board, energies,
    firsts, counts, indices, values, capacity,
    SIGN: tl.constexpr, WRITE: tl.constexpr, GATHER: tl.constexpr, SCATTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = x + SIGN * grad, its sum of squares by block, and the entries whose key reaches `low`, all in one pass.

    Each block takes as much room as it needs wherever the buffer is at, so blocks lie there in any order; `firsts` and
    `counts` tell where. What does not fit is counted, but not written.
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    start, length = _stretch(starts, block, numel, SCATTERED, BLOCK)
    inside = lanes < length
    value = _wide(tl.load(x + start + lanes, mask=inside, other=0.0))
    if SIGN != 0:
        piece = _piece(grad, addresses, block, start, SCATTERED)
        value = _combined(value, _wide(tl.load(piece + lanes, mask=inside, other=0.0)), SIGN)
        tl.store(energies + block, tl.sum(value.to(tl.float64) * value.to(tl.float64)))
    if WRITE:
        tl.store(out + start + lanes, value, mask=inside)
    if GATHER:
        taken = inside & (_key(value) >= tl.load(low))
        before, count = _positions(taken)
        first = tl.atomic_add(board + _COUNT, count.to(tl.int64))
        tl.store(firsts + block, first)
        tl.store(counts + block, count)
        # The block's place is one number and the lanes are int32: addresses of 64 bits each would cost registers.
        fits = taken & (before < capacity - first)
        tl.store(indices + first + before, start.to(indices.dtype.element_ty) + lanes, mask=fits)
        tl.store(values + first + before, value, mask=fits)


@triton.jit
def pick(
    x, grad, starts, addresses, blocks, steps, lines, size, picked,
    SIGN: tl.constexpr, SCATTERED: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x + SIGN * grad on some lines of LINE entries."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    position = tl.load(lines + lane // LINE, mask=inside, other=0).to(tl.int64) * LINE + lane % LINE
    value = _wide(tl.load(x + position, mask=inside, other=0.0))
    if SIGN != 0:
        place = _place_of(grad, starts, addresses, blocks, steps, position, inside, SCATTERED)
        value = _combined(value, _wide(tl.load(place, mask=inside, other=0.0)), SIGN)
    tl.store(picked + lane, value, mask=inside)


@triton.jit
def narrow(values, board, k, size, DIGIT: tl.constexpr, GATHERED: tl.constexpr, BLOCK: tl.constexpr):
    """One digit of the radix search for the k-th largest key among `values`; after the last digit, only its result.

    Each step reads what the one before has counted and counts the next digit of those keys that begin alike.
    """
    block = tl.program_id(0)
    prefix, wanted = _descend(board, k, DIGIT)
    if block == 0:
        tl.store(board + _STATE + 2 * DIGIT, prefix.to(tl.int64))
        tl.store(board + _STATE + 2 * DIGIT + 1, wanted)
    if DIGIT < _DIGITS:
        start = block.to(tl.int64) * BLOCK
        if GATHERED:
            size = tl.minimum(size, tl.load(board + _COUNT))
        if start < size:
            at = start + tl.arange(0, BLOCK)
            key = _key(_wide(tl.load(values + at, mask=at < size, other=0.0)))
            counted = key > 0  # zeros are never chosen
            if DIGIT > 0:
                counted = counted & (key >> (8 * (_DIGITS - DIGIT)) == prefix)
            histogram = tl.histogram(key >> (8 * (_DIGITS - 1 - DIGIT)) & 255, _BINS, mask=counted)
            bins = board + _HISTOGRAMS + DIGIT * _BINS + tl.arange(0, _BINS)
            tl.atomic_add(bins, histogram.to(tl.int64), mask=histogram > 0)


@triton.jit
def count_kept(
    values, firsts, counts, board, above, tied, size,
    GATHERED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """How many keys of each block are above the k-th largest, and how many equal it."""
    block = tl.program_id(0)
    first, length = _segment(firsts, counts, block, size, GATHERED, BLOCK)
    kth = tl.load(board + _KTH)
    more, equal = 0, 0
    for start in range(0, length, CHUNK):
        lanes = start + tl.arange(0, CHUNK)
        key = _key(_wide(tl.load(values + first + lanes, mask=lanes < length, other=0.0)))
        more += tl.sum((key > kth).to(tl.int32))
        equal += tl.sum(((key == kth) & (key > 0)).to(tl.int32))
    tl.store(above + block, more)
    tl.store(tied + block, equal)


@triton.jit
def place_kept(
    values, indices, firsts, counts, board, above, tied, size,
    to_indices, to_values, room,
    GATHERED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Copy what is kept to its place in ascending order; of equal keys the first win.

    `above` and `tied` are running totals over blocks. A board without a search keeps everything.
    """
    block = tl.program_id(0)
    first, length = _segment(firsts, counts, block, size, GATHERED, BLOCK)
    kth, ties = tl.load(board + _KTH), tl.load(board + _KTH + 1)
    ties_before = tl.load(tied + block - 1, mask=block > 0, other=0)
    to = tl.load(above + block - 1, mask=block > 0, other=0) + tl.minimum(ties_before, ties)
    for start in range(0, length, CHUNK):
        lanes = start + tl.arange(0, CHUNK)
        value = _wide(tl.load(values + first + lanes, mask=lanes < length, other=0.0))
        key = _key(value)
        tie = (key == kth) & (key > 0)
        earlier, here = _positions(tie)
        kept = (key > kth) | (tie & (ties_before + earlier < ties))
        before, count = _positions(kept)
        fits = kept & (to + before < room)
        index = first + lanes
        if GATHERED:
            index = tl.load(indices + first + lanes, mask=kept, other=0)
        tl.store(to_indices + to + before, index.to(to_indices.dtype.element_ty), mask=fits)
        tl.store(to_values + to + before, value, mask=fits)
        ties_before += here
        to += count
    if block == tl.num_programs(0) - 1:
        tl.store(board + _KEPT, to)


@triton.jit
def subtract_at(residual, indices, values, size, changes, BLOCK: tl.constexpr):
    """residual[indices] -= values, each index once; by how much each block of them changed the sum of squares."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    at = residual + tl.load(indices + lane, mask=inside, other=0)
    before = tl.load(at, mask=inside, other=0.0)
    after = before - tl.load(values + lane, mask=inside, other=0.0)
    tl.store(at, after, mask=inside)
    change = after.to(tl.float64) * after.to(tl.float64) - before.to(tl.float64) * before.to(tl.float64)
    tl.store(changes + tl.program_id(0), tl.sum(change))


@triton.jit
def move_at(
    shared, piece, starts, addresses, blocks, steps, indices, values, sent, size, changes,
    SCATTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """shared[indices] -= values, and of a vector in pieces values - sent, each index once.

    By how much each block of them changed the sum of squares of the difference of both.
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    position = tl.load(indices + lane, mask=inside, other=0).to(tl.int64)
    value = tl.load(values + lane, mask=inside, other=0.0)
    at = _place_of(piece, starts, addresses, blocks, steps, position, inside, SCATTERED)
    theirs = tl.load(shared + position, mask=inside, other=0.0)
    mine = tl.load(at, mask=inside, other=0.0)
    before = theirs.to(tl.float64) - mine.to(tl.float64)
    theirs -= value
    mine -= value - tl.load(sent + lane, mask=inside, other=0.0)
    tl.store(shared + position, theirs, mask=inside)
    tl.store(at, mine, mask=inside)
    after = theirs.to(tl.float64) - mine.to(tl.float64)
    tl.store(changes + tl.program_id(0), tl.sum(after * after - before * before))


@triton.jit
def write_at(
    piece, starts, addresses, blocks, steps, indices, values, size,
    SCATTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put values at their indices of a vector that lies in one piece or several."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    position = tl.load(indices + lane, mask=inside, other=0).to(tl.int64)
    at = _place_of(piece, starts, addresses, blocks, steps, position, inside, SCATTERED)
    tl.store(at, tl.load(values + lane, mask=inside, other=0.0), mask=inside)


@triton.jit
def _wide(value):
    """As float32. bfloat16 is the upper half of one, which not everything that converts it knows of tiny values."""
    if value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def _combined(value, other, SIGN: tl.constexpr):
    if SIGN > 0:
        return value + other
    else:
        return value - other


@triton.jit
def _key(value):
    return value.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _positions(taken):
    """How many are taken before each, and in all."""
    ones = taken.to(tl.int32)
    return tl.cumsum(ones, 0) - ones, tl.sum(ones)


@triton.jit
def _stretch(starts, block, numel, SCATTERED: tl.constexpr, BLOCK: tl.constexpr):
    """Where a block of a vector begins, and how long it is. Blocks of a scattered vector end where its pieces do."""
    if SCATTERED:
        start = tl.load(starts + block)
        stop = tl.load(starts + block + 1)
    else:
        start = block.to(tl.int64) * BLOCK  # int64: vectors may be longer than 2**31
        stop = tl.minimum(start + BLOCK, numel)
    return start, stop - start


@triton.jit
def _piece(grad, addresses, block, start, SCATTERED: tl.constexpr):
    """Where a block of the gradient lies."""
    if SCATTERED:
        return tl.load(addresses + block).to(grad.dtype)
    else:
        return grad + start


@triton.jit
def _place_of(piece, starts, addresses, blocks, steps, position, inside, SCATTERED: tl.constexpr):
    """Where entries of a vector lie; in a scattered one a binary search finds the block of each."""
    if SCATTERED:
        block = tl.zeros_like(position)
        end = block + blocks
        for _ in range(steps):
            middle = (block + end) // 2
            is_later = tl.load(starts + middle, mask=inside, other=0) <= position
            block = tl.where(is_later, middle, block)
            end = tl.where(is_later, end, middle)
        address = tl.load(addresses + block, mask=inside, other=0).to(piece.dtype)
        return address + (position - tl.load(starts + block, mask=inside, other=0))
    else:
        return piece + position


@triton.jit
def _segment(firsts, counts, block, size, GATHERED: tl.constexpr, BLOCK: tl.constexpr):
    """What a block has to choose from: its candidates, as far as there was room for them, or all of it."""
    if GATHERED:
        first = tl.load(firsts + block)
        length = tl.minimum(tl.load(counts + block).to(tl.int64), size - first)
    else:
        first = block.to(tl.int64) * BLOCK
        length = tl.minimum(size - first, BLOCK)
    return first, length.to(tl.int32)


@triton.jit
def _descend(board, k, DIGIT: tl.constexpr):
    """The first DIGIT digits of the k-th largest key, and which of the keys that begin so it is.

    Zeros, when fewer than k keys are not zero.
    """
    if DIGIT == 0:
        prefix = tl.full((), 0, tl.int32)
        wanted = tl.full((), 0, tl.int64) + k
    else:
        bins = tl.arange(0, _BINS)
        here = tl.load(board + _HISTOGRAMS + (DIGIT - 1) * _BINS + bins)
        wanted = tl.load(board + _STATE + 2 * (DIGIT - 1) + 1)
        reached = tl.cumsum(here, 0, reverse=True)
        digit = tl.sum(tl.where((reached >= wanted) & (reached - here < wanted), bins, 0))
        prefix = (tl.load(board + _STATE + 2 * (DIGIT - 1)) * _BINS + digit).to(tl.int32)
        wanted -= tl.sum(tl.where(bins > digit, here, 0))
    return prefix, wanted
