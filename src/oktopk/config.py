"""Configuration: one frozen dataclass per algorithm, and the paper's presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from typing_extensions import TypedDict

from oktopk.errors import ConfigError, nearest

Density = float | Mapping[int, float]  # a constant, or {step: density from that step on}
Optimizer = Literal["sgd", "adamw", "lamb"]  # of a preset, and of advice
MeanOver = Literal["all", "senders"]  # whose number divides the sum of an entry
AUTO = "auto"  # in the place of an algorithm or a wire: found by trying
WIRES = ("float32", "float16", "bfloat16", "int8", "int4", "codebook2")  # the finest first


@dataclass(frozen=True)
class UpdateDefaults:
    """How to reduce updates."""

    algorithm: str
    density: float
    wire: str
    keep_owed: float = 1.0
    mean_over: MeanOver = "all"


UPDATES_ALGORITHM = "randomk"  # of updates: at equal bytes, each entry in its turn beats the largest
RARE_ALGORITHM = "topka"  # of updates that travel rarely: what each rank changed most, without a cut of the sums
RARELY = 4  # steps between synchronisations, or more
KEPT_RARELY = 0.25  # share of what is owed that own weights contain then
FORGETFUL = ("adamw", "sgd")  # optimizers under which that was found to be better than to keep all


def update_defaults(algorithm: str | None = None, rarely: bool = False) -> UpdateDefaults:
    """How updates are reduced by an algorithm, or by the usual one, unless the user says otherwise.

    `rarely`: whether ranks step RARELY times or more on their own, under Adam, AdamW or SGD. It is better then if they
    go on from nearly the same weights, and send what they changed most.
    """
    name = algorithm or (RARE_ALGORITHM if rarely else UPDATES_ALGORITHM)
    if name == "dense":
        return UpdateDefaults(name, 1.0, "float32")
    if name == "randomk":
        return UpdateDefaults(name, 0.3, "codebook2")
    return UpdateDefaults(name, 0.06, "codebook2", KEPT_RARELY) if rarely else UpdateDefaults(name, 0.05, "int8")


def usual_updates(
    optimizer: Optimizer | None,
    every: object = 1,
    overlap: bool = False,
    algorithm: str | None = None,
    keep_owed: float | None = None,
    mean_over: MeanOver | None = None,
) -> UpdateDefaults:
    """How updates of an optimizer are reduced where not all was said; `optimizer` None: any other."""
    is_over_senders = mean_over == "senders"
    is_seldom = is_rare(every, overlap) and (optimizer in FORGETFUL or is_over_senders)
    rarely = is_seldom if keep_owed is None else keep_owed < 1
    if is_over_senders and algorithm is None:  # tried with few bits and nothing else
        usual = UpdateDefaults(RARE_ALGORITHM, 0.06, "codebook2", KEPT_RARELY if rarely else 1.0)
    else:
        usual = update_defaults(algorithm, rarely)
    usual = usual if keep_owed is None else replace(usual, keep_owed=keep_owed)
    return replace(usual, mean_over=mean_over or "all")


def is_rare(every: object, overlap: bool) -> bool:
    """Whether ranks step so often by themselves that they had better go on from nearly the same weights."""
    return isinstance(every, int) and every >= RARELY and not overlap


def rate_factor(optimizer: Optimizer, workers: int) -> float:
    """What to multiply the best learning rate of dense with where `workers` step by themselves.

    Steps of AdamW and LAMB are as long however noisy their gradients are. The noise cancels in the mean of several
    workers' steps, which is shorter for it than a step on the mean of their gradients.
    """
    return 1.0 if optimizer == "sgd" else workers**0.5


@dataclass(frozen=True)
class DenseConfig:
    """Plain all-reduce: the baseline, and what warm-up uses."""


@dataclass(frozen=True)
class TopkAConfig:
    """Exact top k of each rank, gathered by all."""

    global_cut: bool = False  # keep only the k largest sums after the gather; fewer updates, same volume


@dataclass(frozen=True)
class TopkDSAConfig:
    """Exact top k, summed by the owner of each equal region, the union gathered."""

    in_flight: int = 4  # peers served at once; larger = fewer waits, more congestion at one receiver


@dataclass(frozen=True)
class GTopkConfig:
    """Exact top k merged along a binary tree that keeps k at every node."""


@dataclass(frozen=True)
class GaussianKConfig:
    """Threshold from mean and standard deviation as if the gradient were normal."""

    split_and_reduce: bool = False  # sum in regions as topkdsa does; less volume when ranks choose alike
    corrections: int = 4  # passes that move the threshold towards k; more = closer, each costs one scan
    tolerance: float = 1 / 3  # accept k(1 - tolerance) .. k(1 + tolerance); smaller = closer, more passes
    in_flight: int = 4  # peers served at once, with split_and_reduce


@dataclass(frozen=True)
class RandomKConfig:
    """Coordinates drawn from a seed that all ranks share: nothing is selected, and no index travels."""

    order: Literal["turn", "random"] = "turn"  # turn: each entry once in 1/density steps; random: some wait far longer
    block: int = 16  # neighbours that are drawn together; larger = less work, coarser (16: a line of the cache)
    draw_seed: int = 0  # another seed draws others; the same on all ranks

    def __post_init__(self) -> None:
        if self.order not in ("turn", "random"):
            raise ConfigError(f"order must be 'turn' or 'random', got {self.order!r}.")
        require_positive("block", self.block)


@dataclass(frozen=True)
class OkTopkConfig:
    """Ok-Topk (Li and Hoefler, PPoPP'22)."""

    threshold: Literal["fresh", "reused"] = "fresh"  # fresh: exact every step; reused: the paper's periods and nudges
    reestimate_every: int = 32  # steps between exact thresholds when reused; larger = cheaper, staler (paper: 32, 128)
    repartition_every: int = 1  # steps between new regions; larger = less even (paper: 64)
    local_nudge: float = 1.012  # factor on a reused local threshold; larger = faster, rougher (paper: 1.012, 1.025)
    local_keep: tuple[float, float] = (3 / 4, 5 / 4)  # leave it alone inside these multiples of k (paper: 2/3..4/5)
    global_nudge_up: float = 1.008  # factor when too many survive (paper: 1.008, 1.025)
    global_nudge_down: float = 1.01  # divisor when too few survive (paper: 1.008 to 1.036)
    global_keep: tuple[float, float] = (3 / 4, 5 / 4)  # as local_keep, for survivors
    cap: float = 1.5  # exact threshold at once when more than cap * k are chosen; 1.5 keeps 6k on every step
    balance_factor: float = 2.0  # even blocks out when the largest exceeds this multiple of the mean (paper: 4)
    in_flight: int = 4  # peers served at once; larger = fewer waits, more congestion at one receiver
    in_turn: float = 0.0  # share of k that is no choice: each entry comes once in 1/(density * in_turn) steps at least

    def __post_init__(self) -> None:
        if self.threshold not in ("fresh", "reused"):
            raise ConfigError(f"threshold must be 'fresh' or 'reused', got {self.threshold!r}.")
        for name in ("reestimate_every", "repartition_every", "in_flight"):
            require_positive(name, getattr(self, name))
        if not self.cap > 1.0:
            raise ConfigError(f"cap must be above 1, got {self.cap}: it is a multiple of k, e.g. 1.5.")
        if not self.balance_factor >= 1.0:
            raise ConfigError(f"balance_factor must be at least 1, got {self.balance_factor}.")
        if not 0.0 <= self.in_turn < 1.0:
            raise ConfigError(
                f"in_turn must be in [0, 1), got {self.in_turn}: it is a share of k, e.g. 0.1; "
                "for all of it in turn use algorithm='randomk'."
            )


@dataclass(frozen=True)
class ReducerConfig:
    """What every algorithm shares."""

    density: Density = 0.01  # fraction of the gradient each rank sends; smaller = less traffic, later updates
    warmup_steps: int = 0  # dense steps before sparse ones (paper: 128 LSTM, 512 VGG, 0 BERT)
    wire: str = "float32"  # how values travel: one of WIRES, narrower = less traffic; rounding stays owed; or "auto"
    min_numel: int = 1024  # tensors smaller than this go dense: latency, not volume, is their cost
    on_nonfinite: Literal["raise", "skip"] = "raise"  # skip: return a non-finite gradient, leave residuals alone
    momentum_correction: float = 0.0  # momentum applied before sending; then the optimizer's must be 0 (DGC: 0.9)
    reduce: Literal["gradients", "updates"] = "gradients"  # updates: the change of weights, as `local_steps` does
    keep_owed: float = 1.0  # share of what is owed that own weights contain after a synchronisation, with
    # reduce="updates"; the rest they forget until it is sent, which is better from about 4 local steps on
    mean_over: MeanOver = "all"  # divide the sum of an entry by the number of all ranks; or, with reduce="updates", by
    # that of the ranks that sent it: what one of them alone has learned then counts whole
    factor_masking: bool = False  # stop the momentum of entries just sent; less staleness, with momentum_correction

    def __post_init__(self) -> None:
        for density in self.density.values() if isinstance(self.density, Mapping) else [self.density]:
            require_density(density)
        if isinstance(self.density, Mapping) and 0 not in self.density:
            raise ConfigError(f"a density schedule must start at step 0, got steps {sorted(self.density)}.")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps must be 0 or more, got {self.warmup_steps}.")
        if self.min_numel < 0:
            raise ConfigError(f"min_numel must be 0 or more, got {self.min_numel}.")
        if self.wire not in (*WIRES, AUTO):
            raise ConfigError(f"unknown wire format {self.wire!r}. {nearest(str(self.wire), [*WIRES, AUTO])}")
        if not 0.0 <= self.momentum_correction < 1.0:
            raise ConfigError(f"momentum_correction must be in [0, 1), got {self.momentum_correction}.")
        if self.factor_masking and not self.momentum_correction:
            raise ConfigError("factor_masking masks the momentum of momentum_correction: set that too, e.g. to 0.9.")
        if self.reduce not in ("gradients", "updates"):
            raise ConfigError(f"reduce must be 'gradients' or 'updates', got {self.reduce!r}.")
        if self.reduce == "updates" and self.momentum_correction:
            raise ConfigError(
                "momentum_correction is for gradients: when updates are reduced, momentum is the optimizer's own."
            )
        object.__setattr__(self, "keep_owed", float(self.keep_owed))  # True and 1 are the same
        require_share("keep_owed", self.keep_owed)
        if self.reduce == "gradients" and self.keep_owed < 1:
            raise ConfigError("keep_owed is about weights: gradients that are owed are always kept beside them.")
        if self.mean_over not in ("all", "senders"):
            raise ConfigError(f"mean_over must be 'all' or 'senders', got {self.mean_over!r}.")
        if self.reduce == "gradients" and self.mean_over != "all":
            raise ConfigError("mean_over='senders' is for updates: the mean of gradients is over all ranks.")
        if self.on_nonfinite not in ("raise", "skip"):
            raise ConfigError(f"on_nonfinite must be 'raise' or 'skip', got {self.on_nonfinite!r}.")


class Options(TypedDict, total=False):
    """Every option of a front end's reducer beside its named arguments, for editors and type checkers.

    The configurations above say what each means; `wires`, `trial_steps` and `recheck_every` are of `algorithm="auto"`.
    """

    min_numel: int
    on_nonfinite: Literal["raise", "skip"]
    momentum_correction: float
    factor_masking: bool
    global_cut: bool
    split_and_reduce: bool
    corrections: int
    tolerance: float
    in_flight: int
    in_turn: float
    order: Literal["turn", "random"]
    block: int
    draw_seed: int
    threshold: Literal["fresh", "reused"]
    reestimate_every: int
    repartition_every: int
    local_nudge: float
    local_keep: tuple[float, float]
    global_nudge_up: float
    global_nudge_down: float
    global_keep: tuple[float, float]
    cap: float
    balance_factor: float
    wires: tuple[str, ...]
    trial_steps: int
    recheck_every: int


class ReducerOptions(Options, total=False):
    """Those of a reducer itself: a front end knows what it reduces."""

    reduce: Literal["gradients", "updates"]
    keep_owed: float
    mean_over: MeanOver


PAPER_LSTM: dict[str, Any] = {
    "warmup_steps": 128, "density": 0.02, "threshold": "reused",
    "reestimate_every": 32, "repartition_every": 64, "balance_factor": 4.0,
    "local_nudge": 1.012, "local_keep": (3 / 4, 5 / 4),
    "global_nudge_up": 1.008, "global_nudge_down": 1.01, "global_keep": (3 / 4, 5 / 4),
}  # fmt: skip
PAPER_VGG: dict[str, Any] = {
    "warmup_steps": 512, "density": 0.02, "threshold": "reused",
    "reestimate_every": 32, "repartition_every": 64, "balance_factor": 4.0,
    "local_nudge": 1.012, "local_keep": (2 / 3, 5 / 4),
    "global_nudge_up": 1.008, "global_nudge_down": 1.008, "global_keep": (2 / 3, 4 / 3),
}  # fmt: skip
PAPER_BERT: dict[str, Any] = {
    "warmup_steps": 0, "density": 0.01, "threshold": "reused",
    "reestimate_every": 128, "repartition_every": 64, "balance_factor": 4.0,
    "local_nudge": 1.025, "local_keep": (4 / 5, 5 / 4),
    "global_nudge_up": 1.025, "global_nudge_down": 1.036, "global_keep": (4 / 5, 5 / 4),
}  # fmt: skip


def require_share(name: str, share: float) -> None:
    if not 0.0 <= share <= 1.0:
        raise ConfigError(
            f"{name} is a share, from 0 (own weights forget what they owe) to 1 (they keep it), got {share}."
        )


def require_density(density: float) -> None:
    if isinstance(density, bool) or not isinstance(density, (int, float)) or not 0.0 < density <= 1.0:
        raise ConfigError(
            f"density must be in (0, 1], got {density!r}: it is a fraction of the gradient, e.g. 0.01 keeps 1%."
        )


def require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be 1 or more, got {value}.")


def split_options(options: Mapping[str, Any], *classes: type) -> list[dict[str, Any]]:
    """Each option in the group of the dataclass that has such a field; an unknown one is an error with a hint."""
    owned = [{field.name for field in fields(cls)} for cls in classes]
    for name in options:
        if not any(name in names for names in owned):
            raise ConfigError(f"unknown option {name!r}. {nearest(name, set().union(*owned))}")
    return [{name: value for name, value in options.items() if name in names} for names in owned]
