"""A reducer on disk: one safetensors file per rank, and a manifest that makes them one checkpoint.

The manifest is written last and replaces the one before in one move, so that a directory always holds a whole
checkpoint, the old or the new, whenever the power goes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

from torch import Tensor

from oktopk.config import require_positive
from oktopk.errors import CheckpointError, ConfigError
from oktopk.reducer import Reducer
from oktopk.reduction.parts import Part
from oktopk.reduction.rank_states import RankStates
from oktopk.transport.sharing import attempt, raise_any, share, share_error

T = TypeVar("T")
VERSION = 1
MANIFEST = "manifest.json"
# What JSON cannot say: a tensor, by its key; a tuple; a mapping whose keys are not text.
_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"

OnWorldChange = Literal["redistribute", "reset"]


@dataclass(frozen=True)
class RankFile:
    """One rank's part of a checkpoint."""

    rank: int
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What makes the files of a directory one checkpoint."""

    version: int
    algorithm: str
    world_size: int
    step: int
    files: tuple[RankFile, ...]
    hosts: Sequence[Sequence[int]] = ()  # ranks of each host, which each have a part of what it owes; (): one on each
    about: Mapping[str, Any] = field(default_factory=dict)  # what whoever saved it wants to know before loading it

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


class Saveable(Protocol):
    """What `save` and `load` take: a `Reducer`, or the handle of `local_steps`."""

    @property
    def reducer(self) -> Reducer: ...

    def rank_state(self) -> Mapping[str, Any]:
        """What the file of this rank holds."""
        ...

    def from_rank_states(self, states: RankStates) -> Mapping[str, Any]:
        """This rank's whole state, from what was saved by ranks that may have been more or fewer."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All of this rank's state."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def save(target: Saveable, directory: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> Path:
    """Write the state of all ranks into a directory that all of them see. Every rank must call this.

    `target` is a reducer, or the handle of `local_steps`; `about` (JSON values of rank 0) comes back from `load` and
    `read_manifest`. When it returns, the checkpoint is on disk; an older one in the same directory is then gone, never
    before.
    """
    folder, reducer = Path(directory), target.reducer
    mine = _together(reducer, lambda: _write_rank(folder, reducer, target.rank_state()))
    files = tuple(RankFile(**entry) for entry in reducer.communicate(lambda transport: share(asdict(mine), transport)))
    manifest = Manifest(
        VERSION, reducer.algorithm, reducer.world_size, reducer.step, files, _hosts(reducer), about or {}
    )
    _together(reducer, lambda: _commit(folder, manifest) if reducer.rank == 0 else None)
    return folder / MANIFEST


def load(
    target: Saveable, directory: str | os.PathLike[str], on_world_change: OnWorldChange = "redistribute"
) -> Manifest:
    """Continue from a checkpoint. Every rank must call this, on a target made with the same settings.

    At another world size, or with other `hosts`, "redistribute" adds the residuals of the old ranks up on the new ones,
    times new / old world size: a mean over P ranks divides what they owe by P, and what reaches the weights must stay
    the same (means over senders divide by other numbers: there nothing is multiplied). "reset" drops them. Thresholds
    and regions are found anew.
    """
    if on_world_change not in ("redistribute", "reset"):
        raise ConfigError(f"on_world_change must be 'redistribute' or 'reset', got {on_world_change!r}.")
    reducer = target.reducer
    manifest, state = _together(reducer, lambda: _read(target, Path(directory), on_world_change))
    _together(reducer, lambda: target.load_state_dict(state))
    return manifest


class RankState:
    """A target for `torch.distributed.checkpoint`: `dcp.save({"reducer": oktopk.RankState(reducer)}, ...)`.

    Each rank's state goes under a key of its own, because DCP keeps only one of several equal keys. To load what a
    world of another size has saved, say of which: `oktopk.RankState(reducer, saved_by=8)`. What is owed is then shared
    out as by `load`.
    """

    def __init__(self, target: Saveable, saved_by: int | None = None) -> None:
        """`saved_by`: how many ranks saved what is to be loaded; None: as many as there are."""
        if saved_by is not None:
            require_positive("saved_by", saved_by)
        self._target, self._before = target, saved_by or target.reducer.world_size

    @property
    def _is_same_size(self) -> bool:
        return self._before == self._target.reducer.world_size

    def _key(self, rank: int) -> str:
        return f"rank {rank} of {self._before}"

    def state_dict(self) -> dict[str, Any]:
        if not self._is_same_size:  # DCP asks what to load
            return {self._key(rank): b"" for rank in range(self._before)}
        reducer = self._target.reducer
        return {self._key(reducer.rank): pack({**self._target.state_dict(), "hosts": _listed(_hosts(reducer))})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        reducer = self._target.reducer
        if self._is_same_size:
            self._target.load_state_dict(unpack(state_dict[self._key(reducer.rank)]))
            return
        read = cache(lambda rank: unpack(state_dict[self._key(rank)]))
        states = _states_for(reducer, self._before, read(0).get("hosts", ()), read, redistribute=True)
        self._target.load_state_dict(self._target.from_rank_states(states))


# -- one rank's file ---------------------------------------------------------------------------------------------


def pack(state: Mapping[str, Any]) -> bytes:
    """A state as a safetensors file: tensors as such, everything else as JSON in its header.

    A state is made of tensors, text, numbers, None, lists, tuples and mappings, and comes back as it was.
    """
    return bytes(_safetensors().save(*_parts(state)))


def unpack(data: bytes) -> dict[str, Any]:
    """The inverse of `pack`. Runs no code from the file."""
    try:
        tensors = _safetensors().load(data)
        length = int.from_bytes(data[:8], "little")
        plain = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["state"])
    except Exception as error:
        raise CheckpointError(f"this is not the state of a reducer: {error}") from error
    state: dict[str, Any] = _put_back(plain, tensors)
    return state


def _parts(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by key, and the rest as the metadata of a file."""
    tensors = _Tensors()
    plain = json.dumps(_take_out(state, "", tensors))
    return tensors.by_key, {"state": plain}


class _Tensors:
    """Tensors under their keys. The file format wants each in memory of its own: one that is there already (tied
    weights, or a buffer of a model) is only named again, and one that overlaps with another is copied."""

    def __init__(self) -> None:
        self.by_key: dict[str, Tensor] = {}
        self._keys: dict[tuple[object, ...], str] = {}
        self._storages: set[int] = set()

    def put(self, key: str, given: Tensor) -> str:
        identity = (given.device, given.data_ptr(), given.shape, given.stride(), given.dtype)
        if given.numel() and identity in self._keys:
            return self._keys[identity]
        tensor = given.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        self.by_key[key] = tensor.clone() if storage in self._storages else tensor
        self._keys[identity] = key
        self._storages.add(storage)
        return key


def _take_out(value: Any, key: str, tensors: _Tensors) -> Any:
    if isinstance(value, Tensor):
        return {_TENSOR: tensors.put(key, value)}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _take_out(part, f"{key}/{name}", tensors) for name, part in value.items()}
    if isinstance(value, Mapping):
        return {_PAIRS: [[name, _take_out(part, f"{key}/{name}", tensors)] for name, part in value.items()]}
    if isinstance(value, (list, tuple)):
        parts = [_take_out(part, f"{key}/{index}", tensors) for index, part in enumerate(value)]
        return parts if isinstance(value, list) else {_TUPLE: parts}
    return value


def _put_back(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_put_back(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_TENSOR}:
        return tensors[value[_TENSOR]]
    if set(value) == {_TUPLE}:
        return tuple(_put_back(part, tensors) for part in value[_TUPLE])
    if set(value) == {_PAIRS}:
        return {name: _put_back(part, tensors) for name, part in value[_PAIRS]}
    return {name: _put_back(part, tensors) for name, part in value.items()}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError("checkpoints need the package safetensors: pip install 'oktopk[trainer]'.") from error
    return safetensors.torch


# -- writing -----------------------------------------------------------------------------------------------------


def _write_rank(folder: Path, reducer: Reducer, state: Mapping[str, Any]) -> RankFile:
    """Straight from the tensors to the disk: a copy of all of them in memory could be more than there is."""
    save_file = _safetensors().save_file
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"rank-{reducer.rank}-of-{reducer.world_size}"
    temporary = folder / f"{stem}.safetensors.tmp"
    tensors, plain = _parts(state)
    try:
        save_file(tensors, temporary, plain)
    except Exception as error:  # of its own kind
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {temporary}: {error}") from error
    with temporary.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    # The digest in the name keeps a file from overwriting one that the current manifest still needs.
    name, size = f"{stem}-{digest[:12]}.safetensors", temporary.stat().st_size
    place_whole(temporary, folder / name)
    return RankFile(reducer.rank, name, size, digest)


def _commit(folder: Path, manifest: Manifest) -> None:
    write_whole(folder / MANIFEST, manifest.to_json().encode())
    listed = {file.name for file in manifest.files}
    for path in folder.glob("rank-*.safetensors*"):
        if path.name not in listed:
            path.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """All of it or nothing: to a temporary file, and then to its place."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(data)
    place_whole(temporary, path)


def place_whole(temporary: Path, path: Path) -> None:
    """To the disk, and then to its name."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name too must survive
    finally:
        os.close(folder)


# -- reading -----------------------------------------------------------------------------------------------------


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """What a directory holds."""
    path = Path(directory) / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        files = tuple(RankFile(**file) for file in found.pop("files"))
        manifest = Manifest(**found, files=files)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint in {path.parent}: there is no {MANIFEST}.") from None
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): take another checkpoint.") from error
    if manifest.version != VERSION:
        raise CheckpointError(f"{path} is of version {manifest.version}, and this library reads version {VERSION}.")
    return manifest


def _read(target: Saveable, folder: Path, on_world_change: OnWorldChange) -> tuple[Manifest, Mapping[str, Any]]:
    manifest = read_manifest(folder)
    read = cache(lambda rank: _read_rank(folder, manifest.files[rank]))  # often one file is all three
    redistribute = on_world_change == "redistribute"
    states = _states_for(target.reducer, manifest.world_size, manifest.hosts, read, redistribute)
    return manifest, target.from_rank_states(states)


def _states_for(
    reducer: Reducer,
    world_size: int,
    hosts: Sequence[Sequence[int]],
    read: Callable[[int], Mapping[str, Any]],
    redistribute: bool,
) -> RankStates:
    """What a rank makes its own from, of what the ranks of a world, on these hosts, have saved."""
    before = hosts or [(rank,) for rank in range(world_size)]
    is_same = world_size == reducer.world_size and _listed(hosts) == _listed(_hosts(reducer))
    inherited = before[reducer.hosts.host :: len(reducer.hosts.ranks)] if redistribute or is_same else ()
    return RankStates(
        rank=reducer.rank,
        world_size=reducer.world_size,
        world_size_before=world_size,
        ranks_per_host_before=len(before[0]),
        own=Part(reducer.hosts.local_rank, reducer.hosts.ranks_per_host),
        is_same_world=is_same,
        first=read(0),
        nearest=read(reducer.rank % world_size),
        leading=read(before[reducer.hosts.host % len(before)][0]),
        inherited=[[read(rank) for rank in ranks] for ranks in inherited],
    )


def _hosts(reducer: Reducer) -> Sequence[Sequence[int]]:
    return reducer.hosts.ranks if not reducer.hosts.is_flat else ()


def _listed(hosts: Sequence[Sequence[int]]) -> list[list[int]]:
    """As JSON brings them back."""
    return [list(ranks) for ranks in hosts]


def read_rank(directory: str | os.PathLike[str], rank: int = 0) -> dict[str, Any]:
    """What one rank saved."""
    return _read_rank(Path(directory), read_manifest(directory).files[rank])


def _read_rank(folder: Path, file: RankFile) -> dict[str, Any]:
    path = folder / file.name
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: every rank must see the directory that was saved into.") from None
    if len(data) != file.bytes or sha256(data).hexdigest() != file.sha256:
        raise CheckpointError(
            f"{path} is damaged: expected {file.bytes} bytes with checksum {file.sha256[:12]}, got {len(data)} bytes "
            f"with {sha256(data).hexdigest()[:12]}. Take another checkpoint."
        )
    return unpack(data)


# -- together ----------------------------------------------------------------------------------------------------


def _together(reducer: Reducer, work: Callable[[], T]) -> T:
    """Do it on every rank; when it fails on one, that one raises its error and the others one that names it."""
    result, error = attempt(work)
    raise_any(error, reducer.communicate(lambda transport: share_error(error, transport)), CheckpointError)
    return cast(T, result)
