"""Lightning: a callback; what ranks still owe lies beside every checkpoint. Works on the CPU, unlike `ddp_comm_hook`.

torchrun --nproc-per-node 2 examples/lightning_example.py
torchrun --nproc-per-node 2 examples/lightning_example.py 4     # to the end of epoch 4 from the last checkpoint
"""

import os
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oktopk.integrations import LightningCallback


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main(epochs: int, resume: bool) -> None:
    lightning.seed_everything(0)
    x = torch.randn(1024, 32)
    data = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=32)
    callback = LightningCallback(density=0.05, warmup_steps=5, norm_clip=10.0)
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DDPStrategy(),
        max_epochs=epochs,
        callbacks=[callback, ModelCheckpoint("runs/lightning-example", save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), data, ckpt_path="last" if resume else None)
    record = callback.reducer.last_step
    if trainer.is_global_zero:
        print(f"step {record.step + 1} {record.phase}: sent {record.bytes_sent} of {record.dense_bytes} bytes")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 2, resume=bool(sys.argv[1:]))
