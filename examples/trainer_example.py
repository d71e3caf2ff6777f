"""Hugging Face Trainer: a callback; its checkpoints hold what each rank still owes.

torchrun --nproc-per-node 2 examples/trainer_example.py
torchrun --nproc-per-node 2 examples/trainer_example.py 60     # to step 60 from the last checkpoint
"""

import sys

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from oktopk.integrations import TransformersCallback


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


def main(steps: int, resume: bool) -> None:
    args = TrainingArguments(
        "runs/trainer-example",
        max_steps=steps,
        logging_steps=10,
        save_steps=30,
        learning_rate=0.01,
        max_grad_norm=0.0,  # norm_clip below clips before gradients are sent
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        report_to=[],
    )
    trainer = Trainer(Regression(), args, train_dataset=Sums())
    callback = TransformersCallback(trainer, density=0.05, warmup_steps=5, norm_clip=10.0)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    record = callback.reducer.last_step
    if trainer.is_world_process_zero():
        print(f"step {record.step + 1} {record.phase}: sent {record.bytes_sent} of {record.dense_bytes} bytes")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 30, resume=bool(sys.argv[1:]))
