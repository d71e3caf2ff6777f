"""Hugging Face Trainer: a callback that registers when training begins, and resumes with the Trainer."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from typing_extensions import Unpack

from oktopk.checkpoint import save
from oktopk.front_ends.attached import AttachedReducer
from oktopk.front_ends.ddp import register
from oktopk.front_ends.options import RegisterOptions
from oktopk.integrations.state import FOLDER, load_if_saved


class TransformersCallback(TrainerCallback):
    """Reduces the gradients of a Trainer sparsely: `trainer.add_callback(TransformersCallback(trainer, density=0.01))`.

    Options are those of `oktopk.register`. Each rank's state goes into every checkpoint of the Trainer, which all ranks
    must see, and `trainer.train(resume_from_checkpoint=...)` continues from it. `reducer` is that of the current or
    last training.
    """

    def __init__(self, trainer: Trainer, **options: Unpack[RegisterOptions]) -> None:
        self.reducer: AttachedReducer | None = None
        self._trainer, self._options = trainer, options
        self._resumed_from: Path | None = None
        self._watch_train()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()  # that of a training that an exception ended
        scaler = self._trainer.accelerator.scaler
        self.reducer = register(self._trainer.model_wrapped, scaler=scaler, **self._options)
        if self._resumed_from is not None:
            load_if_saved(self.reducer, self._resumed_from / FOLDER)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Trials of a search have directories of their own, and nobody resumes them.
        if self.reducer is not None and not state.is_hyper_param_search:
            save(self.reducer, Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self.reducer is not None:
            self.reducer.close()

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
