"""`python -m oktopk.training.self_test`: two processes reduce gradients over every wire and check all entries.

Afterwards the compiled loops that a training needs are on disk.
"""

from __future__ import annotations

import sys
from time import perf_counter

import torch

from oktopk.config import WIRES
from oktopk.reducer import Reducer
from oktopk.training.environment import find_rank
from oktopk.training.workers import launch_workers
from oktopk.training.world import World, joined_world

_ENTRIES, _DENSITY = 10_000, 0.01
_TOLERANCE = 1e-5  # float32 rounding of a few additions of numbers near 1


def main() -> int:
    """Start two workers, or be one of them."""
    if find_rank() is None:
        return launch_workers(2, ["oktopk.training.self_test"])
    with joined_world() as world:
        begin = perf_counter()
        error = max(_largest_error(world, wire) for wire in WIRES)
        if world.is_first:
            sys.stdout.write(f"{'correct' if error < _TOLERANCE else f'wrong by {error:.2g}'}, ")
            sys.stdout.write(f"{1000 * (perf_counter() - begin):.0f} ms\n")
    return int(error >= _TOLERANCE)


def _largest_error(world: World, wire: str) -> float:
    """Over all ranks, what went in must be what came out plus what is owed."""
    gradient = torch.randn(_ENTRIES, generator=torch.Generator().manual_seed(world.rank))
    with Reducer("oktopk", _DENSITY, wire=wire) as reducer:
        mean = reducer.reduce("gradient", gradient).double()
        owed = torch.tensor(world.total(reducer.residuals()["gradient"].tolist()))
    went_in = torch.tensor(world.total(gradient.tolist()))
    return float((went_in - world.world_size * mean - owed).abs().max())


if __name__ == "__main__":
    sys.exit(main())
