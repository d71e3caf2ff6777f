"""State beside the checkpoints of a framework: one file per rank, since every rank owes something else."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from oktopk.checkpoint import MANIFEST, Saveable, load
from oktopk.errors import UnsupportedError
from oktopk.front_ends.local_steps import LocalSteps

log = logging.getLogger("oktopk")

FOLDER = "oktopk"  # inside a checkpoint that is a directory; the ending of one beside a checkpoint that is a file


class Attached(Saveable, Protocol):
    """What a front end returned: a reducer, or the handle of `local_steps`."""

    def on_close(self, undo: Callable[[], object]) -> None: ...

    def close(self) -> None: ...


def load_if_saved(target: Saveable, folder: Path) -> bool:
    """Continue from `folder` if there is a state, and say so if there is none. Every rank must call this."""
    mine = (folder / MANIFEST).exists()
    seen = target.reducer.communicate(lambda transport: transport.agree([int(mine)]))
    if any(row[0] for row in seen):
        load(target, folder)  # says which rank does not see it, if one does not
        return True
    if target.reducer.rank == 0:
        log.warning(
            "resumed without what was still owed: %s holds no state of a reducer, so ranks owe nothing at first, and a "
            "warm-up begins again.",
            folder,
        )
    return False


def beside(checkpoint: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint's residuals; a link has those of what it points to."""
    if "://" in str(checkpoint):
        raise UnsupportedError(
            f"what each rank still owes cannot be kept beside {checkpoint}: use a directory that every rank sees."
        )
    return Path(f"{os.path.realpath(checkpoint)}.{FOLDER}")


def lend(handle: LocalSteps, owner: Any, method: str) -> None:
    """Let a method of a framework see the shared weights, until the handle is closed."""
    original = getattr(owner, method)

    @wraps(original)
    def with_shared(*args: Any, **kwargs: Any) -> Any:
        with handle.shared():
            return original(*args, **kwargs)

    setattr(owner, method, with_shared)
    handle.on_close(lambda: setattr(owner, method, original))


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict that stays as it is when the model moves on."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
