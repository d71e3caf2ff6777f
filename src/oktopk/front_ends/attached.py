"""A reducer that is part of somebody's training loop, and how it leaves."""

from __future__ import annotations

from collections.abc import Callable

from oktopk.reducer import Reducer


class AttachedReducer(Reducer):
    """What a front end returns: closing it also takes its hooks off the model."""

    _detach: Callable[[], None] | None = None

    def on_close(self, detach: Callable[[], None]) -> None:
        """Say how to leave the model."""
        self._detach = detach

    def close(self) -> None:
        """Finish what was submitted, leave the process group and the model. A second call does nothing."""
        detach, self._detach = self._detach, None
        try:
            super().close()
        finally:
            if detach is not None:
                detach()
