"""How the ranks of a run stay together: by reducing gradients before a step, or updates after it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from oktopk.checkpoint import Saveable
from oktopk.front_ends.local_steps import local_steps
from oktopk.front_ends.optimizer import DistributedOptimizer
from oktopk.metrics import Sink, StepRecord
from oktopk.reducer import Reducer
from oktopk.training.config import TrainConfig
from oktopk.workloads.base import Recipe


class Synchronisation(Protocol):
    """What the trainer does with gradients, an optimizer and weights."""

    @property
    def reducer(self) -> Reducer: ...

    @property
    def saveable(self) -> Saveable:
        """What `oktopk.save` and `load` write and read."""
        ...

    sends_every_step: bool  # what the other ranks do next is always a reduction
    lends: bool  # the model holds the weights that all have in common only inside `shared`

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def scaler(self) -> GradScaler | None: ...

    def zero_grad(self) -> None: ...

    def backward(self, loss: Tensor) -> None:
        """Of a loss that is scaled, if there is a scaler."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this context only accumulate."""
        ...

    def synchronize(self) -> None:
        """Gradients are complete: bring them together, if it is gradients that are reduced."""
        ...

    def step(self) -> None:
        """Step the optimizer, unless this step is to be skipped; bring updates together, if they are due."""
        ...

    @property
    def completed(self) -> StepRecord | None:
        """The record of what was brought together in the last step, if anything was."""
        ...

    @property
    def notified(self) -> int:
        """The greatest number that any rank has told by `reducer.notify`; between two steps the same on all."""
        ...

    def wait(self) -> None:
        """Until nothing travels any more: then there is a record of every step."""
        ...

    def shared(self) -> AbstractContextManager[None]:
        """Inside, the model holds the weights that all ranks have in common."""
        ...

    def finish(self) -> None:
        """The last step is done: all ranks end with the same weights."""
        ...

    def shared_state(self) -> Mapping[str, Any]:
        """The optimizer's state, if all ranks have the same."""
        ...

    def load_shared_state(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class _Stepping:
    """What both kinds take from their optimizer."""

    _optimizer: Optimizer
    scaler: GradScaler | None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _step_scaled(self, scaler: GradScaler) -> None:
        """Step on gradients as they are without their scale, unless they have overflowed."""
        scaler.step(self._optimizer)
        scaler.update()


class ReduceGradients(_Stepping):
    """Every rank takes the same step on the mean of all gradients."""

    sends_every_step, lends = True, False

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        optimizer: Optimizer,
        model: nn.Module,
        sink: Sink,
        scaler: GradScaler | None,
    ) -> None:
        self.scaler = scaler
        self._optimizer: DistributedOptimizer = DistributedOptimizer(
            optimizer,
            model,
            recipe.algorithm,
            config.density_over_time(recipe),
            warmup_steps=recipe.warmup_steps,
            norm_clip=recipe.norm_clip or None,
            norm_clip_after=config.norm_clip_after or None,
            bucket_mb=config.bucket_mb_for(recipe),
            scaler=scaler,
            wire=recipe.wire,
            hosts=config.hosts,
            metrics=sink,
            min_numel=config.min_numel,
            on_nonfinite=config.nonfinite_policy,
            momentum_correction=config.momentum_correction,
            factor_masking=config.factor_masking,
            fold_learning_rate=config.fold_learning_rate,
            keep_memory=config.keep_memory,
            **config.algorithm_options,
        )
        self.reducer: Reducer = self._optimizer.reducer
        self.saveable: Saveable = self.reducer

    def no_sync(self) -> AbstractContextManager[None]:
        return self._optimizer.no_sync()

    def synchronize(self) -> None:
        self._optimizer.synchronize()

    def step(self) -> None:
        if self.scaler is not None:
            self._step_scaled(self.scaler)
        elif not self.reducer.last_step.skipped:
            self._optimizer.step()

    @property
    def completed(self) -> StepRecord | None:
        return self.reducer.last_step

    @property
    def notified(self) -> int:
        return self.reducer.notified

    def wait(self) -> None:
        """There is nothing to wait for: a step ends when its gradients are there."""

    def shared(self) -> AbstractContextManager[None]:
        return nullcontext()  # weights are the same everywhere

    def finish(self) -> None:
        """There is nothing left to do: every step ended with the same weights."""

    def shared_state(self) -> Mapping[str, Any]:
        return self._optimizer.state_dict()

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(dict(state))

    def close(self) -> None:
        self._optimizer.close()


class ReduceUpdates(_Stepping):
    """Every rank, or host, takes its own steps on its own gradients, and the change of weights is reduced."""

    sends_every_step = False  # not between synchronisations
    lends = True

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        optimizer: Optimizer,
        model: nn.Module,
        sink: Sink,
        scaler: GradScaler | None,
    ) -> None:
        self.scaler = scaler
        self._optimizer, self._model, self._norm_clip = optimizer, model, recipe.norm_clip
        self._handle = local_steps(
            model,
            optimizer,
            config.density_over_time(recipe),
            recipe.wire,
            config.every,
            algorithm=recipe.algorithm,
            keep_owed=recipe.keep_owed,
            mean_over=recipe.mean_over,
            overlap=config.overlap,
            scaler=scaler,
            hosts=config.hosts,
            warmup_steps=recipe.warmup_steps,
            metrics=sink,
            min_numel=config.min_numel,
            on_nonfinite=config.nonfinite_policy,
            **config.algorithm_options,
        )
        self.reducer: Reducer = self._handle.reducer
        self.saveable: Saveable = self._handle

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()  # gradients stay where they are

    def synchronize(self) -> None:
        """Gradients are this rank's own, or the mean of its host's, and so is their limit."""
        self._handle.average_gradients()
        if self._norm_clip:
            if self.scaler is not None:
                self.scaler.unscale_(self._optimizer)
            clip_grad_norm_(self._model.parameters(), self._norm_clip)

    def step(self) -> None:
        if self.scaler is not None:
            self._step_scaled(self.scaler)
        else:
            self._optimizer.step()

    @property
    def completed(self) -> StepRecord | None:
        return self._handle.completed

    @property
    def notified(self) -> int:
        return self._handle.notified

    def wait(self) -> None:
        self._handle.wait()

    def shared(self) -> AbstractContextManager[None]:
        return self._handle.shared()

    def finish(self) -> None:
        self._handle.finish()

    def shared_state(self) -> Mapping[str, Any]:
        return {}  # every rank's optimizer is its own, and saved with its weights

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """See `shared_state`."""

    def close(self) -> None:
        self._handle.close()


def make_synchronisation(
    config: TrainConfig,
    recipe: Recipe,
    optimizer: Optimizer,
    model: nn.Module,
    sink: Sink,
    scaler: GradScaler | None = None,
) -> Synchronisation:
    """As the configuration says; every rank starts from the weights of rank 0."""
    kind = ReduceUpdates if recipe.reduce == "updates" else ReduceGradients
    return kind(config, recipe, optimizer, model, sink, scaler)
