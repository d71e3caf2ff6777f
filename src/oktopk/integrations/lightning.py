"""Lightning: a callback that registers when training starts, and resumes with the Trainer's checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from typing_extensions import Unpack

from oktopk.checkpoint import save
from oktopk.front_ends.attached import AttachedReducer
from oktopk.front_ends.ddp import register
from oktopk.front_ends.options import RegisterOptions
from oktopk.integrations.state import beside, load_if_saved


class LightningCallback(Callback):
    """Reduces the gradients of a DDP strategy sparsely: `Trainer(callbacks=[LightningCallback(density=0.01)])`.

    Options are those of `oktopk.register`. Beside every checkpoint `name.ckpt` lies a directory `name.ckpt.oktopk` with
    each rank's state; `fit(ckpt_path=...)` continues from it, and it is removed with its checkpoint. `reducer` is that
    of the current or last training.
    """

    def __init__(self, **options: Unpack[RegisterOptions]) -> None:
        self.reducer: AttachedReducer | None = None
        self._options = options

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._close()  # that of a training that an exception ended
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.reducer = register(trainer.strategy.model, scaler=scaler, **self._options)
        self._watch(trainer.strategy, self.reducer)
        if trainer.ckpt_path:
            load_if_saved(self.reducer, beside(trainer.ckpt_path))

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self._close()  # not at the end of training: checkpoints are still written then

    def _close(self) -> None:
        if self.reducer is not None:
            self.reducer.close()

    def _watch(self, strategy: Strategy, reducer: AttachedReducer) -> None:
        """Callbacks are not told where a checkpoint goes, only the strategy is, on every rank."""
        write, remove = strategy.save_checkpoint, strategy.remove_checkpoint

        def write_all(checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
            write(checkpoint, filepath, storage_options=storage_options)
            if "optimizer_states" in checkpoint:  # not when weights alone are saved
                save(reducer, beside(filepath))

        def remove_all(filepath: str | Path) -> None:
            remove(filepath)
            if strategy.is_global_zero:
                shutil.rmtree(beside(filepath), ignore_errors=True)

        def restore() -> None:
            strategy.save_checkpoint, strategy.remove_checkpoint = write, remove

        strategy.save_checkpoint, strategy.remove_checkpoint = write_all, remove_all
        reducer.on_close(restore)
