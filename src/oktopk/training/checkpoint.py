"""Checkpoints: written whole or not at all, one file per rank, readable without executing anything.

checkpoints/step-00000042/  meta.json  shared.pt (model, optimizer)  rank-0.pt ... (random state)  reducer/
checkpoints/last.json, best.json   name the one that counts

A checkpoint that another replaces is renamed aside first, and removed when the new one has its name: whenever the power
goes, one of the two is there.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from oktopk.checkpoint import Saveable, save
from oktopk.errors import CheckpointError
from oktopk.training.run_directory import read_json, write_json
from oktopk.training.world import World

_ASIDE = ".old"


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # the epoch under way
    batch: int = 0  # batches of it that are done
    wall_seconds: float = 0.0
    best: float | None = None  # of the metric
    stale: int = 0  # validations since the best
    epoch_seconds: float = 0.0  # spent in the epoch under way


@dataclass(frozen=True)
class Saved:
    """What a checkpoint gives back to one rank."""

    position: Position
    meta: Mapping[str, Any]
    shared: Mapping[str, Any]
    mine: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run. All ranks call `save` and `load` together."""

    def __init__(self, folder: Path, world: World, keep: int = 2) -> None:
        self.folder = folder
        self._world = world
        self._keep = keep

    def save(
        self,
        position: Position,
        meta: Mapping[str, Any],
        shared: Mapping[str, Any],
        mine: Mapping[str, Any],
        reducer: Saveable,
        best: bool,
    ) -> Path:
        """Write a checkpoint beside the others, then make it the last (and the best) one."""
        final = self.folder / f"step-{position.step:08}"
        partial = self.folder / f".partial-{position.step:08}"
        meta = {"position": asdict(position), "world_size": self._world.world_size, **meta}
        self._all_or_nothing(partial, lambda: self._begin(partial))
        self._all_or_nothing(partial, lambda: self._write(partial, meta, shared, mine))
        self._all_or_nothing(partial, lambda: save(reducer, partial / "reducer"))
        self._all_or_nothing(partial, lambda: self._finish(partial, final, best))
        return final

    def load(self, path: Path) -> Saved:
        """This rank's part of the checkpoint in `path`; in a larger world some ranks share one."""
        meta = read_meta(path)
        mine = path / f"rank-{self._world.rank % meta['world_size']}.pt"
        return Saved(Position(**meta["position"]), meta, load_file(path / "shared.pt"), load_file(mine))

    def _all_or_nothing(self, partial: Path, action: Any) -> None:
        error: Exception | None = None
        try:
            action()
        except Exception as cause:  # whatever it is, the other ranks must hear of it
            error = CheckpointError(
                f"cannot write the checkpoint {partial}: {_reason(cause)}. Free some space or give another --runs "
                f"folder, then continue with --resume. {self._consolation()}"
            )
        try:
            self._world.fail_together(error)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _begin(self, partial: Path) -> None:
        if self._world.is_first:
            _put_back(self.folder)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def _write(self, partial: Path, meta: Any, shared: Any, mine: Any) -> None:
        save_file(partial / f"rank-{self._world.rank}.pt", mine)
        if self._world.is_first:
            save_file(partial / "shared.pt", shared)
            write_json(partial / "meta.json", meta)

    def _finish(self, partial: Path, final: Path, best: bool) -> None:
        if self._world.is_first:
            _replace_folder(partial, final)
            write_json(self.folder / "last.json", {"checkpoint": final.name})
            if best:
                write_json(self.folder / "best.json", {"checkpoint": final.name})
            self._forget_old()

    def _forget_old(self) -> None:
        kept = {path.name for path in complete(self.folder)[-self._keep :]}
        kept |= {read_json(path)["checkpoint"] for path in self.folder.glob("*.json")}
        for path in complete(self.folder):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _consolation(self) -> str:
        known = complete(self.folder)
        return f"The checkpoint {known[-1]} is intact." if known else "There is no earlier checkpoint."


def find_checkpoint(path: Path, which: str = "last") -> Path:
    """The checkpoint that a run directory, its `checkpoints` folder or a checkpoint itself stands for."""
    if (path / "meta.json").is_file():
        return path
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    pointer = folder / f"{which}.json"
    if pointer.is_file():
        named = Path(folder / read_json(pointer)["checkpoint"])
        return named if named.exists() or not _aside(named).exists() else _aside(named)
    raise CheckpointError(
        f"{path} has no {which} checkpoint: give a run of oktopk train that got as far as its first checkpoint."
    )


def complete(folder: Path) -> list[Path]:
    """Checkpoints in a folder, oldest first."""
    return sorted(path.parent for path in folder.glob("step-*/meta.json"))


def read_meta(path: Path) -> dict[str, Any]:
    if not (path / "meta.json").is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no meta.json. {_others(path)}")
    return dict(read_json(path / "meta.json"))


def save_file(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state dict and see it onto the disk."""
    with open(path, "wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def load_file(path: Path) -> dict[str, Any]:
    """A state dict; nothing in the file is executed."""
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: all ranks must see the same run directory, on a shared disk. {_others(path.parent)}"
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} is damaged ({_reason(error)}). {_others(path.parent)}") from None


def require_model(meta: Mapping[str, Any], saved: Mapping[str, Any], path: Path, state: Mapping[str, Any]) -> None:
    """A checkpoint of another model is refused before anything is loaded from it."""
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    ours = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if wrong:
        made = f"{meta.get('workload')}, preset {meta.get('preset')}"
        raise CheckpointError(
            f"{path} is a checkpoint of another model ({made}): {len(wrong)} of {len(ours)} tensors differ, first "
            f"{wrong[0]!r}, {theirs.get(wrong[0], 'absent')} there and {ours.get(wrong[0], 'absent')} here. "
            "Resume it with the workload and preset it was made with."
        )


def _replace_folder(partial: Path, final: Path) -> None:
    if final.exists():
        os.rename(final, _aside(final))
    os.rename(partial, final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    shutil.rmtree(_aside(final), ignore_errors=True)


def _put_back(folder: Path) -> None:
    """What a crash left aside gets its name back, unless its successor is complete."""
    for aside in folder.glob(f"step-*{_ASIDE}"):
        final = aside.with_name(aside.name.removesuffix(_ASIDE))
        if final.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, final)


def _aside(final: Path) -> Path:
    return final.with_name(final.name + _ASIDE)


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else type(error).__name__


def _others(path: Path) -> str:
    known = [str(other) for other in complete(path.parent) if other != path]
    return f"Intact beside it: {', '.join(known)}." if known else "There is no other checkpoint beside it."
