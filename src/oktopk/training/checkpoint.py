"""The checkpoints of a run: which there are, which counts, which may go. What is in one is `oktopk.save`'s business.

checkpoints/step-00000042/         manifest.json (position), one file per rank; whole once the manifest is there
checkpoints/last.json, best.json   name the one that counts
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oktopk.checkpoint import MANIFEST, Saveable, load, read_manifest, save
from oktopk.errors import CheckpointError
from oktopk.training.run_directory import read_json, write_json
from oktopk.training.world import World


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


class Checkpoints:
    """The checkpoints of one run. All ranks call `save` together."""

    def __init__(self, folder: Path, world: World, keep: int = 2) -> None:
        self.folder = folder
        self._world = world
        self._keep = keep

    def save(self, target: Saveable, position: Position, about: Mapping[str, Any], best: bool) -> Path:
        """Write a checkpoint beside the others, then make it the last (and the best) one."""
        path = self.folder / f"step-{position.step:08}"
        try:
            save(target, path, {"position": asdict(position), **about})
        except (OSError, TypeError, CheckpointError) as error:
            raise self._unwritten(path, error) from error
        self._world.together(lambda: self._point_to(path, best) if self._world.is_first else None)
        return path

    def _point_to(self, path: Path, best: bool) -> None:
        try:
            for name in ("last", "best") if best else ("last",):
                write_json(self.folder / f"{name}.json", {"checkpoint": path.name})
        except OSError as error:
            raise self._unwritten(path, error) from error
        self._forget_old()

    def _forget_old(self) -> None:
        """Also what a crash left behind half-written."""
        kept = {path.name for path in complete(self.folder)[-self._keep :]}
        kept |= {read_json(path)["checkpoint"] for path in self.folder.glob("*.json")}
        for path in self.folder.glob("step-*"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _unwritten(self, path: Path, error: Exception) -> CheckpointError:
        if self._world.is_first and not (path / MANIFEST).exists():
            shutil.rmtree(path, ignore_errors=True)
        known = complete(self.folder)
        consolation = f"The checkpoint {known[-1]} is intact." if known else "There is no earlier checkpoint."
        return CheckpointError(
            f"cannot write the checkpoint {path}: {_reason(error)}. Free some space or give another --runs folder, "
            f"then continue with --resume. {consolation}"
        )


def load_checkpoint(target: Saveable, path: Path) -> tuple[Position, Mapping[str, Any]]:
    """Continue from a checkpoint, on every rank: how far the run had come, and what is known about it."""
    try:
        about = load(target, path).about
    except CheckpointError as error:
        others = ", ".join(str(other) for other in complete(path.parent) if other != path)
        raise CheckpointError(f"{error} Other checkpoints of this run: {others or 'none'}.") from error
    return Position(**about["position"]), about


def find_checkpoint(path: Path, which: str = "last") -> Path:
    """The checkpoint that a run directory, its `checkpoints` folder or a checkpoint itself stands for."""
    if (path / MANIFEST).is_file():
        return path
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    pointer = folder / f"{which}.json"
    found = folder / read_json(pointer)["checkpoint"] if pointer.is_file() else path
    if (found / "meta.json").is_file():
        raise CheckpointError(f"{found} was written by oktopk 0.1, in a format of its own: go on with that version.")
    if found == path:
        raise CheckpointError(
            f"{path} has no {which} checkpoint: give a run of oktopk train that got as far as its first checkpoint."
        )
    return found


def complete(folder: Path) -> list[Path]:
    """Checkpoints in a folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{MANIFEST}"))


def position_of(path: Path) -> Position:
    """How far a run had come when it wrote a checkpoint."""
    return Position(**read_manifest(path).about["position"])


def require_model(saved: Mapping[str, Any], state: Mapping[str, Any], made: str) -> None:
    """Weights of another model are refused before anything is loaded."""
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    ours = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if wrong:
        raise CheckpointError(
            f"this is a checkpoint of another model ({made}): {len(wrong)} of {len(ours)} tensors differ, first "
            f"{wrong[0]!r}, {theirs.get(wrong[0], 'absent')} there and {ours.get(wrong[0], 'absent')} here. "
            "Resume it with the workload and preset it was made with."
        )


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else type(error).__name__
