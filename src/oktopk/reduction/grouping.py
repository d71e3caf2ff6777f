"""Which parameters are reduced together.

Selection is per group, so a resumed run must group as the saved one did. DDP does not: a fresh process begins with one
bucket and re-arranges later. While the old groups fit into what comes, they are used.
"""

from __future__ import annotations

from collections.abc import Iterable

from oktopk.reduction.gradient import Layout


class Grouping:
    """The groups of the latest step, and those of a run that is being resumed."""

    def __init__(self) -> None:
        self._current: dict[str, Layout] = {}
        self._resumed: dict[str, Layout] = {}
        self._groups: dict[Layout, list[Layout]] = {}  # bucket -> its groups, for buckets in use

    def split(self, layout: Layout) -> list[Layout]:
        """The groups that a bucket is to be reduced in: those of the resumed run if they make up the bucket exactly."""
        if layout not in self._groups:
            names = {name for name, _ in layout}
            kept = {bucket: groups for bucket, groups in self._groups.items() if names.isdisjoint(dict(bucket))}
            self._groups = {**kept, layout: self._group(layout)}
        return self._groups[layout]

    def _group(self, layout: Layout) -> list[Layout]:
        old = dict.fromkeys(self._resumed[name] for name, _ in layout if name in self._resumed)
        groups = [group for group in self.resumed if group in old]
        if sorted(pair for group in groups for pair in group) != sorted(layout):
            for name in {name for group in groups for name, _ in group}:
                del self._resumed[name]
            groups = [layout]
        for group in groups:
            self._current |= dict.fromkeys((name for name, _ in group), group)
        return groups

    @property
    def current(self) -> list[Layout]:
        """In the order they were first used."""
        return list(dict.fromkeys(self._current.values()))

    @property
    def resumed(self) -> list[Layout]:
        return list(dict.fromkeys(self._resumed.values()))

    def resume(self, groups: Iterable[Iterable[tuple[str, int]]]) -> None:
        """Group as a saved run did."""
        saved = [tuple((str(name), int(numel)) for name, numel in group) for group in groups]
        self._resumed = {name: group for group in saved for name, _ in group}
        self._current = dict(self._resumed)
        self._groups = {}
