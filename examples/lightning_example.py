"""Lightning: a callback that registers on the strategy's DDP module. Works on CPU too, unlike `ddp_comm_hook`.

torchrun --nproc-per-node 2 examples/lightning_example.py
"""

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import oktopk


class Compress(lightning.Callback):
    """Reduces gradients sparsely, and logs what was sent."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.reducer = oktopk.register(trainer.strategy.model, **self.options)

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        # Lightning keeps callback state of rank 0 only; this keeps every rank's.
        oktopk.save(self.reducer, f"{trainer.default_root_dir}/reducer")
        record = self.reducer.last_step
        if trainer.is_global_zero:
            print(f"step {record.step + 1} {record.phase}: sent {record.bytes_sent} of {record.dense_bytes} bytes")
        self.reducer.close()


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    lightning.seed_everything(0)
    x = torch.randn(1024, 32)
    data = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=32)
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DDPStrategy(),
        max_epochs=2,
        callbacks=[Compress(density=0.05, warmup_steps=5)],
        default_root_dir="runs/lightning-example",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), data)


if __name__ == "__main__":
    main()
