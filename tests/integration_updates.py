"""Trainings of other frameworks with local steps, on every rank of a real world: straight through, and resumed.

`Watch.seen` is called after every optimizer step, for tests that look at the network meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import oktopk
from integration_cases import BATCH, HALF, STEPS, Pairs, Regression, batch, network
from oktopk.integrations import LightningLocalSteps, TransformersLocalSteps, local_steps_accelerate

OPTIONS: dict[str, Any] = {"algorithm": "oktopk", "density": 0.1, "min_numel": 0, "every": 3}  # saved in an interval


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class Watch:
    """What a training looked like: the weights of evaluations and of saved models, and its end."""

    def __init__(self, seen: Callable[[], None] = lambda: None) -> None:
        self.seen = seen
        self.evaluated: list[Tensor] = []
        self.own: Tensor | None = None  # before the final mean
        self.shared: list[Tensor] = []  # at every step

    def step(self, handle: oktopk.LocalSteps, model: nn.Module) -> None:
        self.seen()
        self.own = flat(model.parameters())
        with handle.shared():
            self.shared.append(flat(model.parameters()))

    def outcome(self, handle: oktopk.LocalSteps, optimizer: Any, saved: Tensor | None) -> dict[str, Any]:
        return {
            "own": self.own, "shared": self.shared, "evaluated": self.evaluated, "saved": saved, "step": handle.step,
            "moments": flat(state["exp_avg_sq"] for state in optimizer.state.values()),
        }  # fmt: skip


def both(run: Callable[[str, bool, Watch], dict[str, Any]], folder: str) -> dict[str, Any]:
    return {"straight": run(folder, False, Watch()), "resumed": run(folder, True, Watch())}


def saved_weights(file: Path) -> Tensor:
    from safetensors.torch import load_file

    names = [name for name, _ in network().named_parameters()]
    state = {name.removeprefix("layers."): tensor for name, tensor in load_file(file).items()}
    return flat(state[name] for name in names)


def accelerate(folder: str, resume: bool, watch: Watch, options: dict[str, Any] = OPTIONS) -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    half = Path(folder) / "half"
    with local_steps_accelerate(accelerator, model, optimizer, **options) as handle:
        if resume:
            accelerator.load_state(str(half))
        for step in range(handle.step, STEPS):
            optimizer.zero_grad()
            x, y = batch(step, accelerator.process_index)
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            watch.step(handle, model)
            if step + 1 == HALF and not resume and folder:
                accelerator.save_state(str(half))
        ended = watch.outcome(
            handle, optimizer.optimizer, saved_weights(half / "model.safetensors") if folder else None
        )
    accelerator.free_memory()
    return ended


def transformers(folder: str, resume: bool, watch: Watch, options: dict[str, Any] = OPTIONS) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watching(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert callback.handle is not None
            watch.step(callback.handle, trainer.model)

    class Evaluating(Regression):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if not self.training:
                watch.evaluated.append(flat(self.parameters()))
            return super().forward(x, labels)

    args = TrainingArguments(
        folder or "unused", max_steps=STEPS, save_strategy="steps" if folder else "no", save_steps=HALF,
        eval_strategy="steps" if folder else "no", eval_steps=HALF, per_device_train_batch_size=BATCH,
        learning_rate=0.01, use_cpu=True, ddp_find_unused_parameters=False, report_to=[], disable_tqdm=True,
        logging_strategy="no", per_device_eval_batch_size=2 * STEPS * BATCH,
    )  # fmt: skip
    trainer = Trainer(Evaluating(), args, train_dataset=Pairs(), eval_dataset=Pairs())
    callback = TransformersLocalSteps(trainer, **options)
    trainer.add_callback(callback)
    trainer.add_callback(Watching())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{HALF}" if resume else None)
    assert callback.handle is not None
    saved = saved_weights(Path(folder) / f"checkpoint-{HALF}" / "model.safetensors") if folder else None
    return watch.outcome(callback.handle, trainer.optimizer.optimizer, saved) | {
        "end": flat(trainer.model.parameters())
    }


def lightning(folder: str, resume: bool, watch: Watch, options: dict[str, Any] = OPTIONS) -> dict[str, Any]:
    import lightning as pl
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def training_step(self, *_: Any) -> Tensor:
            # By step: Lightning itself begins a resumed epoch with other batches.
            x, y = batch(self.trainer.global_step, self.global_rank)
            return nn.functional.mse_loss(self.layers(x), y)

        def validation_step(self, *_: Any) -> None:
            if callback.handle is not None:  # not in the check before training
                watch.evaluated.append(flat(self.parameters()))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Watching(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            assert callback.handle is not None
            watch.step(callback.handle, module)

    callback = LightningLocalSteps(**options)
    keep = [ModelCheckpoint(f"{folder}/all", filename="{step}", every_n_epochs=1, save_top_k=-1)] if folder else []
    trainer = pl.Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=DDPStrategy(), max_steps=STEPS,
        callbacks=[callback, Watching(), *keep], logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=bool(folder), limit_val_batches=1 if folder else 0,
    )  # fmt: skip
    module, half = Module(), f"{folder}/all/step={HALF}.ckpt"
    length = (HALF if folder else STEPS) * 2
    trainer.fit(module, DataLoader(range(length)), DataLoader(range(2)), ckpt_path=half if resume else None)
    saved = flat(torch.load(half)["state_dict"].values()) if folder else None
    assert callback.handle is not None
    optimizer = callback.handle._optimizers[0]
    return watch.outcome(callback.handle, optimizer, saved) | {"end": flat(module.parameters())}


def run_both(folder: str, framework: str) -> dict[str, Any]:
    return both(globals()[framework], folder)
