"""Lightning: callbacks that begin when training starts, and resume with the Trainer's checkpoints."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import Unpack

from oktopk.checkpoint import save
from oktopk.front_ends.attached import AttachedReducer
from oktopk.front_ends.ddp import register
from oktopk.front_ends.local_steps import LocalSteps, local_steps
from oktopk.front_ends.options import LocalStepsOptions, RegisterOptions
from oktopk.integrations.state import Attached, beside, copied, load_if_saved


class _Resuming(Callback, ABC):
    """Attaches something to the model while it trains, and keeps its state beside the Trainer's checkpoints."""

    def __init__(self) -> None:
        self._attached: Attached | None = None

    @abstractmethod
    def attach(self, trainer: Trainer, scaler: Any) -> Attached:
        """What is attached; called on every rank when training begins."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._close()  # that of a training that an exception ended
        self._attached = self.attach(trainer, getattr(trainer.precision_plugin, "scaler", None))
        _watch(trainer.strategy, self._attached)
        if trainer.ckpt_path:
            load_if_saved(self._attached, beside(trainer.ckpt_path))

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self._close()  # not at the end of training: checkpoints are still written then

    def _close(self) -> None:
        if self._attached is not None:
            self._attached.close()


class LightningCallback(_Resuming):
    """Reduces the gradients of a DDP strategy sparsely: `Trainer(callbacks=[LightningCallback(density=0.01)])`.

    Options are those of `oktopk.register`. Beside every checkpoint `name.ckpt` lies a directory `name.ckpt.oktopk` with
    each rank's state; `fit(ckpt_path=...)` continues from it, and it is removed with its checkpoint. `reducer` is that
    of the current or last training.
    """

    def __init__(self, **options: Unpack[RegisterOptions]) -> None:
        super().__init__()
        self.reducer: AttachedReducer | None = None
        self._options = options

    def attach(self, trainer: Trainer, scaler: Any) -> AttachedReducer:
        self.reducer = register(trainer.strategy.model, scaler=scaler, **self._options)
        return self.reducer


class LightningLocalSteps(_Resuming):
    """Reduces the updates of a DDP strategy: `Trainer(callbacks=[LightningLocalSteps()])`, made for AdamW.

    Options are those of `oktopk.local_steps`. Validation and checkpoints see the weights that all ranks share; beside
    every checkpoint `name.ckpt` lies a directory `name.ckpt.oktopk` with each rank's own and its optimizer's state.
    `fit(ckpt_path=...)` continues from it, and it is removed with its checkpoint. At the end all ranks have the same
    weights. `handle` is that of the current or last training.
    """

    def __init__(self, **options: Unpack[LocalStepsOptions]) -> None:
        super().__init__()
        self.handle: LocalSteps | None = None
        self._options = options
        self._lent = ExitStack()

    def attach(self, trainer: Trainer, scaler: Any) -> LocalSteps:
        strategy = trainer.strategy
        self.handle = handle = local_steps(strategy.model, trainer.optimizers, scaler=scaler, **self._options)
        state = strategy.lightning_module_state_dict

        def shared_state() -> dict[str, Any]:
            with handle.shared():
                return copied(state())

        def restore() -> None:
            strategy.lightning_module_state_dict = state

        strategy.lightning_module_state_dict = shared_state
        handle.on_close(restore)
        return handle

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        is_training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if self.handle is not None and is_training:
            self._lent.enter_context(self.handle.shared())

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._lent.close()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._lent.close()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        assert self.handle is not None
        self.handle.finish()


def _watch(strategy: Strategy, attached: Attached) -> None:
    """Callbacks are not told where a checkpoint goes, only the strategy is, on every rank."""
    write, remove = strategy.save_checkpoint, strategy.remove_checkpoint

    def write_all(checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        write(checkpoint, filepath, storage_options=storage_options)
        if "optimizer_states" in checkpoint:  # not when weights alone are saved
            save(attached, beside(filepath))

    def remove_all(filepath: str | Path) -> None:
        remove(filepath)
        if strategy.is_global_zero:
            shutil.rmtree(beside(filepath), ignore_errors=True)

    def restore() -> None:
        strategy.save_checkpoint, strategy.remove_checkpoint = write, remove

    strategy.save_checkpoint, strategy.remove_checkpoint = write_all, remove_all
    attached.on_close(restore)
