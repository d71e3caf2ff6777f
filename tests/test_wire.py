"""Messages: what goes in comes out, in few bytes, and nothing else is accepted."""

from __future__ import annotations

import itertools
import math
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oktopk.bench.wire import samples
from oktopk.config import WIRES
from oktopk.errors import ConfigError, WireError
from oktopk.types import SparseVector
from oktopk.wire import HEADER_BYTES, Header, Wire, narrow, plain
from oktopk.wire import indices as index_codecs
from oktopk.wire.backend import compiled_codecs

# Half a unit in the last place of each format, relative to the value (int8: to the largest of its block).
PRECISION = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "int8": 0.5 / 127 * 1.001}


def vector(indices: Tensor, numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> SparseVector:
    values = torch.randn(indices.numel(), generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return SparseVector(indices.to(torch.int32 if numel <= 2**31 - 1 else torch.int64), values, numel)


def random_indices(numel: int, density: float, seed: int = 0) -> Tensor:
    return (torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < density).nonzero().flatten()


def assert_round_trip(wire: Wire, sparse: SparseVector) -> Tensor:
    packed = wire.pack(sparse)
    back = wire.unpack(packed.message)
    assert back.numel == sparse.numel
    assert back.indices.dtype == sparse.indices.dtype and torch.equal(back.indices, sparse.indices)
    assert packed.values.dtype == back.values.dtype == sparse.values.dtype
    assert torch.equal(back.values, packed.values)
    return packed.message


index_lists = st.one_of(
    st.sets(st.integers(0, 300)),
    st.sets(st.integers(0, 2**20)),
    st.sets(st.integers(2**31 - 50, 2**31 + 50)),
    st.sets(st.integers(0, 2**48 - 1), max_size=20),
    st.tuples(st.integers(0, 2**40), st.integers(0, 300)).map(lambda run: set(range(run[0], run[0] + run[1]))),
)


@settings(max_examples=300, deadline=None)
@given(chosen=index_lists, spare=st.integers(0, 3), name=st.sampled_from(WIRES), double=st.booleans())
def test_every_message_comes_back(chosen: set[int], spare: int, name: str, double: bool) -> None:
    numel = min(max(chosen, default=0) + 1 + spare, 2**48)
    indices = torch.tensor(sorted(chosen), dtype=torch.int64)
    dtype = torch.float64 if double else torch.float32
    assert_round_trip(Wire(name), vector(indices, numel, dtype=dtype))


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [0, 2, 127, 128, 1000])
def test_all_entries_of_a_vector_make_the_message_of_a_vector_that_has_them_all(
    name: str, dtype: torch.dtype, numel: int
) -> None:
    wire, whole = Wire(name), vector(torch.arange(numel), numel, dtype=dtype)
    usual, packed = wire.pack(whole), wire.pack_all(whole.values)
    assert torch.equal(packed.message, usual.message) and torch.equal(packed.values, usual.values)
    assert torch.equal(wire.unpack_all(packed.message), wire.unpack(usual.message).values)
    some = vector(torch.arange(1, 5), 9, dtype=dtype)
    with pytest.raises(WireError, match="all 9 entries"):
        wire.unpack_all(wire.pack(some).message)
    with pytest.raises(WireError, match="truncated"):
        wire.unpack_all(packed.message[:-1])


@pytest.mark.parametrize("codec", ["raw32", "block16", "rice", "bitmap"])
@pytest.mark.parametrize("density", [0.001, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("start", [0, 12_345])
def test_every_index_codec_comes_back_and_auto_is_the_smallest(codec: str, density: float, start: int) -> None:
    indices = random_indices(200_000, density)[start // 10 :]
    sparse = vector(indices, 200_000)
    forced = assert_round_trip(Wire(indices=codec), sparse)
    assert assert_round_trip(Wire(), sparse).numel() <= forced.numel()


def test_a_run_needs_no_index_bytes() -> None:
    sparse = vector(torch.arange(70, 170), 1000)
    assert assert_round_trip(Wire(), sparse).numel() == HEADER_BYTES + 400
    with pytest.raises(WireError, match="cannot hold"):
        Wire(indices="run").pack(vector(torch.tensor([1, 3]), 10))


@pytest.mark.parametrize("codec", ["raw64", "block16", "rice"])
def test_indices_beyond_32_bits_are_exact(codec: str) -> None:
    numel = 2**40
    indices = torch.cat([torch.arange(3), 2**31 + torch.arange(0, 90, 3), torch.tensor([2**32, numel - 1])])
    if codec == "block16":  # one count for every 65,536 entries: not for a list this wide
        indices = indices[3:-1]
    back = Wire().unpack(assert_round_trip(Wire(indices=codec), vector(indices, numel)))
    assert back.indices.dtype == torch.int64


@pytest.mark.parametrize(("density", "entropy"), [(0.02, 7.07), (0.01, 8.08), (0.001, 11.41)])
def test_indices_take_close_to_their_entropy(density: float, entropy: float) -> None:
    sparse = vector(random_indices(2_000_000, density), 2_000_000)
    bits = 8 * (Wire().pack(sparse).message.numel() - HEADER_BYTES - 4 * sparse.nnz) / sparse.nnz
    assert bits <= 1.02 * entropy


def test_a_far_region_costs_no_more_than_a_near_one() -> None:
    near = random_indices(100_000, 0.01)
    far = Wire().pack(vector(near + 20_000_000, 2**27)).message
    assert far.numel() == Wire().pack(vector(near, 2**27)).message.numel()


@pytest.mark.parametrize("indices", [[3, 1], [1, 1], [-1, 4], [5, 10]])
def test_indices_that_do_not_ascend_within_the_vector_are_not_packed(indices: list[int]) -> None:
    with pytest.raises(WireError, match="ascend"):
        Wire().pack(SparseVector(torch.tensor(indices), torch.ones(2), 10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PRECISION)
@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e30, 1e-44])
def test_values_keep_their_precision_at_any_scale(name: str, dtype: torch.dtype, magnitude: float) -> None:
    sparse = vector(torch.arange(1000), 1000, dtype=dtype)
    sparse = sparse.with_values((sparse.values.double() * magnitude).to(dtype))
    seen = Wire(name).pack(sparse).values
    block = sparse.values.abs().view(-1, 250).amax() if name == "int8" else sparse.values.abs()
    # Below the smallest float32 an absolute error of one subnormal step is the best any format does.
    allowed = block.double() * PRECISION[name] + (2.0**-149 * 127 if magnitude < 1e-37 else 0)
    if name == "float16":
        allowed = allowed + sparse.values.abs().max().double() * 2**-39
    assert ((seen - sparse.values).double().abs() <= allowed).all()


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_largest_and_smallest_numbers_stay_finite(name: str, dtype: torch.dtype) -> None:
    edge = torch.finfo(dtype)
    values = torch.tensor([edge.max, -edge.max, edge.tiny, edge.smallest_normal / 4, 0.0, 1.0], dtype=dtype)
    packed = Wire(name).pack(SparseVector(torch.arange(6, dtype=torch.int32), values, 6))
    back = Wire().unpack(packed.message).values
    assert torch.isfinite(back).all() and torch.isfinite(packed.values).all()
    assert torch.equal(back, packed.values)
    if name == "float32":
        assert torch.equal(back, values.to(back.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e30, 1e-44])
def test_int4_is_off_by_no_more_than_half_a_gap_at_any_scale(dtype: torch.dtype, magnitude: float) -> None:
    values = (vector(torch.arange(1000), 1000).values.double() * magnitude).to(dtype)
    seen = Wire("int4").pack(SparseVector(torch.arange(1000, dtype=torch.int32), values, 1000)).values
    for own, back in zip(values.double().split(128), seen.double().split(128), strict=True):
        low, high = own.abs().min(), own.abs().max()
        # The widest gap is the one below the largest; both ends are rounded to 8 bits, or to bfloat16's smallest step.
        allowed = (high - low) * (1 - (6 / 7) ** 1.5) / 2 + high * 2**-8 + 2.0**-133
        assert ((back - own).abs() <= allowed).all()
        assert (torch.sign(back) * torch.sign(own) >= 0).all()


def uniform4(values: Tensor) -> Tensor:
    """As int8 does, with 4 bits."""
    scale = values.abs().amax(1, keepdim=True) / 7
    return (values / scale).round() * scale


def sparse_loco(values: Tensor) -> Tensor:
    """Four bins of 1.5 standard deviations around the mean; a value becomes the mean of its bin (SparseLoCo)."""
    rest = values - values.mean(1, keepdim=True)
    bins = (rest / (1.5 * rest.std(1, correction=0, keepdim=True))).floor().clamp(-2, 1)
    means = [
        (values * (bins == i)).sum(1, keepdim=True) / (bins == i).sum(1, keepdim=True).clamp(min=1)
        for i in range(-2, 2)
    ]
    return sum((bins == i) * mean for i, mean in zip(range(-2, 2), means, strict=True))


@pytest.mark.parametrize(
    ("kind", "int4", "codebook2"),  # errors allowed: those of docs/wire-format.md and a tenth more
    [("normal", 0.013, 0.13), ("top of normal", 0.00036, 0.0036), ("top of Student t(3)", 0.0083, 0.075)],
)
def test_narrow_values_err_less_than_the_usual_quantisers(kind: str, int4: float, codebook2: float) -> None:
    values = samples()[kind]
    for name, limit, usual in (("int4", int4, uniform4), ("codebook2", codebook2, sparse_loco)):
        sparse = SparseVector(torch.arange(values.numel(), dtype=torch.int32), values, values.numel())
        error = (Wire(name).pack(sparse).values - values).square().sum() / values.square().sum()
        blocks = values.view(1, -1) if name == "codebook2" else values.view(-1, 128)
        rival = (usual(blocks) - blocks).square().sum() / values.square().sum()
        assert error < limit and error < 0.9 * rival, f"{name}: {error}, {rival}"


@pytest.mark.parametrize("name", ["int4", "codebook2"])
@pytest.mark.parametrize(
    "values",
    [[0.0] * 300, [-0.5] * 300, [0.0] * 130 + [3.0] + [0.0] * 5, [7.0], [0.0, -1.5], [1.0, 2.0] * 200],
    ids=["zeros", "equal", "one", "single", "pair", "two levels"],
)
def test_what_has_two_levels_comes_back_exactly(name: str, values: list[float]) -> None:
    exact = torch.tensor(values)
    assert torch.equal(Wire(name).pack(SparseVector(torch.arange(exact.numel()), exact, 500)).values, exact)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300),
    name=st.sampled_from(["int4", "codebook2"]),
)
def test_no_block_owes_more_after_sending_than_before(values: list[float], name: str) -> None:
    """Otherwise error feedback could grow without end."""
    exact = torch.tensor(values, dtype=torch.float64)
    seen = Wire(name).pack(SparseVector(torch.arange(exact.numel()), exact, 500)).values
    for own, back in zip(exact.split(narrow.BLOCK), seen.split(narrow.BLOCK), strict=True):
        assert (own - back).norm() <= own.norm() * (1 + 2**-8) + 1e-39


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])
    seen = Wire("bfloat16").pack(SparseVector(torch.arange(3, dtype=torch.int32), values, 3)).values
    assert seen.tolist() == [1.0, 1 + 2 * 2**-7, 1 + 2**-7]


def test_unknown_formats_are_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'float16'"):
        Wire("flaot16")
    with pytest.raises(ConfigError, match="Did you mean 'rice'"):
        Wire(indices="rise")


@settings(max_examples=200, deadline=None)
@given(chosen=index_lists, remainder=st.integers(0, 47))
def test_compiled_and_plain_write_the_same_bytes(chosen: set[int], remainder: int) -> None:
    indices = np.array(sorted(chosen | {5}), np.int64)
    sums = plain.quotient_sums(indices, remainder)
    compiled = compiled_codecs("indices")
    assert list(compiled.quotient_sums(indices, remainder)) == list(sums)
    gaps = indices.size - 1
    if sums[0] + gaps > 2**20:
        return  # unary quotients of hopelessly small remainders fill memory
    size = index_codecs.rice_bytes(gaps, remainder) + -(-(sums[0] + gaps) // 8)
    ours, theirs = np.full(size, 255, np.uint8), np.full(size, 255, np.uint8)
    compiled.rice_encode(indices, remainder, ours)
    plain.rice_encode(indices, remainder, theirs)
    assert np.array_equal(ours, theirs)
    numel = int(indices[-1]) + 1
    for backend in (compiled, plain):
        back = np.empty_like(indices)
        assert backend.rice_decode(ours, remainder, int(indices[0]), numel, back)
        assert np.array_equal(back, indices)
        if gaps:
            assert not backend.rice_decode(ours, remainder, int(indices[0]), numel - 1, back)


@contextmanager
def without_numba() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        compiled_codecs.cache_clear()
        yield
    compiled_codecs.cache_clear()


@pytest.mark.parametrize("name", WIRES)
def test_plain_takes_over_without_numba(name: str) -> None:
    sparse = vector(random_indices(50_000, 0.01), 50_000)
    expected = Wire(name).pack(sparse).message
    with without_numba():
        assert index_codecs.backend() is plain
        assert torch.equal(assert_round_trip(Wire(name), sparse), expected)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False), max_size=600),
    name=st.sampled_from(["bfloat16", "int8", "int4", "codebook2"]),
    scale=st.sampled_from([1.0, 2.0**-149, 2.0**-126, 1e-30, 3.0]),
)
def test_compiled_values_have_the_bits_of_torch(values: list[float], name: str, scale: float) -> None:
    some = torch.tensor(values, dtype=torch.float32)
    few = torch.randn(300, generator=torch.Generator().manual_seed(len(values))) * scale
    for exact in (some, torch.cat([some, few]), few[:257]):
        sparse = SparseVector(torch.arange(exact.numel(), dtype=torch.int32), exact, exact.numel())
        ours, back = Wire(name).pack(sparse), Wire(name).unpack(Wire(name).pack(sparse).message)
        with without_numba():
            theirs = Wire(name).pack(sparse)
            assert torch.equal(Wire(name).unpack(theirs.message).values, back.values)
        assert torch.equal(ours.message, theirs.message)
        assert torch.equal(ours.values.view(torch.int32), theirs.values.view(torch.int32))


def test_messages_at_odd_addresses_are_read() -> None:
    sparse = vector(random_indices(5000, 0.02), 5000)
    for name in WIRES:
        message = Wire(name).pack(sparse).message
        for offset in range(1, 9):
            buffer = torch.empty(message.numel() + offset, dtype=torch.uint8)
            buffer[offset:] = message
            assert torch.equal(Wire().unpack(buffer[offset:]).indices, sparse.indices)


# --- bad input ---


def seal(fields: bytes) -> bytes:
    """A header whose checksum is right, whatever it says."""
    return fields + struct.pack("<I", zlib.crc32(fields))


def tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)


def sane_or_refused(message: bytes) -> bool:
    """Whether it was accepted. What is accepted must be a sparse vector, and never more than the bytes could hold."""
    try:
        back = Wire().unpack(tensor(message))
    except WireError:
        return False
    assert back.indices.numel() == back.values.numel() <= 4 * len(message)  # a run of values of 2 bits
    assert (back.indices[1:] > back.indices[:-1]).all()
    assert back.nnz == 0 or 0 <= int(back.indices[0]) <= int(back.indices[-1]) < back.numel
    return True


def specimens() -> list[bytes]:
    shapes = [
        vector(random_indices(20_000, 0.01), 20_000),
        vector(random_indices(3000, 0.4), 3000),
        vector(torch.arange(40, 140), 1000),
        vector(2**33 + torch.tensor([7, 900, 901]), 2**34),
        vector(torch.empty(0, dtype=torch.int64), 50),
        vector(torch.tensor([9]), 10),
    ]
    codecs = ["auto", "raw32", "raw64", "block16", "rice", "bitmap"]
    messages = []
    for sparse in shapes:
        for name, codec in itertools.product(WIRES, codecs):
            try:
                messages.append(bytes(Wire(name, indices=codec).pack(sparse).message.numpy()))
            except WireError:
                continue
    return messages


def mutate(message: bytes, random: np.random.Generator) -> bytes:
    """Cut, grow, flip, swap or overwrite; half of the time with a header that is sealed again."""
    data = bytearray(message)
    kind = random.integers(6)
    if kind == 0:
        data = data[: random.integers(len(data) + 1)]
    elif kind == 1:
        data += random.bytes(int(random.integers(1, 64)))
    elif kind in (2, 3):
        for _ in range(random.integers(1, 4)):
            at = int(random.integers(HEADER_BYTES if kind == 2 else len(data)))
            data[at] ^= 1 << int(random.integers(8))
    elif kind == 4:
        at = int(random.integers(len(data)))
        data[at : at + 8] = random.bytes(min(8, len(data) - at))
    else:
        field = int(random.choice([3, 4, 5, 8, 16, 24, 32]))
        numbers = [0, 1, 255, 2**31, 2**47, 2**48, 2**63, 2**64 - 1]
        data[field : field + 8] = struct.pack("<Q", numbers[random.integers(len(numbers))])
    if len(data) >= HEADER_BYTES and random.integers(2):
        data[:HEADER_BYTES] = seal(bytes(data[: HEADER_BYTES - 4]))
    return bytes(data)


def test_20000_mutated_messages_are_refused_or_sane() -> None:
    random = np.random.default_rng(20_000)
    messages = specimens()
    accepted = sum(sane_or_refused(mutate(messages[i % len(messages)], random)) for i in range(20_000))
    # Flipped value bytes make other values, and those a reader cannot know to be wrong.
    assert 0 < accepted < 10_000


@settings(max_examples=300, deadline=None)
@given(junk=st.binary(max_size=200), sealed=st.booleans())
def test_junk_is_refused_or_sane(junk: bytes, sealed: bool) -> None:
    if sealed and len(junk) >= HEADER_BYTES - 4:
        junk = seal(b"OK\x01" + junk[3 : HEADER_BYTES - 4]) + junk[HEADER_BYTES - 4 :]
    sane_or_refused(junk)


@settings(max_examples=300, deadline=None)
@given(
    index_codec=st.integers(0, 7), value_codec=st.sampled_from([*range(8), 128, 130, 132, 133, 134, 135]),
    remainder=st.integers(0, 60),
    numel=st.integers(0, 400), nnz=st.integers(0, 40), first=st.integers(0, 400), body=st.binary(max_size=120),
)  # fmt: skip
def test_plausible_headers_over_junk_are_refused_or_sane(
    index_codec: int, value_codec: int, remainder: int, numel: int, nnz: int, first: int, body: bytes
) -> None:
    for index_bytes in {0, len(body) // 2, max(0, len(body) - 4 * nnz), max(0, len(body) - 2 * nnz)}:
        header = Header(index_codec, value_codec, remainder, 0, numel, nnz, first, index_bytes)
        sane_or_refused(header.to_bytes() + body)


def test_every_truncation_and_every_header_bit_is_noticed() -> None:
    message = bytes(Wire("bfloat16").pack(vector(random_indices(5000, 0.01), 5000)).message.numpy())
    for length in range(len(message)):
        assert not sane_or_refused(message[:length])
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(message)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not sane_or_refused(bytes(flipped))


def test_refusals_say_what_came_and_what_to_do() -> None:
    message = bytes(Wire().pack(vector(torch.arange(9), 9)).message.numpy())
    newer = seal(message[:2] + b"\x09" + message[3 : HEADER_BYTES - 4]) + message[HEADER_BYTES:]
    with pytest.raises(WireError, match=r"version 1, got 9: install the same"):
        Wire().unpack(tensor(newer))
    with pytest.raises(WireError, match="truncated"):
        Wire().unpack(tensor(message[:10]))
    with pytest.raises(WireError, match="expected a message of 80 bytes, got 79"):
        Wire().unpack(tensor(message[:-1]))
    with pytest.raises(WireError, match="something else"):
        Wire().unpack(tensor(b"x" * 100))
    with pytest.raises(WireError, match="uint8"):
        Wire().unpack(torch.zeros(100))


def test_an_oversized_claim_allocates_nothing() -> None:
    claim = Header(index_codecs.RUN, 0, 0, 0, 2**48, 2**47, 0, 0)
    with pytest.raises(WireError, match="expected a message of"):
        Wire().unpack(tensor(claim.to_bytes()))


def test_decoding_follows_the_written_format() -> None:
    """A decoder made from docs/wire-format.md alone reads what the library writes."""
    sparse = vector(random_indices(4000, 0.02), 4000)
    message = bytes(Wire("bfloat16", indices="rice").pack(sparse).message.numpy())
    magic, version, _, _, remainder, _, numel, nnz, first, index_bytes = struct.unpack_from("<2sBBBBhQQQQ", message)
    assert (magic, version, numel, nnz) == (b"OK", 1, sparse.numel, sparse.nnz)
    body = message[44 : 44 + index_bytes]
    bits = int.from_bytes(body, "little")
    at, place, indices = 8 * math.ceil((nnz - 1) * remainder / 8), first, [first]
    for i in range(nnz - 1):
        low = bits >> (i * remainder) & ((1 << remainder) - 1)
        quotient = 0
        while not bits >> at & 1:
            quotient, at = quotient + 1, at + 1
        at += 1
        place += (quotient << remainder) + low + 1
        indices.append(place)
    assert indices == sparse.indices.tolist()
    words = struct.unpack_from(f"<{nnz}H", message, 44 + index_bytes)
    values = [struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in words]
    assert values == Wire().unpack(tensor(message)).values.tolist()


@pytest.mark.parametrize(("name", "bits"), [("int4", 4), ("codebook2", 2)])
def test_narrow_values_follow_the_written_format(name: str, bits: int) -> None:
    sparse = vector(torch.arange(5, 5 + 301), 1000)
    message = bytes(Wire(name).pack(sparse).message.numpy())
    assert message[4] == {4: 5, 2: 6}[bits] and len(message) == 44 + 4 * 3 + math.ceil(301 * bits / 8)
    codes, top = int.from_bytes(message[44 + 4 * 3 :], "little"), 2 ** (bits - 1) - 1
    for i, seen in enumerate(Wire().unpack(tensor(message)).values.tolist()):
        low, high = (
            struct.unpack("<f", b"\0\0" + message[at : at + 2])[0] for at in (44 + 4 * (i // 128), 46 + 4 * (i // 128))
        )
        code = codes >> (bits * i) & (2**bits - 1)
        magnitude = low + (high - low) * ((code & top) / top) ** 1.5
        assert seen == pytest.approx(-magnitude if code > top else magnitude, rel=1e-6)


@pytest.mark.parametrize("values", WIRES)
@pytest.mark.parametrize("numel", [1, 1000, 2**20, 2**33])
def test_no_message_is_longer_than_its_limit(values: str, numel: int) -> None:
    wire = Wire(values)
    for dtype in (torch.float32, torch.float64):
        for nnz in {0, 1, min(numel, 300)}:
            sparse = vector(torch.arange(nnz) * (numel // max(1, nnz)), numel, dtype=dtype)
            assert wire.pack(sparse).message.numel() <= wire.limit(sparse.nnz, numel, dtype)
