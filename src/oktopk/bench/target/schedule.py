"""Which kind a step of a training is: dense, local, with an exchange, with an outer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

DENSE, LOCAL, EXCHANGE, OUTER, FINAL = "dense", "local", "exchange", "outer", "final"
WHOLE = 1 << 60  # a dense start that never ends


@dataclass(frozen=True)
class Schedule:
    """When ranks of a contender do what. The kind of a step depends on its number only."""

    start: int = 0  # dense steps before all others
    every: int = 1  # steps from one exchange to the next; those between are local
    outer: int = 0  # steps from one outer step to the next, which is also an exchange; 0: there are none
    levels: bool = False  # after an exchange ranks need nobody to end with the same weights

    def kind(self, step: int) -> str:
        """Of step number `step`, from 0."""
        if step < self.start:
            return DENSE
        if self.outer and (step + 1) % self.outer == 0:
            return OUTER
        return LOCAL if (step + 1) % self.every else EXCHANGE

    def is_level(self, steps: int) -> bool:
        """Whether nothing has to travel to end a training after so many steps."""
        kind = self.kind(steps - 1) if steps else OUTER
        return kind == OUTER or (self.levels and kind == EXCHANGE)

    def counts(self, steps: int) -> Mapping[str, int]:
        """How many of the first steps are of each kind."""
        return Counter(self.kind(step) for step in range(steps))

    @property
    def cycle(self) -> int:
        """Steps after which kinds come again, once the dense start is over."""
        return max(self.every, self.outer)

    def brief(self, dense_steps: int, cycle: int) -> Schedule:
        """Of the same kinds, but soon: for measuring what a step of each takes."""
        start = self.start if self.start == WHOLE else min(self.start, dense_steps)
        return replace(self, start=start, every=min(self.every, cycle), outer=min(self.outer, cycle))
