"""A process group as a transport uses it: one of our own beside torch's, or one that was handed over as it is."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from oktopk.errors import CommunicationError, ConfigError, OkTopkError, UnsupportedError
from oktopk.transport.addresses import own_host
from oktopk.transport.base import Op
from oktopk.transport.bounded_store import BoundedStore

DUTY = (
    "every rank of the group must create its reducer (oktopk.register, DistributedOptimizer or Reducer), and several "
    "of them in the same order."
)
_OPS: dict[Op, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_NEEDED = ("size", "allreduce", "alltoall_base", "send", "recv")
_ADDRESS_BYTES = 256


class Link:
    """One rank's end of a process group: three collectives, and where the ranks meet before there are any."""

    ranks: Sequence[int]  # of the world, by rank in the group
    rank: int
    timeout: timedelta
    store: BoundedStore | None = None  # that the ranks share; None in a world of one
    store_holder: int | None = None  # the rank whose process, or whose launcher's, the store is in
    backends = ""  # of the user's group
    _joined: Any = None
    _meeting: Store | None = None  # of the ranks of a part
    _limit: timedelta | None = None  # for each call; None: the group itself has one

    def connect(self, store: Store) -> None:
        """Enter the group, through a part of the store that nobody else uses. Every rank must do it."""

    def among(self, ranks: Sequence[int], store: Store | None) -> Link:
        """A link of these ranks alone, this one included, who meet in `store`."""
        part = copy(self)
        part.ranks, part.rank = [self.ranks[rank] for rank in ranks], list(ranks).index(self.rank)
        part.store = part._joined = None
        if len(ranks) > 1:
            assert store is not None  # of a world of several ranks
            part._meeting = PrefixStore(f"among {list(ranks)}", store)
            part.connect(part._meeting)
        return part

    def another_store(self, prefix: str) -> Store:
        """For whatever else the ranks of a part make, with a connection of its own: its calls may block."""
        assert self._meeting is not None
        return PrefixStore(prefix, _clone(self._meeting))

    def leave(self) -> None:
        """Without the others: those who wait for this rank get an error."""
        self._joined = None  # one that torch does not know of ends with its last reference, and its sockets with it

    @property
    def _group(self) -> Any:
        if self._joined is None:
            raise CommunicationError("this rank has left the group: its transport was closed, or has failed before.")
        return self._joined

    def all_reduce_(self, tensor: Tensor, op: Op) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        with communication_errors():
            self._wait(self._group.allreduce([tensor], self._limited(options)))
        return tensor

    def all_to_all(self, outgoing: Tensor) -> Tensor:
        """Equal parts: part r goes to rank r; what came from rank r is part r of the result."""
        incoming = torch.empty_like(outgoing)
        with communication_errors():
            options = self._limited(dist.AllToAllOptions())
            self._wait(self._group.alltoall_base(incoming, outgoing, [], [], options))
        return incoming

    def start(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> list[dist.Work]:
        """Start to send to ranks and to receive from ranks what is not empty."""
        with communication_errors():
            return self._start([(to, m) for to, m in outgoing if m.numel()], [(r, m) for r, m in incoming if m.numel()])

    def _start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[dist.Work]:
        works = [self._group.send([message], to, 0) for to, message in sends]
        return works + [self._group.recv([message], source, 0) for source, message in receives]

    def finish(self, works: Sequence[dist.Work]) -> None:
        """Wait for what was started."""
        with communication_errors():
            for work in works:
                self._wait(work)

    def _limited(self, options: Any) -> Any:
        if self._limit is not None:
            options.timeout = self._limit
        return options

    def _wait(self, work: dist.Work | None) -> None:
        if work is None:  # done already
            return
        if self._limit is None:
            work.wait()
        else:
            work.wait(self._limit)


def open_link(group: Any, timeout: timedelta | None) -> Link:
    """This rank's end of a group beside `group`, or of `group` itself where torch did not make it; None: all ranks."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("this rank is not in the group: create the reducer on the group's ranks only.")
    parent = group if group is not None else dist.group.WORLD
    if parent is None:
        raise ConfigError("torch.distributed is not initialised: call init_process_group first.")
    ranks = _registered_ranks(parent)
    if ranks is None:
        return GivenLink(parent, timeout)
    backends = dist.get_backend_config(parent)
    # Gloo beside NCCL too: messages are on the host, wherever gradients are.
    kind = GlooLink if "gloo" in backends or "nccl" in backends else OtherLink
    return kind(parent, ranks, timeout)


def is_process_group(group: Any) -> bool:
    return all(callable(getattr(group, method, None)) for method in _NEEDED)


def _registered_ranks(group: Any) -> list[int] | None:
    """The ranks of a group that torch made. A subclass in torch's books may have more ranks than they say."""
    try:
        return dist.get_process_group_ranks(group) if type(group) is dist.ProcessGroup else None
    except KeyError:
        return None


class _OwnLink(Link):
    """A new group over the ranks of one of torch's: our messages stay apart from those of the user's threads."""

    def __init__(self, parent: dist.ProcessGroup, ranks: Sequence[int], timeout: timedelta | None) -> None:
        self._parent, self.ranks, self.rank = parent, ranks, ranks.index(dist.get_rank())
        self.timeout, self.backends = timeout or _timeout_of(parent), dist.get_backend_config(parent)
        if len(ranks) > 1:
            shared = dist.distributed_c10d._get_default_store()
            self.store = BoundedStore(lambda: _clone(shared), self.timeout.total_seconds())
            self.store_holder = ranks.index(0) if 0 in ranks else None


class GlooLink(_OwnLink):
    """Gloo, on the CPU."""

    def connect(self, store: Store) -> None:
        # Not by `dist.new_group`, which takes the name of a destroyed group again: Gloo would find its old addresses.
        with communication_errors("Gloo cannot connect the ranks; GLOO_SOCKET_IFNAME says which interface to use"):
            self._joined = dist.ProcessGroupGloo(
                PrefixStore("gloo", store), self.rank, len(self.ranks), timeout=self.timeout
            )


class OtherLink(_OwnLink):
    """Another backend that takes tensors of the host, such as MPI, through torch's own functions."""

    def connect(self, store: Store) -> None:
        backend = dist.get_backend(self._parent)
        is_subset = len(self.ranks) < dist.get_world_size()
        with communication_errors():
            self._joined = dist.new_group(
                list(self.ranks), timeout=self.timeout, backend=backend, use_local_synchronization=is_subset
            )

    def leave(self) -> None:
        if self._joined is not None and dist.is_initialized():
            dist.destroy_process_group(self._joined)
        super().leave()

    def _start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[dist.Work]:
        # In one batch: a backend may let a send wait for its receive.
        batch = [dist.P2POp(dist.isend, message, self.ranks[to], self._group) for to, message in sends]
        batch += [dist.P2POp(dist.irecv, message, self.ranks[source], self._group) for source, message in receives]
        return dist.batch_isend_irecv(batch) if batch else []


class GivenLink(Link):
    """A group that torch did not make, like torchft's: only its maker could make another, so it is used as it is."""

    def __init__(self, group: Any, timeout: timedelta | None) -> None:
        _require_usable(group)
        self._joined, self._limit, self.timeout = group, timeout, timeout or dist.default_pg_timeout
        self.ranks, self.rank = range(group.size()), 0
        if len(self.ranks) == 1:
            return
        try:
            self.rank = self._find_rank()
            self.store, self.store_holder = self._open_store(), 0
        except CommunicationError as error:
            raise CommunicationError(
                f"{group!r} does not connect its {len(self.ranks)} ranks ({error}): {DUTY}"
            ) from error

    def all_to_all(self, outgoing: Tensor) -> Tensor:  # with which every reduction begins
        if self._group.size() != len(self.ranks):
            raise CommunicationError(
                f"the group had {len(self.ranks)} ranks and has {self._group.size()} now: close this reducer and "
                "create another on every rank; oktopk.save and oktopk.load carry the residuals over."
            )
        return super().all_to_all(outgoing)

    def among(self, ranks: Sequence[int], store: Store | None) -> Link:
        raise UnsupportedError(
            "a group that torch did not make cannot be divided into hosts: pass hosts=None, or a group of torch's own."
        )

    def _find_rank(self) -> int:
        """Which part of an exchange is ours: `rank()` of a group that can be reconfigured may be that of its birth."""
        token = secrets.randbits(62)
        return int(self.all_to_all(torch.full((len(self.ranks),), token)).eq(token).nonzero()[0])

    def _open_store(self) -> BoundedStore:
        """Rank 0's: torch's default store, if there is one, need not be that of these ranks."""
        store, address = None, ""
        if self.rank == 0:
            store = TCPStore(own_host(), 0, is_master=True, wait_for_workers=False)
            address = f"{store.host} {store.port}"
        message = torch.tensor(list(address.encode().ljust(_ADDRESS_BYTES)), dtype=torch.uint8)
        first = self.all_to_all(message.repeat(len(self.ranks)))[:_ADDRESS_BYTES]
        host, port = bytes(first.tolist()).decode().split()
        return BoundedStore(
            lambda: store or TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self.timeout),
            self.timeout.total_seconds(),
        )


def _require_usable(group: Any) -> None:
    if not is_process_group(group):
        raise ConfigError(f"group must be a ProcessGroup, a Transport or None, got {group!r}.")
    if "nccl" in f"{_name(group)} {type(group).__name__}".lower():
        raise UnsupportedError(
            f"{group!r} is an NCCL group that torch did not make: messages between two ranks need batches, which only "
            "torch's own groups have. Use torch.distributed.new_group, or a Gloo group."
        )


def _name(group: Any) -> str:
    try:
        return str(group.name())
    except Exception:  # whatever a stranger's class does here, it has no name
        return ""


def _clone(store: Any) -> Store:
    """A connection of its own where torch has it: another thread may be waiting on the shared one."""
    clone: Store = getattr(store, "clone", lambda: store)()
    return clone


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout the user gave to `init_process_group`, so that ours is no other."""
    device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    found = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
    return found if isinstance(found, timedelta) else dist.default_pg_timeout


@contextmanager
def communication_errors(what: str = "") -> Iterator[None]:
    """Whatever the backend raises is an error of communication."""
    try:
        yield
    except OkTopkError:
        raise
    except RuntimeError as error:
        raise CommunicationError(f"{what}: {error}" if what else str(error)) from error
