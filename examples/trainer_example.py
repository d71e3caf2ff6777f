"""Hugging Face Trainer: a callback that registers on the wrapped model when training begins.

torchrun --nproc-per-node 2 examples/trainer_example.py
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import oktopk


class Compress(TrainerCallback):
    """Reduces the trainer's gradients sparsely, and keeps residuals beside its checkpoints."""

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self.trainer, self.options = trainer, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.reducer = oktopk.register(self.trainer.model_wrapped, **self.options)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        oktopk.save(self.reducer, f"{args.output_dir}/checkpoint-{state.global_step}/reducer")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        record = self.reducer.last_step
        if state.is_world_process_zero:
            print(f"step {record.step + 1} {record.phase}: sent {record.bytes_sent} of {record.dense_bytes} bytes")
        self.reducer.close()


class Sums(Dataset):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(32, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sin().sum(0, keepdim=True)}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def main() -> None:
    args = TrainingArguments(
        "runs/trainer-example",
        max_steps=30,
        logging_steps=10,
        save_steps=30,
        learning_rate=0.01,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        report_to=[],
    )
    trainer = Trainer(Regression(), args, train_dataset=Sums())
    trainer.add_callback(Compress(trainer, density=0.05, warmup_steps=5))
    trainer.train()


if __name__ == "__main__":
    main()
