"""What front ends pass on to their reducer, for editors and type checkers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from oktopk.config import Density, MeanOver, Options
from oktopk.front_ends.every import Every
from oktopk.metrics import Sink
from oktopk.reduction.hosts import HostsOption

Fuse = Literal["bucket", "step"]


class _ReducerOptions(Options, total=False):
    metrics: Sink | None  # gets a `StepRecord` of every step
    timeout: timedelta | float | None  # of every collective; None: that of the process group


class GroupOptions(_ReducerOptions, total=False):
    """Options of a reducer whose group is given."""

    wire: str  # how values travel, one of `oktopk.config.WIRES`


class FrontEndOptions(GroupOptions, total=False):
    """Options of a reducer that a front end makes."""

    group: Any  # a ProcessGroup or a Transport; without it that of the model, or all ranks
    hosts: HostsOption  # how many consecutive ranks share a host; "auto" finds out, None: each reduces for itself


class LocalOptions(_ReducerOptions, total=False):
    """Options of the reducer that `local_steps` makes, whose wire is an argument."""

    group: Any  # as in FrontEndOptions
    hosts: HostsOption  # how many consecutive ranks are one worker; "auto" finds out, None: each is one
    warmup_steps: int  # dense synchronisations at the beginning, counted in optimizer steps


class LocalStepsOptions(LocalOptions, total=False):
    """Options of `local_steps`, for those who pass them on."""

    algorithm: str | None
    density: Density | None
    wire: str | None
    every: Every
    keep_owed: float | None
    mean_over: MeanOver | None
    overlap: bool


class RegisterOptions(FrontEndOptions, total=False):
    """Options of `register`, for those who pass them on."""

    algorithm: str | None
    density: Density
    warmup_steps: int
    fuse: Fuse | None
    norm_clip: float | None
    keep_memory: bool | None
