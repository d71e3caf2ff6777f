"""Hugging Face Trainer: callbacks that begin when training does, and resume with the Trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import wraps
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from typing_extensions import Unpack

from oktopk.checkpoint import save
from oktopk.front_ends.attached import AttachedReducer
from oktopk.front_ends.ddp import register
from oktopk.front_ends.local_steps import LocalSteps, local_steps
from oktopk.front_ends.options import LocalStepsOptions, RegisterOptions
from oktopk.integrations.state import FOLDER, Attached, lend, load_if_saved


class _Resuming(TrainerCallback, ABC):
    """Attaches something to a Trainer's model while it trains, and keeps its state in the Trainer's checkpoints."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._attached: Attached | None = None
        self._resumed_from: Path | None = None
        self._watch_train()

    @abstractmethod
    def attach(self) -> Attached:
        """What is attached; called on every rank when training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()  # that of a training that an exception ended
        self._attached = self.attach()
        if self._resumed_from is not None:
            load_if_saved(self._attached, self._resumed_from / FOLDER)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Trials of a search have directories of their own, and nobody resumes them.
        if self._attached is not None and not state.is_hyper_param_search:
            save(self._attached, Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self._attached is not None:
            self._attached.close()

    def _watch_train(self) -> None:
        """Callbacks are not told where a training resumes from, only `train` is."""
        trainer, train = self._trainer, self._trainer.train

        @wraps(train)
        def watched(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            path = resume_from_checkpoint
            if path is True:
                path = get_last_checkpoint(trainer.args.output_dir)
            self._resumed_from = Path(path) if path else None
            return train(resume_from_checkpoint, *args, **kwargs)

        trainer.train = watched


class TransformersCallback(_Resuming):
    """Reduces the gradients of a Trainer sparsely: `trainer.add_callback(TransformersCallback(trainer, density=0.01))`.

    Options are those of `oktopk.register`. Each rank's state goes into every checkpoint of the Trainer, which all ranks
    must see, and `trainer.train(resume_from_checkpoint=...)` continues from it. `reducer` is that of the current or
    last training.
    """

    def __init__(self, trainer: Trainer, **options: Unpack[RegisterOptions]) -> None:
        super().__init__(trainer)
        self.reducer: AttachedReducer | None = None
        self._options = options

    def attach(self) -> AttachedReducer:
        scaler = self._trainer.accelerator.scaler
        self.reducer = register(self._trainer.model_wrapped, scaler=scaler, **self._options)
        return self.reducer


class TransformersLocalSteps(_Resuming):
    """Reduces the updates of a Trainer: `trainer.add_callback(TransformersLocalSteps(trainer))`, made for AdamW.

    Options are those of `oktopk.local_steps`. The Trainer evaluates and saves the weights that all ranks share; each
    rank's own, and its optimizer's state, go into every checkpoint, which all ranks must see, and
    `trainer.train(resume_from_checkpoint=...)` continues from them. At the end all ranks have the same weights.
    `handle` is that of the current or last training.
    """

    def __init__(self, trainer: Trainer, **options: Unpack[LocalStepsOptions]) -> None:
        super().__init__(trainer)
        self.handle: LocalSteps | None = None
        self._options = options

    def attach(self) -> LocalSteps:
        trainer = self._trainer
        scaler = trainer.accelerator.scaler
        self.handle = local_steps(trainer.model_wrapped, trainer.optimizer, scaler=scaler, **self._options)
        lend(self.handle, trainer, "evaluation_loop")
        lend(self.handle, trainer, "save_model")
        return self.handle

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Weights of the best checkpoint are shared ones already, and the same everywhere.
        if self.handle is not None and not (args.load_best_model_at_end and state.best_model_checkpoint):
            self.handle.finish()
        self._close()
