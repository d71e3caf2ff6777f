"""A reducer's state beside the checkpoints of a framework: one file per rank, since every rank owes something else."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from oktopk.checkpoint import MANIFEST, load
from oktopk.errors import UnsupportedError
from oktopk.reducer import Reducer

log = logging.getLogger("oktopk")

FOLDER = "oktopk"  # inside a checkpoint that is a directory; the ending of one beside a checkpoint that is a file


def load_if_saved(reducer: Reducer, folder: Path) -> bool:
    """Continue from `folder` if there is a state, and say so if there is none. Every rank must call this."""
    mine = (folder / MANIFEST).exists()
    seen = reducer.communicate(lambda transport: transport.agree([int(mine)]))
    if any(row[0] for row in seen):
        load(reducer, folder)  # says which rank does not see it, if one does not
        return True
    if reducer.rank == 0:
        log.warning(
            "resumed without what was still owed: %s holds no state of a reducer, so residuals start empty and a "
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
