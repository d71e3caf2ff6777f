"""Trainings of other frameworks that the tests run on every rank of a real world: straight through, and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import oktopk
from oktopk.integrations import LightningCallback, TransformersCallback, register_accelerate

HALF, STEPS = 4, 8
BATCH, INPUTS = 4, 16
OPTIONS: dict[str, Any] = {"density": 0.1, "min_numel": 0, "warmup_steps": 2, "norm_clip": 5.0}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, 1))


def samples() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(STEPS * 2 * BATCH, INPUTS, generator=torch.Generator().manual_seed(7))
    return inputs, inputs.sin().sum(1, keepdim=True)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    inputs, targets = (part.view(STEPS, 2, BATCH, -1)[step, rank] for part in samples())
    return inputs, targets


def outcome(model: nn.Module, reducer: oktopk.Reducer) -> dict[str, Any]:
    return {
        "weights": [parameter.detach().clone() for parameter in model.parameters()],
        "residuals": reducer.residuals(),
        "step": reducer.step,
        "phase": reducer.last_step.phase,
    }


# -- Accelerate --------------------------------------------------------------------------------------------------


def accelerate(folder: str) -> dict[str, Any]:
    return {
        "straight": _accelerate(Path(folder), 0, STEPS),
        "resumed": _accelerate(Path(folder), HALF, STEPS),
    }


def _accelerate(folder: Path, first: int, last: int) -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    reducer = register_accelerate(accelerator, model, **OPTIONS)
    if first:
        accelerator.load_state(str(folder / f"step-{first}"))
    for step in range(first, last):
        optimizer.zero_grad()
        x, y = batch(step, accelerator.process_index)
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        if step + 1 == HALF and not first:
            accelerator.save_state(str(folder / f"step-{HALF}"))
    ended = outcome(model, reducer)
    reducer.close()
    accelerator.save_state(str(folder / "without"))  # closed: nobody saves a closed reducer
    ended["saved after closing"] = (folder / "without" / "oktopk").exists()
    accelerator.free_memory()
    return ended


# -- Hugging Face Trainer ----------------------------------------------------------------------------------------


class Pairs(Dataset):
    def __init__(self) -> None:
        self.inputs, self.targets = samples()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.inputs[index], "labels": self.targets[index]}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def transformers(folder: str) -> dict[str, Any]:
    """Straight; resumed from a path, and from the last checkpoint; from one without our state; and twice in a row."""
    seen = {"straight": _transformers(folder)}
    seen["resumed"] = _transformers(folder, f"{folder}/checkpoint-{HALF}")
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(f"{folder}/checkpoint-{STEPS}")
    torch.distributed.barrier()
    seen["resumed from the last"] = _transformers(folder, True)
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(f"{folder}/checkpoint-{HALF}/oktopk")
    torch.distributed.barrier()
    seen["resumed without"] = _transformers(folder, f"{folder}/checkpoint-{HALF}", again=True)
    return seen


def _transformers(folder: str, resume: str | bool | None = None, again: bool = False) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        folder, max_steps=STEPS, save_steps=HALF, per_device_train_batch_size=BATCH, learning_rate=0.01,
        use_cpu=True, ddp_find_unused_parameters=False, report_to=[], disable_tqdm=True, max_grad_norm=0.0,
    )  # fmt: skip
    trainer = Trainer(Regression(), args, train_dataset=Pairs())
    callback = TransformersCallback(trainer, **OPTIONS)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    assert callback.reducer is not None
    ended = outcome(trainer.model, callback.reducer)
    if again:
        trainer.train()
        ended["second"] = callback.reducer.step, callback.reducer.last_step.phase
    return ended


# -- Lightning ---------------------------------------------------------------------------------------------------


def lightning(folder: str) -> dict[str, Any]:
    """Straight, keeping the last checkpoint of two; resumed from one, and from one without our state."""
    seen = {"straight": _lightning(folder, None)}
    kept = sorted(path.name for path in Path(folder, "last").iterdir())
    half = f"{folder}/all/step={HALF}.ckpt"
    seen["resumed"] = _lightning(folder, half)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(f"{half}.oktopk")
    torch.distributed.barrier()
    seen["resumed without"] = _lightning(folder, half)
    return seen | {"kept": kept}


def _lightning(folder: str, resume: str | None) -> dict[str, Any]:
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def training_step(self, *_: Any) -> Tensor:
            # By step: Lightning itself begins a resumed epoch with other batches.
            x, y = batch(self.trainer.global_step, self.global_rank)
            return nn.functional.mse_loss(self.layers(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    callback = LightningCallback(**OPTIONS)
    all_of_them = ModelCheckpoint(f"{folder}/all", filename="{step}", every_n_epochs=1, save_top_k=-1)
    last = ModelCheckpoint(f"{folder}/last", filename="{step}", every_n_epochs=1, mode="max")  # another key by mode
    trainer = pl.Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=DDPStrategy(), max_steps=STEPS,
        callbacks=[callback, all_of_them, last], default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=True,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, DataLoader(range(HALF * 2)), ckpt_path=resume)
    assert callback.reducer is not None
    return outcome(module, callback.reducer)
