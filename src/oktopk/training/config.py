"""What a training run is told: one frozen dataclass, the source of flags, help, TOML files and `config.json`.

A field left at None takes its value from the recipe of the workload's preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from oktopk.config import (
    Density,
    MeanOver,
    Optimizer,
    is_rare,
    rate_factor,
    require_density,
    require_share,
    usual_updates,
)
from oktopk.errors import ConfigError
from oktopk.training.devices import DeviceName, Precision
from oktopk.workloads.base import Recipe

_BUCKET_MB, _BUCKET_MB_WITHOUT_OVERLAP = 25.0, 256.0


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    workload: str = "speech"  # what to train: a name from `oktopk train --help`, or module:Class of your own
    preset: str | None = None  # size of the model and its recipe; None: the workload's first
    data: str | None = None  # folder or manifest of the corpus; None: the one that comes with the workload
    workers: int = 1  # processes to start on this machine; ignored under torchrun, mpirun or srun
    device: DeviceName = "auto"  # cpu, or cuda: one GPU for each worker of a host; auto: GPUs where there are any
    precision: Precision = "float32"  # of forward and backward; weights stay float32; float16 scales the loss

    algorithm: str | None = None  # dense, topka, topkdsa, gtopk, gaussiank, randomk, oktopk, auto; None: oktopk, or
    # for updates randomk, or topka if every is 4 or more and the optimizer adamw
    density: float | None = None  # fraction of the gradient each worker sends; smaller = less traffic, later updates
    density_schedule: Mapping[int, float] = field(default_factory=dict)  # {step: density from that step on}; from 0
    warmup_steps: int | None = None  # dense steps before sparse ones
    reduce: Literal["gradients", "updates"] | None = None  # updates: workers (or hosts) step, changes are summed;
    # None: the preset's, or gradients if an algorithm, a density or a warm-up is named
    every: int | Literal["auto"] = 1  # steps between synchronisations of updates; auto: a tenth of the time
    keep_owed: float | bool | None = None  # share of what is owed that weights hold; None: 1; adamw, sgd every 4: 0.25
    mean_over: MeanOver | None = None  # whose number divides sums: all, or senders (topka); None: the preset's
    overlap: bool = False  # let updates travel while the next steps are computed; they arrive one synchronisation later
    wire: str | None = None  # float32, float16, bfloat16, int8, int4, codebook2; None: float32, for updates narrower
    hosts: int | Literal["auto"] = "auto"  # workers of a host, which sum densely first; auto: find out; 1: none do
    min_numel: int = 1024  # parameters smaller than this go dense
    bucket_mb: float | None = None  # gradient reduced at once; larger = fewer messages, less overlap; None: 25, or 256
    # with norm_clip, which must know the whole gradient before any of it is sent
    on_nonfinite: Literal["raise", "skip"] = "raise"  # a NaN gradient: stop, or leave that step out

    momentum_correction: float = 0.0  # momentum applied before sending; then --momentum must be 0 (DGC: 0.9)
    factor_masking: bool = False  # stop the momentum of entries just sent; with momentum_correction
    fold_learning_rate: bool = False  # residuals hold learning rate times gradient, as in the paper

    epochs: int | None = None  # passes over the training set
    max_steps: int | None = None  # stop after this many optimizer steps, whatever the epoch
    batch_size: int | None = None  # samples per worker and micro-batch
    accumulate: int = 1  # micro-batches per optimizer step
    optimizer: Optimizer | None = None  # sgd, adamw or lamb
    lr: float | None = None  # learning rate
    momentum: float | None = None  # of sgd
    weight_decay: float | None = None
    beta2: float | None = None  # of adamw and lamb: larger = longer memory of squared gradients
    lr_decay: float | None = None  # factor on lr after every epoch
    lr_steps: tuple[int, ...] | None = None  # epochs at which lr is divided by 10
    lr_warmup_epochs: float | None = None  # linear rise of lr
    lr_warmup_from: float | None = None  # share of lr it rises from; 1 / workers unless the preset says otherwise
    lr_linear_decay: bool | None = None  # linear fall of lr to zero over the rest of the run
    lr_cosine_to: float | None = None  # share of lr that half a cosine over the rest of the run ends at; 1: none
    norm_clip: float | None = None  # limit of the gradient norm before it is summed over workers (0: none)
    norm_clip_after: float = 0.0  # limit of the gradient norm after it is summed over workers (0: none)
    seed: int = 0  # of initial weights, data order and augmentation
    keep_memory: bool = True  # keep what is freed for the next step: faster; no: give it back, and take less
    deterministic: bool = False  # refuse operations whose result may differ between two runs; slower

    validate_every: int = 5  # validate on epochs 0, n-1, 2n-1, ... and the last; 0: never
    early_stop: int = 0  # stop after this many validations without improvement; 0: never
    checkpoint_every: int = 0  # steps between checkpoints inside an epoch; 0: only at its end
    keep: int = 2  # checkpoints kept besides the best
    analyze_every: int = 0  # steps between analyses of what was selected; each costs a dense all-reduce; 0: never

    runs: Path = Path("runs")  # where run directories are made
    name: str | None = None  # of the run directory; None: workload, preset, algorithm and the time
    resume: Path | None = None  # run directory to continue, from its last checkpoint
    tensorboard: bool = True  # write TensorBoard events into the run directory
    wandb: str | None = None  # Weights & Biases project to report to (needs the extra 'tracking')
    mlflow: str | None = None  # MLflow experiment to report to (needs the extra 'tracking')

    workload_options: Mapping[str, Any] = field(default_factory=dict)  # options of the workload itself
    algorithm_options: Mapping[str, Any] = field(default_factory=dict)  # options of the algorithm itself

    def __post_init__(self) -> None:
        if self.density is not None:
            require_density(self.density)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be {least} or more, got {value}.")
        for name in ("lr_warmup_from", "lr_cosine_to"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {value}: it is a share of lr.")
        if self.beta2 is not None and not 0 <= self.beta2 < 1:
            raise ConfigError(f"beta2 must be in [0, 1), got {self.beta2}: 0.999 remembers about 1,000 steps.")
        if self.every != "auto" and self.every < 1:
            raise ConfigError(f"every must be 1 or more steps, or auto, got {self.every}.")
        if self.keep_owed is not None:
            object.__setattr__(self, "keep_owed", float(self.keep_owed))  # true and 1 are the same
            require_share("keep_owed", self.keep_owed)
        if self.mean_over not in (None, "all", "senders"):
            raise ConfigError(f"mean_over must be 'all' or 'senders', got {self.mean_over!r}.")
        if self.reduce is not None:
            self._check_reduce(self.reduce)
        if self.bucket_mb is not None and self.bucket_mb <= 0:
            raise ConfigError(f"bucket_mb must be above 0, got {self.bucket_mb}.")
        if self.analyze_every and self.norm_clip_after:
            raise ConfigError("analyze_every looks at means as they were reduced, and norm_clip_after changes them.")
        if self.analyze_every and self.precision == "float16":
            raise ConfigError("analyze_every looks at gradients, which float16 scales: use precision bfloat16.")

    def _check_reduce(self, reduce: str) -> None:
        if reduce == "gradients":
            if self.every != 1:
                raise ConfigError(f"every is for --reduce updates, got {self.every}: gradients travel at every step.")
            if self.keep_owed is not None and self.keep_owed != 1:
                raise ConfigError("keep_owed is for --reduce updates: gradients that are owed lie beside weights.")
            if self.mean_over == "senders":
                raise ConfigError("mean_over senders is for --reduce updates: the mean of gradients is over all.")
            if self.overlap:
                raise ConfigError("overlap is for --reduce updates: gradients travel during backward anyway.")
            return
        for name in _ABOUT_GRADIENTS:
            if getattr(self, name):
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is about gradients on their way, and with --reduce updates none travel.")

    @property
    def nonfinite_policy(self) -> Literal["raise", "skip"]:
        """With float16 gradients overflow now and then: that tells the scaler to scale less."""
        return "skip" if self.precision == "float16" else self.on_nonfinite

    def recipe(self, base: Recipe, steppers: int = 1) -> Recipe:
        """The preset's recipe with what the user said in its place, where so many step by themselves.

        In a run of fewer epochs the dense warm-up is shorter too: it would else be all there is.
        """
        reduce = self.reduced(base)
        self._check_reduce(reduce)
        base = (
            self._for_updates(base, steppers) if reduce == "updates" else replace(base, reduce=reduce, mean_over=None)
        )
        said = {f.name: getattr(self, f.name) for f in fields(Recipe) if getattr(self, f.name) is not None}
        if said.get("norm_clip") == 0:
            said["norm_clip"] = None
        epochs = min(said.get("epochs", base.epochs), base.epochs)
        return replace(base, **{"warmup_steps": base.warmup_steps * epochs // max(1, base.epochs)} | said)

    def reduced(self, base: Recipe) -> Literal["gradients", "updates"]:
        """What is reduced: what the preset says, as it was tried. Who names an algorithm, a density or dense steps
        means gradients, as papers do; so does who asks for what only gradients have."""
        chosen = (self.algorithm, self.density, self.warmup_steps)
        about_gradients = any(value is not None for value in chosen)
        about_gradients |= any(getattr(self, name) for name in (*_ABOUT_GRADIENTS, "density_schedule"))
        about_gradients |= bool(self.algorithm_options)  # without a name they are Ok-Topk's
        return self.reduce or ("gradients" if about_gradients else base.reduce)

    def _for_updates(self, base: Recipe, steppers: int) -> Recipe:
        """Updates need no dense steps. Where ranks or hosts step by themselves, AdamW and LAMB want a higher rate, and
        twice the rise of it."""
        optimizer = self.optimizer or base.optimizer
        keeps = base.keep_owed if self.keep_owed is None else self.keep_owed
        is_usual = self.algorithm is None and optimizer == base.optimizer and is_rare(self.every, self.overlap)
        over = self.mean_over or (base.mean_over if is_usual else None)
        usual = usual_updates(optimizer, self.every, self.overlap, self.algorithm, keeps, over)
        base = replace(base, reduce="updates", warmup_steps=0, **asdict(usual))
        factor = rate_factor(optimizer, steppers)
        return replace(base, lr=base.lr * factor, lr_warmup_epochs=base.lr_warmup_epochs * (2 if factor > 1 else 1))

    @property
    def steppers(self) -> int:
        """How many step by themselves if all workers are on this machine."""
        return self.workers // self.hosts if self.hosts != "auto" else self.workers

    def density_over_time(self, recipe: Recipe) -> Density:
        return dict(self.density_schedule) if self.density_schedule else recipe.density

    def bucket_mb_for(self, recipe: Recipe) -> float:
        """What is reduced at once. Clipping leaves no overlap, and then fewer messages are better."""
        return self.bucket_mb or (_BUCKET_MB if recipe.norm_clip is None else _BUCKET_MB_WITHOUT_OVERLAP)

    def resolved(self, recipe: Recipe) -> TrainConfig:
        """The same configuration with every value that the recipe decides written out."""
        decided = {
            "norm_clip": recipe.norm_clip or 0.0,
            "bucket_mb": self.bucket_mb_for(recipe),
            "on_nonfinite": self.nonfinite_policy,
        }
        return replace(self, **asdict(recipe) | decided)

    def to_json(self) -> dict[str, Any]:
        """Plain values, which `as_fields` turns back into those of this class."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


_ABOUT_GRADIENTS = ("momentum_correction", "factor_masking", "fold_learning_rate", "norm_clip_after", "analyze_every")
_LEAST: dict[str, float] = {
    "workers": 1, "warmup_steps": 0, "epochs": 0, "max_steps": 0, "batch_size": 1, "accumulate": 1, "lr": 0,
    "norm_clip": 0, "norm_clip_after": 0, "validate_every": 0, "early_stop": 0, "checkpoint_every": 0, "keep": 1,
    "analyze_every": 0, "min_numel": 0,
}  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
