"""A measured number beside what it must and should reach."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from oktopk.bench.host import describe_machine


@dataclass(frozen=True)
class Measurement:
    """One number and its targets. Without targets it only informs."""

    key: str  # in JSON
    text: str  # for people
    measured: float
    must: float | None = None
    aim: float | None = None
    higher: bool = False  # larger is better

    @property
    def ok(self) -> bool:
        """Whether it reaches what it must."""
        return self._reaches(self.must)

    @property
    def reaches_aim(self) -> bool:
        return self._reaches(self.aim)

    def without_targets(self) -> Measurement:
        return replace(self, must=None, aim=None)

    def to_json(self) -> dict[str, Any]:
        record = {"measured": self.measured, "must": self.must, "aim": self.aim}
        return {name: value for name, value in record.items() if value is not None} | {"ok": self.ok}

    @property
    def sign(self) -> str:
        """How it compares with a target that it reaches."""
        return ">=" if self.higher else "<="

    def _reaches(self, target: float | None) -> bool:
        return target is None or (self.measured >= target if self.higher else self.measured <= target)


@dataclass(frozen=True)
class Measurements:
    """What a benchmark within one process found."""

    numel: int
    figures: list[Measurement]

    @property
    def ok(self) -> bool:
        return all(figure.ok for figure in self.figures)

    def to_json(self) -> dict[str, Any]:
        figures = {figure.key: figure.to_json() for figure in self.figures}
        return {"numel": self.numel, "figures": figures, "machine": describe_machine()}
