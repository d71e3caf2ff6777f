"""Whoever changes or moves weights that ranks share is noticed before they are used."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from oktopk.errors import OkTopkError
from oktopk.front_ends.shared_weights import SharedWeights
from oktopk.front_ends.weights import trained_by

_MAKE_ANEW = "Call handle.finish() and handle.close() on every rank, and then local_steps again."


class Watch:
    """Over weights between two steps, and over the parameters that optimizers train."""

    def __init__(self, weights: SharedWeights, optimizers: Sequence[Optimizer]) -> None:
        self._weights, self._optimizers = weights, optimizers
        self.accept()

    def accept(self) -> None:
        """Weights are what a step, a reduction or a state has made them."""
        self._written = self._weights.written()

    def accept_returned(self) -> None:
        """Own weights are back in the model. Who loads weights while the shared ones are lent writes over those."""
        self._written = [] if self._weights.was_written else self._weights.written()

    def refuse_while_lent(self, what: str) -> None:
        if self._weights.is_lent:
            raise OkTopkError(
                f"{what} inside handle.shared(), where the model holds the shared weights: leave the context first."
            )

    def check(self) -> None:
        """Weights are those that were accepted last, and the optimizers train no others."""
        trained = self._weights.trained
        if any(tensor.dtype != vector.dtype for vector in trained for tensor in vector.tensors):
            raise OkTopkError(f"the model's weights were {trained[0].dtype} and are not any more. {_MAKE_ANEW}")
        if self._weights.written() != self._written:
            raise OkTopkError(
                "the weights were changed or moved since the last optimizer.step(), e.g. by load_state_dict: they must "
                "only change in steps, or ranks come apart. Call handle.restart() afterwards, on every rank."
            )
        known = {id(tensor) for vector in trained for tensor in vector.tensors}
        new = sum(id(parameter) not in known for parameter in trained_by(self._optimizers))
        if new:
            raise OkTopkError(
                f"{new} parameters are trained that were not when local_steps was called: a parameter group was added, "
                f"or a layer unfrozen. {_MAKE_ANEW}"
            )
