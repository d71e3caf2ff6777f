"""What changes over time: dense warm-up, density, and when something is due again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oktopk.config import Density, require_density, require_positive


@dataclass(frozen=True)
class Schedule:
    """Dense or sparse, and how dense, at each step."""

    density: Density
    warmup_steps: int = 0

    def is_warmup(self, step: int) -> bool:
        return step < self.warmup_steps

    def density_at(self, step: int) -> float:
        if not isinstance(self.density, Mapping):
            return float(self.density)
        return float(self.density[max(start for start in self.density if start <= step)])

    def k_at(self, step: int, numel: int) -> int:
        """How many of `numel` entries to keep: at least one."""
        return max(1, round(self.density_at(step) * numel))


def exponential_warmup(final: float, stages: int = 4, steps_per_stage: int = 100) -> dict[int, float]:
    """The density warm-up of Deep Gradient Compression: 25%, 6.25%, 1.5625%, ... down to `final`.

    >>> exponential_warmup(0.001, stages=4, steps_per_stage=500)
    {0: 0.25, 500: 0.0625, 1000: 0.015625, 1500: 0.00390625, 2000: 0.001}
    """
    require_density(final)
    require_positive("stages", stages)
    require_positive("steps_per_stage", steps_per_stage)
    ramp = {stage * steps_per_stage: max(final, 0.25 ** (stage + 1)) for stage in range(stages)}
    return ramp | {stages * steps_per_stage: final}


def is_due(step: int, every: int) -> bool:
    """Whether something done every `every` steps, first at step 0, is due."""
    return step % every == 0
