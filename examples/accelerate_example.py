"""Hugging Face Accelerate: register on the prepared model; its checkpoints hold what each rank still owes.

torchrun --nproc-per-node 2 examples/accelerate_example.py      (or: accelerate launch ...; again: it resumes)
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oktopk.integrations import register_accelerate

CHECKPOINT = Path("runs/accelerate-example/last")


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    x = torch.randn(1024, 32)
    data = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), data)
    reducer = register_accelerate(accelerator, model, density=0.05, warmup_steps=5, norm_clip=10.0)
    if CHECKPOINT.exists():
        accelerator.load_state(str(CHECKPOINT))

    for epoch in range(3):
        for inputs, targets in data:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        record = reducer.last_step
        accelerator.print(
            f"epoch {epoch + 1} step {record.step + 1} loss {loss:.3f} {record.phase}, sparsity {record.sparsity:.3f}"
        )
        accelerator.save_state(str(CHECKPOINT))
    reducer.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
