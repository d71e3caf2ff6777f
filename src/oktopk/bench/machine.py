"""What one rank's share of the work costs on this machine: scanning, packing, adding, rounds, bytes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from statistics import NormalDist
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from oktopk.bench.timing import threads
from oktopk.config import WIRES, GaussianKConfig, RandomKConfig
from oktopk.kernels import choose
from oktopk.kernels.base import Kernels
from oktopk.primitives.lottery import Lottery
from oktopk.types import SparseVector
from oktopk.wire import Wire

SAMPLE_NUMEL = 1 << 22  # entries; about those of a bucket
FUSED = 4  # times as many when all buckets are one vector: what a reduction costs however long it is weighs less
REPEATS = 15
STREAM_BYTES = 8 << 20

_ASK, _LEAVE = b"?", b"."


@dataclass(frozen=True)
class Machine:
    """Seconds of one core per unit of work; smaller is better."""

    per_entry: Mapping[str, float]  # algorithm -> seconds per gradient entry: compensate, select, retain, fill
    fused_per_entry: float  # the same of sparse algorithms that choose exactly, all gradients as one (fuse="step")
    per_pair: Mapping[str, float]  # wire -> seconds to pack, unpack and add one index/value pair
    bytes_per_pair: Mapping[str, float]  # wire -> on the wire, at the density it was measured with
    density: float
    round_seconds: float  # software cost of one round of messages where ranks run, without the network's own latency
    message_seconds: float  # of one message between two threads that nobody disturbs
    stack_bytes_per_second: float  # what the socket layer moves when no link limits it
    cores: int
    hand_over_per_entry: float = 0.0  # to copy an entry for a neighbour on the same host, and to add that of another
    fill_per_entry: float = 0.0  # the part of `fused_per_entry` that is not shared between ranks of a host

    def best_with(self, other: Machine) -> Machine:
        """The better of two measurements, cost by cost: what else the machine did made the other one worse."""
        return replace(
            self,
            per_entry={name: min(cost, other.per_entry[name]) for name, cost in self.per_entry.items()},
            fused_per_entry=min(self.fused_per_entry, other.fused_per_entry),
            per_pair={wire: min(cost, other.per_pair[wire]) for wire, cost in self.per_pair.items()},
            round_seconds=min(self.round_seconds, other.round_seconds),
            message_seconds=min(self.message_seconds, other.message_seconds),
            hand_over_per_entry=min(self.hand_over_per_entry, other.hand_over_per_entry),
            fill_per_entry=min(self.fill_per_entry, other.fill_per_entry),
            stack_bytes_per_second=max(self.stack_bytes_per_second, other.stack_bytes_per_second),
        )

    def to_json(self) -> dict[str, object]:
        return {name: dict(v) if isinstance(v, Mapping) else v for name, v in vars(self).items()}


def measure_machine(density: float = 0.01, numel: int = SAMPLE_NUMEL) -> Machine:
    """Measure, in a few seconds, on one thread."""
    with threads(1):
        packing = {wire: _per_pair(wire, density, numel) for wire in WIRES}
        round_trip, stack = _sockets()
        return Machine(
            per_entry=_per_entry(density, numel),
            fused_per_entry=_fused_per_entry(density, FUSED * numel),
            per_pair={wire: seconds for wire, (seconds, _) in packing.items()},
            bytes_per_pair={wire: nbytes for wire, (_, nbytes) in packing.items()},
            density=density,
            round_seconds=round_trip,
            message_seconds=round_trip / 2,
            stack_bytes_per_second=stack,
            cores=os.cpu_count() or 1,
            hand_over_per_entry=_hand_over_per_entry(FUSED * numel),
            fill_per_entry=_fill_per_entry(density, FUSED * numel),
        )


def _per_entry(density: float, numel: int) -> dict[str, float]:
    """Seconds per entry by algorithm, bucket by bucket."""
    grad, residual, mean = (torch.randn(numel) for _ in range(3))
    kernels, k = choose(torch.device("cpu")).kernels, max(1, round(density * numel))
    threshold = NormalDist().inv_cdf(1 - density / 2) * 2**0.5

    def exact() -> None:
        kernels.all_below([grad], inf)
        kernels.accumulate_(residual, grad, k)
        _select_retain_fill(kernels, residual, k, mean)

    def gaussian() -> None:
        exact()
        residual.mean(), residual.std(correction=0)
        for _ in range(GaussianKConfig().corrections):  # gradients have longer tails than the normal distribution
            kernels.count_above(residual, threshold)
        kernels.select_above(residual, threshold)

    def drawn() -> None:
        kernels.all_below([grad], inf)
        kernels.accumulate_(residual, grad)
        indices = Lottery(True, RandomKConfig().block).draw(numel, k, 0)
        _retain_fill(kernels, residual, kernels.pick(residual, indices), mean)

    def dense() -> None:
        kernels.all_below([grad], inf)
        mean.copy_(grad)
        mean.add_(grad).div_(4.0)

    return {
        "dense": _best(dense) / numel,
        "gaussiank": _best(gaussian) / numel,
        "randomk": _best(drawn) / numel,
        **dict.fromkeys(("topka", "topkdsa", "gtopk", "oktopk"), _best(exact) / numel),
    }


def _fused_per_entry(density: float, numel: int) -> float:
    """Seconds per entry of an algorithm that chooses exactly, all buckets as one."""
    grad, residual, total, mean = (torch.randn(numel) for _ in range(4))
    kernels, k = choose(torch.device("cpu")).kernels, max(1, round(density * numel))

    def fused() -> None:
        kernels.add(total, residual, [grad], k)
        _select_retain_fill(kernels, total, k, mean)

    return _best(fused) / numel


def _hand_over_per_entry(numel: int) -> float:
    """Seconds per entry that a rank copies for another rank of its host, and adds up of another's."""
    grad, room, residual, total = (torch.randn(numel) for _ in range(4))
    kernels = choose(torch.device("cpu")).kernels

    def hand_over() -> None:
        torch.cat([grad], out=room)
        kernels.add(total, residual, [room])

    return _best(hand_over) / numel


def _fill_per_entry(density: float, numel: int) -> float:
    grad, mean = torch.randn(numel), torch.randn(numel)
    kernels = choose(torch.device("cpu")).kernels
    chosen, _ = kernels.select_topk(grad, max(1, round(density * numel)))
    return _best(lambda: kernels.fill_([mean], chosen)) / numel


def _select_retain_fill(kernels: Kernels, acc: Tensor, k: int, mean: Tensor) -> None:
    _retain_fill(kernels, acc, kernels.select_topk(acc, k)[0], mean)


def _retain_fill(kernels: Kernels, acc: Tensor, chosen: SparseVector, mean: Tensor) -> None:
    kernels.retain_(acc, chosen)
    kernels.fill_([mean], chosen)


def _per_pair(wire: str, density: float, numel: int) -> tuple[float, float]:
    """Seconds per pair, and bytes per pair."""
    indices = (torch.rand(numel) < density).nonzero().flatten().to(torch.int32)
    vector = SparseVector(indices, torch.randn(indices.numel()), numel)
    codec, kernels = Wire(wire), choose(torch.device("cpu")).kernels
    message = codec.pack(vector).message

    def there_and_back() -> None:
        kernels.sum_sparse([vector, codec.unpack(codec.pack(vector).message)])

    return _best(there_and_back) / max(1, vector.nnz), message.numel() / max(1, vector.nnz)


def _best(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return min(times)


def _sockets() -> tuple[float, float]:
    """Seconds of a message and its answer between two threads, and bytes per second of a stream, over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = threading.Thread(target=_serve, args=(server,), daemon=True)
        other.start()
        address = server.getsockname()
        with socket.create_connection(address) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            round_trip = _best(lambda: [_ask(connection) for _ in range(50)]) / 50
        rate = STREAM_BYTES / _best(lambda: _stream(address))
        with socket.create_connection(address) as connection:
            connection.sendall(_LEAVE)
        other.join()
    return round_trip, rate


def _ask(connection: socket.socket) -> bytes:
    connection.sendall(_ASK)
    return connection.recv(1)


def _stream(address: Any) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(bytes(STREAM_BYTES))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


def _serve(server: socket.socket) -> None:
    """Answer what asks, swallow streams, one connection after the other, until told to leave."""
    received = b""
    while received != _LEAVE:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while received := connection.recv(1 << 18):
                if received == _ASK:
                    connection.sendall(b"!")
                if received == _LEAVE:
                    break
