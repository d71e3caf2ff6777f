"""How the largest entries of a vector on a GPU are found, with one wait for the device.

1. Sample: a key that a little more than k entries should reach.
2. Scan: one pass makes the vector, if it is a sum, and gathers what reaches that key into a buffer of bounded size.
3. Narrow: a radix search among these, a digit at a time, for the k-th largest.
4. Place: what is larger, and the first of those that equal it, in the order of their indices.

The host launches all of it without looking, and then reads what was counted. Should the sample have misled, so that too
few were gathered or too many, steps 3 and 4 are done again with the whole vector: slower, but the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels import triton_loops as loops
from oktopk.kernels.staging import to_device, to_host
from oktopk.types import Difference, Source, SparseVector, index_dtype

BLOCK = 2048  # entries of a program that scans
WARPS = 8  # of such a program; fewer = more registers for each thread, fewer programs at a time
CHUNK = 128  # candidates that a program looks at together; a block has some 20 of them at density 0.01
SAMPLE = 1 << 15  # entries that tell a threshold; more = fewer candidates, slower sample
LINE = 32  # entries that a sample takes together: one cache line of float32
DEVIATIONS = 4  # by how many standard deviations of the sample more candidates are taken; fewer = more second searches
SPARE = 6  # standard deviations for which there is room beyond these
SMALL = 1 << 15  # vectors up to this size are searched as a whole
SEED = 17  # where in its stretch a sampled line lies
TABLES = 64  # how many vectors in pieces are remembered


@dataclass(frozen=True)
class Entries:
    """A vector: x, or what `out` becomes, or what is never written: x and pieces, added or subtracted."""

    source: Source
    x: Tensor
    pieces: tuple[Tensor, ...] = ()
    sign: int = 0
    out: Tensor | None = None

    @classmethod
    def of(cls, source: Source) -> Entries:
        if isinstance(source, Difference):
            return cls(source, source.shared, source.own, -1)
        return cls(source, source)

    @property
    def numel(self) -> int:
        return self.x.numel()


@dataclass(frozen=True)
class Candidates:
    """What is chosen from: entries gathered from a vector, in blocks, or all of it."""

    source: Source
    board: Tensor
    values: Tensor
    size: int  # of `values`
    blocks: int
    indices: Tensor | None = None
    firsts: Tensor | None = None  # where the entries of a block begin
    counts: Tensor | None = None

    @classmethod
    def all_of(cls, x: Tensor, source: Source) -> Candidates:
        return cls(source, _new_board(x), x, x.numel(), _blocks(x.numel()))

    @classmethod
    def with_room(cls, room: int, blocks: int, entries: Entries) -> Candidates:
        index, new = index_dtype(entries.numel), entries.x.new_empty
        return cls(
            entries.source, _new_board(entries.x), new(room, dtype=torch.float32), room, blocks,
            new(room, dtype=index), new(blocks, dtype=torch.int64), new(blocks, dtype=torch.int32),
        )  # fmt: skip

    @property
    def is_gathered(self) -> bool:
        return self.indices is not None


@dataclass(frozen=True)
class Found:
    """What a search brings to the host."""

    energy: float  # sum of squares, of a vector that was made
    count: int  # how many entries reached the threshold, also if there was no room for them
    chosen: SparseVector | None  # None: the sample misled, or there was no room
    threshold: float = 0.0  # smallest magnitude chosen


class Search:
    """Searches vectors on one device. Buffers are torch's to keep; what is remembered is where vectors lie."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lines: dict[int, Tensor] = {}  # what is sampled, by the size of a vector
        self._tables: dict[tuple[int, ...], Table] = {}

    def largest(self, entries: Entries, k: int) -> Found:
        """The k largest, after a look at a sample; with k = 0 none, only the sum of squares."""
        candidates = self._gather(entries, k)
        return self._choose(candidates, k) if k and entries.numel else _energy_of(candidates)

    def largest_of_all(self, entries: Entries, k: int) -> Found:
        """The same without a sample; a difference is formed for it."""
        return self._choose(self._whole(entries), k)

    def above(self, entries: Entries, low: int, room: int) -> Found:
        """What reaches the key `low`, if there is room for it."""
        (key,) = to_device(self._device, torch.tensor([low], dtype=torch.int32))
        candidates = self._scan(entries, key, room)
        assert candidates.counts is not None
        totals = candidates.counts.cumsum(0)  # nothing was searched for: all is above, and nothing tied
        board, indices, values = self._place(candidates, totals, totals, room)
        chosen = _vector(entries.source, indices, values, board.count) if board.count <= room else None
        return Found(board.energy, board.count, chosen)

    def pick(self, entries: Entries, indices: Tensor) -> Tensor:
        """What is at these indices, on the host as they are."""
        (places,) = to_device(self._device, indices)
        return to_host(self._picked(entries, places, 1))[0].to(entries.source.dtype)

    def table(self, pieces: Sequence[Tensor]) -> Table:
        """Where a vector lies."""
        if len(pieces) < 2:
            return Table(pieces[0] if pieces else None)
        key = (*(piece.data_ptr() for piece in pieces), *(piece.numel() for piece in pieces), pieces[0].itemsize)
        if key not in self._tables:
            if len(self._tables) >= TABLES:
                self._tables.clear()
            self._tables[key] = Table.of(pieces, self._device)
        # Only addresses are remembered: a gradient that nobody else holds must be free to go.
        return replace(self._tables[key], first=pieces[0])

    def _gather(self, entries: Entries, k: int) -> Candidates:
        sample = _sample_size(entries.numel, k)
        if sample == 0:
            return self._whole(entries)
        expected = sample * k / entries.numel
        rank = int(expected + DEVIATIONS * expected**0.5) + 1
        low = self._sample(entries, sample).topk(min(rank, sample)).values[-1:].clamp_(min=1)
        return self._scan(entries, low, room_for(k, entries.numel))

    def _whole(self, entries: Entries) -> Candidates:
        if entries.sign == 0:
            return Candidates.all_of(entries.x, entries.source)
        out = torch.empty_like(entries.x) if entries.out is None else entries.out
        return self._scan(Entries(entries.source, entries.x, entries.pieces, entries.sign, out), None, 0)

    def _sample(self, entries: Entries, size: int) -> Tensor:
        numel = entries.numel
        if numel not in self._lines:
            (self._lines[numel],) = to_device(self._device, sampled_lines(numel, size // LINE))
        return self._picked(entries, self._lines[numel], LINE).abs_().view(torch.int32)

    def _picked(self, entries: Entries, lines: Tensor, line: int) -> Tensor:
        size, where = lines.numel() * line, self.table(entries.pieces)
        picked = entries.x.new_empty(size, dtype=torch.float32)
        launch(
            loops.pick, _blocks(size), entries.x, where.first, *where.search, lines, size, picked,
            SIGN=entries.sign, SCATTERED=where.is_scattered, LINE=line, BLOCK=BLOCK,
        )  # fmt: skip
        return picked

    def _scan(self, entries: Entries, low: Tensor | None, room: int) -> Candidates:
        """One pass. Without `low` nothing is gathered: all of `out` is candidates then."""
        where = self.table(entries.pieces)
        blocks = where.blocks if where.is_scattered else _blocks(entries.numel)
        if low is not None:
            found = Candidates.with_room(room, blocks, entries)
        else:
            assert entries.out is not None
            found = Candidates.all_of(entries.out, entries.source)
        energies = entries.x.new_empty(blocks, dtype=torch.float64) if entries.sign else None
        launch(
            loops.scan, blocks, entries.out, entries.x, where.first, where.starts, where.addresses, entries.numel, low,
            found.board, energies, found.firsts, found.counts, found.indices, found.values, room,
            SIGN=entries.sign, WRITE=entries.out is not None, GATHER=low is not None, SCATTERED=where.is_scattered,
            BLOCK=BLOCK,
        )  # fmt: skip
        if energies is not None:
            torch.sum(energies, 0, keepdim=True, out=found.board[loops.ENERGY : loops.ENERGY + 1].view(torch.float64))
        return found

    def _choose(self, candidates: Candidates, k: int) -> Found:
        k = min(k, candidates.source.numel())
        for digit in range(loops.DIGITS + 1):
            launch(
                loops.narrow, _blocks(candidates.size) if digit < loops.DIGITS else 1, candidates.values,
                candidates.board, k, candidates.size, DIGIT=digit, GATHERED=candidates.is_gathered, BLOCK=BLOCK,
            )  # fmt: skip
        totals = candidates.board.new_empty((2, candidates.blocks), dtype=torch.int32)
        launch(
            loops.count_kept, candidates.blocks, candidates.values, candidates.firsts, candidates.counts,
            candidates.board, *totals, candidates.size,
            GATHERED=candidates.is_gathered, BLOCK=BLOCK, CHUNK=CHUNK, warps=1,
        )  # fmt: skip
        above, tied = totals.cumsum(1).unbind()
        board, indices, values = self._place(candidates, above, tied, k)
        complete = not candidates.is_gathered or k <= board.count <= candidates.size
        chosen = _vector(candidates.source, indices, values, board.kept) if complete else None
        return Found(board.energy, board.kept, chosen, board.kth or _smallest(values[: board.kept]))

    def _place(self, candidates: Candidates, above: Tensor, tied: Tensor, room: int) -> tuple[Board, Tensor, Tensor]:
        new = candidates.values.new_empty
        indices, values = new(room, dtype=index_dtype(candidates.source.numel())), new(room, dtype=torch.float32)
        launch(
            loops.place_kept, candidates.blocks, candidates.values, candidates.indices, candidates.firsts,
            candidates.counts, candidates.board, above, tied, candidates.size, indices, values, room,
            GATHERED=candidates.is_gathered, BLOCK=BLOCK, CHUNK=CHUNK, warps=1,
        )  # fmt: skip
        board, indices, values = to_host(candidates.board[: loops.HISTOGRAMS], indices, values)
        return Board.read(board), indices, values


@dataclass(frozen=True)
class Board:
    """What the programs of all grids have left for the host."""

    count: int  # gathered, or that would have been with more room
    kept: int
    energy: float
    kth: float  # largest magnitude; 0 when fewer than k are not zero

    @classmethod
    def read(cls, words: Tensor) -> Board:
        energy, kth = words.view(torch.float64)[loops.ENERGY], words[loops.KTH : loops.KTH + 1].int()
        return cls(int(words[loops.COUNT]), int(words[loops.KEPT]), float(energy), float(kth.view(torch.float32)))


@dataclass(frozen=True)
class Table:
    """Where the blocks of a vector lie that is in several pieces. A piece ends a block."""

    first: Tensor | None  # piece; None in a table that is kept
    blocks: int = 0
    starts: Tensor | None = None  # int64 [blocks + 1], in the vector
    addresses: Tensor | None = None  # int64 [blocks]

    @classmethod
    def of(cls, pieces: Sequence[Tensor], device: torch.device) -> Table:
        sizes = np.array([piece.numel() for piece in pieces], np.int64)
        blocks = -(-sizes // BLOCK)
        owner = np.repeat(np.arange(len(sizes)), blocks)
        inside = (np.arange(len(owner)) - (np.cumsum(blocks) - blocks)[owner]) * BLOCK
        starts = np.append((np.cumsum(sizes) - sizes)[owner] + inside, sizes.sum())
        bases = np.array([piece.data_ptr() for piece in pieces], np.int64)
        addresses = bases[owner] + inside * pieces[0].itemsize
        return cls(None, len(owner), *to_device(device, torch.from_numpy(starts), torch.from_numpy(addresses)))

    @property
    def is_scattered(self) -> bool:
        return self.starts is not None

    @property
    def search(self) -> tuple[Tensor | None, Tensor | None, int, int]:
        """What finds the block of an index."""
        return self.starts, self.addresses, self.blocks, self.blocks.bit_length()


def launch(kernel: Any, programs: int, *args: Any, warps: int = WARPS, **constants: Any) -> None:
    if programs:
        with _device_of(args):
            kernel[(programs,)](*args, num_warps=warps, **constants)


def _device_of(args: Sequence[Any]) -> AbstractContextManager[Any]:
    """Makes the device of the tensors the current one: Triton launches there, wherever they are."""
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def room_for(k: int, numel: int) -> int:
    """Room for the entries that a sample promises when it should be k, and for its error."""
    expected = max(1.0, SAMPLE * k / max(1, numel))
    return min(numel, int(k * (1 + (DEVIATIONS + SPARE) / expected**0.5)) + BLOCK) if k else 0


def sampled_lines(numel: int, count: int) -> Tensor:
    """One line of each of `count` equal stretches."""
    fractions = torch.rand(count, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    lines = numel // LINE
    return ((torch.arange(count) + fractions) * (lines / count)).long().clamp_(max=lines - 1)


def _sample_size(numel: int, k: int) -> int:
    """How many entries tell a threshold; 0 when the vector is better searched as a whole."""
    return 0 if numel <= SMALL or 2 * k >= numel or k == 0 else min(SAMPLE, numel // LINE // 2 * LINE)


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _new_board(x: Tensor) -> Tensor:
    return x.new_zeros(loops.WORDS, dtype=torch.int64)


def _energy_of(candidates: Candidates) -> Found:
    return Found(Board.read(to_host(candidates.board)[0]).energy, 0, None)


def _vector(source: Source, indices: Tensor, values: Tensor, count: int) -> SparseVector:
    return SparseVector(indices[:count], values[:count].to(source.dtype), source.numel())


def _smallest(values: Tensor) -> float:
    return float(values.abs().min()) if values.numel() else 0.0
