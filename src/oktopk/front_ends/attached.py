"""A reducer that is part of somebody's training loop, and how it leaves."""

from __future__ import annotations

from collections.abc import Callable

from oktopk.reducer import Reducer


class AttachedReducer(Reducer):
    """What a front end returns: closing it also takes its hooks off the model."""

    def on_close(self, detach: Callable[[], object]) -> None:
        """Say what else closing must undo; the latest is undone first."""
        vars(self).setdefault("_detach", []).append(detach)

    def close(self) -> None:
        """Finish what was submitted, leave the process group and the model. A second call does nothing."""
        detach: list[Callable[[], object]] = vars(self).pop("_detach", [])
        try:
            super().close()
        finally:
            for undo in reversed(detach):
                undo()
