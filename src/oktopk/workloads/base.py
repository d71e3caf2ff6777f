"""What the trainer knows of a workload, and nothing more.

A workload is one folder with `data.py`, `model.py` and `workload.py`. It never touches torch.distributed: it is told
its rank and world size, and hands back sums that the trainer adds up over ranks.

The trainer makes it as `Class(config, seed)`. `config` is a frozen dataclass with at least the fields `preset`, `data`
and `batch_size` (None: the recipe's), each field with an annotation, a default and a comment: they become flags of
`oktopk train` by themselves.
A class whose constructor also has a parameter `progress` is given a callback `(done, total)` for the time it prepares
data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from oktopk.config import MeanOver, Optimizer


@dataclass(frozen=True)
class Metric:
    """The number a workload is judged by."""

    name: str  # as printed, in JSON and in plots: "WER", "accuracy", "perplexity"
    lower_is_better: bool


@dataclass(frozen=True)
class Recipe:
    """How a preset is trained unless the user says otherwise."""

    optimizer: Optimizer = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    beta2: float = 0.999  # of adamw and lamb: larger = longer memory of squared gradients
    batch_size: int = 8  # per rank
    epochs: int = 10
    lr_decay: float = 1.0  # factor per epoch
    lr_steps: tuple[int, ...] = ()  # epochs at which lr is divided by 10
    lr_warmup_epochs: float = 0.0  # linear rise
    lr_warmup_from: float | None = None  # share of lr it starts from; None: 1 / world_size
    lr_linear_decay: bool = False  # linear to zero over the whole run after warm-up
    lr_cosine_to: float = 1.0  # share of lr that half a cosine over the run after warm-up ends at; 1: none
    norm_clip: float | None = None  # gradient norm limit before synchronisation
    density: float = 0.01
    warmup_steps: int = 0  # dense steps
    reduce: Literal["gradients", "updates"] = "gradients"  # updates: density, warm-up, wire and rate follow from it
    algorithm: str = "oktopk"
    wire: str = "float32"
    keep_owed: float | None = None  # of updates: share of what is owed that own weights contain; None: by how often
    mean_over: MeanOver | None = None  # of updates that travel every 4 steps or more rarely: whose number divides sums


class Workload(Protocol):
    """Model, batches, loss and evaluation behind one protocol."""

    name: str
    preset: str
    metric: Metric
    recipe: Recipe
    notices: tuple[str, ...]  # what a person should read before training starts, e.g. how many files were skipped

    def model(self) -> nn.Module:
        """A freshly initialised model (the trainer seeds torch before, and broadcasts rank 0's weights after)."""
        ...

    def steps_per_epoch(self, world_size: int) -> int:
        """Batches per rank and epoch: the same on every rank."""
        ...

    def batches(self, epoch: int, rank: int, world_size: int, start: int = 0) -> Iterator[Any]:
        """This rank's batches of one epoch from number `start` on; the order depends on the seed and epoch only."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss of a batch, ready for backward. The tensors of the batch are on the model's device.

        The trainer puts them there if the batch is a tensor, a dataclass, a tuple, a list or a mapping of them.
        """
        ...

    def evaluate(self, model: nn.Module, rank: int, world_size: int) -> dict[str, float]:
        """Sums over this rank's share of the validation set; the trainer adds them up over ranks.

        `model` is the bare module, not a wrapper that would communicate: shares may differ in length. Its weights and
        buffers are the same on every rank; inputs must go to their device. Afterwards it is back in the mode (train or
        eval) it came in.
        """
        ...

    def summarize(self, totals: Mapping[str, float]) -> dict[str, float]:
        """'loss', the metric under its name, and others, from summed totals; what has no data is left out."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides model and epoch (a carried hidden state, say)."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
