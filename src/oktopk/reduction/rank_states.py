"""What ranks saved, for ranks that may be more or fewer when it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class RankStates:
    """The saved states that a rank makes its own from. Old rank r is inherited by new rank r modulo the world size."""

    rank: int
    world_size: int
    world_size_before: int
    first: Mapping[str, Any]  # of old rank 0, which also has what all ranks share
    nearest: Mapping[str, Any]  # of one old rank: that with this rank's number, if there was one
    inherited: Sequence[Mapping[str, Any]]  # none for a rank more than there were

    @property
    def is_same_world(self) -> bool:
        return self.world_size == self.world_size_before

    @property
    def scale(self) -> float:
        """A mean over P ranks divides what they owe by P, and what reaches the weights must stay the same."""
        return self.world_size / self.world_size_before

    def part(self, name: Any) -> RankStates:
        """The same of a part of each state."""
        inherited = [state[name] for state in self.inherited]
        sizes = self.rank, self.world_size, self.world_size_before
        return RankStates(*sizes, self.first[name], self.nearest[name], inherited)

    def owed(self, name: str) -> dict[str, Tensor]:
        """What the inherited ranks owed, as this rank owes it now."""
        return total((state[name] for state in self.inherited), self.scale)


def total(parts: Iterable[Mapping[str, Tensor]], scale: float) -> dict[str, Tensor]:
    """The sum by name, times `scale`."""
    result: dict[str, Tensor] = {}
    for part in parts:
        for name, vector in part.items():
            result[name] = result.get(name, 0.0) + vector * scale
    return result
