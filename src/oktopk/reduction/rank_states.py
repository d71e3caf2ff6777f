"""What ranks saved, for ranks that may be more or fewer when it is loaded, and on other hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from oktopk.reduction.parts import Part, join


@dataclass(frozen=True)
class RankStates:
    """The saved states that a rank makes its own from. Old host h is inherited by new host h modulo their number.

    Where every rank is a host by itself, that is: old rank r by new rank r modulo the world size.
    """

    rank: int
    world_size: int
    world_size_before: int
    ranks_per_host_before: int
    own: Part  # which part of each parameter this rank has to do with
    is_same_world: bool  # as many ranks on the same hosts
    first: Mapping[str, Any]  # of old rank 0, which also has what all ranks share
    nearest: Mapping[str, Any]  # of one old rank: that with this rank's number, if there was one
    leading: Mapping[str, Any]  # of the first rank of one old host: that with this host's number, if there was one
    inherited: Sequence[Sequence[Mapping[str, Any]]]  # of the ranks of each old host; none if there were fewer hosts

    @property
    def scale(self) -> float:
        """A mean over P ranks divides what they owe by P, and what reaches the weights must stay the same."""
        return self.world_size / self.world_size_before

    @property
    def scale_of_hosts(self) -> float:
        """The same where a host is one worker, and a mean is over hosts."""
        return self.scale * self.ranks_per_host_before / self.own.count

    def part(self, name: Any) -> RankStates:
        """The same of a part of each state."""
        inherited = [[state[name] for state in host] for host in self.inherited]
        return replace(
            self,
            first=self.first[name],
            nearest=self.nearest[name],
            leading=self.leading[name],
            inherited=inherited,
        )

    def of_leaders(self) -> RankStates:
        """Without those of any but the first rank of each host, which has what all ranks of the host have."""
        return replace(self, nearest=self.leading, inherited=[host[:1] for host in self.inherited])

    def owed(self, name: str) -> dict[str, Tensor]:
        """What the inherited hosts owed, as this rank owes it now."""
        whole = total((join([state[name] for state in host]) for host in self.inherited), self.scale)
        return {self.own.name(parameter): self.own.of(vector) for parameter, vector in whole.items()}


def total(parts: Iterable[Mapping[str, Tensor]], scale: float) -> dict[str, Tensor]:
    """The sum by name, times `scale`."""
    result: dict[str, Tensor] = {}
    for part in parts:
        for name, vector in part.items():
            result[name] = result.get(name, 0.0) + vector * scale
    return result
