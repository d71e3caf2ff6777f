"""How ascending indices become bytes: five codecs, the smallest wins.

Indices are int64 or int32 arrays, strictly ascending. Every codec is told the first index by the header, so a message
about a far region costs no more than one about the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oktopk.errors import WireError
from oktopk.wire import plain
from oktopk.wire.backend import Loops, compiled_codecs
from oktopk.wire.header import Header

RAW32, RAW64, BLOCK16, RICE, BITMAP, RUN = range(6)
NAMES = {"raw32": RAW32, "raw64": RAW64, "block16": BLOCK16, "rice": RICE, "bitmap": BITMAP, "run": RUN}

_BLOCK = 1 << 16  # entries a 16-bit offset can tell apart


@dataclass(frozen=True)
class Plan:
    """How one list of indices will be written."""

    codec: int
    parameter: int
    nbytes: int


def plan(indices: np.ndarray, numel: int, codec: int | None = None) -> Plan:
    """The smallest encoding, or the one that `codec` names."""
    nnz = indices.size
    if nnz == 0:
        return Plan(RUN, 0, 0)
    span = int(indices[-1]) - int(indices[0]) + 1
    remainder, rice_bytes = _measure(indices, span)
    if int(indices[0]) < 0 or int(indices[-1]) >= numel or rice_bytes < 0:
        raise WireError(f"indices must ascend within 0 and {numel}, each once: sort and merge them before packing.")
    plans = [
        Plan(RICE, remainder, rice_bytes),
        Plan(BITMAP, 0, -(-span // 8)),
        Plan(BLOCK16, 0, 2 * nnz + 4 * -(-span // _BLOCK)),
        Plan(RAW64, 0, 8 * nnz) if numel > 2**32 else Plan(RAW32, 0, 4 * nnz),
    ]
    if span == nnz:
        plans.append(Plan(RUN, 0, 0))
    if codec is not None:
        plans = [candidate for candidate in plans if candidate.codec == codec]
        if not plans:
            raise WireError(f"index codec {codec} cannot hold {nnz} indices over {span} of {numel} entries.")
    return min(plans, key=lambda candidate: candidate.nbytes)


def encode(indices: np.ndarray, plan: Plan, out: np.ndarray) -> None:
    """Write indices to out, uint8 [plan.nbytes]."""
    if plan.codec in (RAW32, RAW64):
        out[:] = indices.astype("<u4" if plan.codec == RAW32 else "<u8").view(np.uint8)
    elif plan.codec == BLOCK16:
        _encode_blocks(indices, out)
    elif plan.codec == RICE:
        backend().rice_encode(indices, plan.parameter, out)
    elif plan.codec == BITMAP:
        _encode_bitmap(indices, out)


def decode(data: np.ndarray, header: Header) -> np.ndarray:
    """The indices in data, uint8 [header.index_bytes]: int32 or int64 as numel demands, proven to ascend below it."""
    if header.nnz == 0 or header.index_codec == RUN:
        require(header.index_codec == RUN and data.size == 0, "a run has no index bytes")
        return np.arange(header.first, header.first + header.nnz, dtype=_dtype(header.numel))
    if header.index_codec == RICE:
        return _decode_rice(data, header)
    if header.index_codec == BLOCK16:
        indices = _decode_blocks(data, header)
    elif header.index_codec == BITMAP:
        indices = _decode_bitmap(data, header)
    elif header.index_codec in (RAW32, RAW64):
        indices = _decode_raw(data, header)
    else:
        raise WireError(f"unknown index codec {header.index_codec}: expected one of {sorted(NAMES.values())}.")
    ends = int(indices[0]) == header.first and int(indices[-1]) < header.numel
    require(ends and bool((indices[1:] > indices[:-1]).all()), "they do not ascend within their vector")
    return indices.astype(_dtype(header.numel), copy=False)


def backend() -> Loops:
    """What codes gaps."""
    return compiled_codecs("indices") or plain


def _measure(indices: np.ndarray, span: int) -> tuple[int, int]:
    """The best Rice parameter and the bytes it needs; negative bytes if the indices do not ascend."""
    gaps = indices.size - 1
    mean = (span - indices.size) / max(1, gaps)
    # For a geometric distribution the best remainder has log2(mean * ln 2) bits; real gaps may want one more or less.
    middle = max(1, int(np.log2(mean * 0.6931 + 1e-9))) if mean > 1 else 1
    sums = backend().quotient_sums(indices, middle - 1)
    if sums[0] < 0:
        return 0, -1
    sizes = [
        (rice_bytes(gaps, middle - 1 + i) + -(-(int(total) + gaps) // 8), middle - 1 + i)
        for i, total in enumerate(sums)
    ]
    nbytes, remainder = min(sizes)
    return remainder, nbytes


def rice_bytes(gaps: int, remainder: int) -> int:
    """Bytes of the remainders, which come before the quotients."""
    return -(-gaps * remainder // 8)


def _decode_rice(data: np.ndarray, header: Header) -> np.ndarray:
    gaps, remainder = header.nnz - 1, header.index_parameter
    require(remainder < 48, "a remainder has at most 47 bits")
    # Each gap ends with a set bit among the quotients, so they need at least this much.
    require(data.size >= rice_bytes(gaps, remainder) + -(-gaps // 8), "too few bytes for the gaps")
    indices: np.ndarray = np.empty(header.nnz, _dtype(header.numel))
    good = backend().rice_decode(data, remainder, header.first, header.numel, indices)
    require(good, "gaps do not end where the indices do")
    return indices


def _encode_blocks(indices: np.ndarray, out: np.ndarray) -> None:
    offsets = (indices - indices[0]).astype(np.int64)
    counts = np.bincount(offsets // _BLOCK).astype("<u4")
    out[: 4 * counts.size] = counts.view(np.uint8)
    out[4 * counts.size :] = (offsets % _BLOCK).astype("<u2").view(np.uint8)


def _decode_blocks(data: np.ndarray, header: Header) -> np.ndarray:
    blocks, odd = divmod(data.size - 2 * header.nnz, 4)
    require(odd == 0 and blocks > 0, "block counts do not fill their bytes")
    counts = data[: 4 * blocks].copy().view("<u4").astype(np.int64)
    require(int(counts.sum()) == header.nnz, "block counts do not add up to nnz")
    offsets = data[4 * blocks :].copy().view("<u2").astype(np.int64)
    return offsets + header.first + np.repeat(np.arange(blocks) * _BLOCK, counts)


def _encode_bitmap(indices: np.ndarray, out: np.ndarray) -> None:
    bits = np.zeros(8 * out.size, np.uint8)
    bits[indices - indices[0]] = 1
    out[:] = np.packbits(bits, bitorder="little")


def _decode_bitmap(data: np.ndarray, header: Header) -> np.ndarray:
    indices = np.flatnonzero(np.unpackbits(data, bitorder="little"))
    require(indices.size == header.nnz, "set bits do not add up to nnz")
    return indices + header.first


def _decode_raw(data: np.ndarray, header: Header) -> np.ndarray:
    check_raw(data.size, header)
    return data.copy().view("<i8" if header.index_codec == RAW64 else "<u4").astype(np.int64, copy=False)


def check_raw(size: int, header: Header) -> None:
    require(size == header.nnz * (8 if header.index_codec == RAW64 else 4), "raw indices do not fill their bytes")


def _dtype(numel: int) -> type:
    return np.int32 if numel <= 2**31 - 1 else np.int64


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise WireError(f"the indices of this message are damaged: {reason}.")
