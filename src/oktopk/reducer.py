"""What a user holds: a reducer takes gradients, gives back their means, and remembers what is still owed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from oktopk.algorithms import ALGORITHMS
from oktopk.config import AUTO, Density, ReducerConfig, ReducerOptions, split_options
from oktopk.errors import ConfigError, nearest
from oktopk.metrics import Sink, StepRecord
from oktopk.reduction.autotune import WIRES_ONCE, AutoConfig, Decision
from oktopk.reduction.communication import CommunicationThread
from oktopk.reduction.gradient import Gradient
from oktopk.reduction.hosts import Hosts, HostsOption, join_hosts
from oktopk.reduction.inside import Inside
from oktopk.reduction.pipeline import Pipeline, Settings
from oktopk.reduction.rank_states import RankStates
from oktopk.reduction.records import Request
from oktopk.schedule import Schedule
from oktopk.transport import Transport, open_transport

T = TypeVar("T")


class Reducer:
    """Reduces gradients over ranks, and remembers what is still owed.

    Example (one process; under torchrun every rank does the same):

    >>> import torch, oktopk
    >>> reducer = oktopk.Reducer(algorithm="oktopk", density=0.01)
    >>> mean = reducer.reduce("weight", torch.randn(100, 100))
    >>> mean.count_nonzero().item(), reducer.last_step.phase
    (100, 'sparse')
    >>> reducer.close()
    """

    def __init__(
        self,
        algorithm: str = "oktopk",
        density: Density = 0.01,
        group: Any = None,
        warmup_steps: int = 0,
        wire: str = "float32",
        *,
        hosts: HostsOption = "auto",
        metrics: Sink | None = None,
        timeout: timedelta | float | None = None,
        **options: Unpack[ReducerOptions],
    ) -> None:
        """Make a reducer; every rank of `group` (a ProcessGroup, a Transport, or None for all) must do the same.

        `hosts` is how many consecutive ranks share a host. These reduce densely among themselves, and only one part of
        every parameter each between hosts. "auto" finds out, where there are several hosts with equally many ranks;
        None lets every rank reduce for itself.
        `wire="auto"` tries float32, bfloat16 and int8 in the first sparse steps, and keeps the fastest.
        `options` are fields of the algorithm's configuration and of `ReducerConfig`.
        """
        if algorithm not in (*ALGORITHMS, AUTO):
            raise ConfigError(f"unknown algorithm {algorithm!r}. {nearest(str(algorithm), [*ALGORITHMS, AUTO])}")
        config_class, algorithm_class = ALGORITHMS["oktopk" if algorithm == AUTO else algorithm]
        own, shared, *tuning = split_options(
            options, config_class, ReducerConfig, *([AutoConfig] if algorithm == AUTO else [])
        )
        auto = AutoConfig(**tuning[0]) if tuning else WIRES_ONCE if wire == AUTO else None
        self.config = ReducerConfig(density=density, warmup_steps=warmup_steps, wire=wire, **shared)
        _require_senders(self.config, algorithm, algorithm_class)
        settings = Settings(algorithm, config_class(**own), self.config, auto)
        self._pipeline = pipeline = Pipeline(settings, join_hosts(hosts, open_transport(group, timeout)), metrics)
        self._thread = CommunicationThread(pipeline.transport, lambda: (pipeline.step, pipeline.clock.last))
        self._shapes: dict[str, torch.Size] = {}

    @property
    def algorithm(self) -> str:
        return self._pipeline.settings.algorithm

    @property
    def rank(self) -> int:
        return self._pipeline.transport.rank

    @property
    def world_size(self) -> int:
        return self._pipeline.transport.world_size

    @property
    def hosts(self) -> Hosts:
        """Which ranks reduce densely among themselves."""
        return self._pipeline.hosts

    @property
    def schedule(self) -> Schedule:
        return self._pipeline.schedule

    # -- reducing ------------------------------------------------------------------------------------------------

    def reduce(self, name: str, grad: Tensor) -> Tensor:
        """The mean over ranks of `grad` and what is owed to `name`. Blocks; `grad` stays as it is."""
        self._shapes[name] = grad.shape
        flat = grad.detach().reshape(-1).clone()
        return self.submit([(name, flat.numel())], flat).wait().view(grad.shape)

    def submit(
        self, layout: Sequence[tuple[str, int]], bucket: Tensor | Sequence[Tensor], unused: Collection[str] = ()
    ) -> torch.futures.Future[Tensor]:
        """Reduce a bucket of several parameters in place, on the communication thread.

        `layout` lists (name, numel) in the order they lie in `bucket`, a flat tensor; or give one flat tensor for each
        name: then nothing is copied together, and there is a second residual instead. Buckets are reduced in the order
        of submission, which must be the same on all ranks. `unused` names parameters that took no part in this rank's
        backward: one that is unused on every rank keeps its residual, and its mean is zero. The future holds the
        (first) tensor.
        """
        return self._submit(Gradient.of(layout, bucket), Request(frozenset(unused)))

    def _submit(self, gradient: Gradient, request: Request) -> torch.futures.Future[Tensor]:
        pipeline = self._pipeline
        return self._thread.submit(lambda: pipeline.reduce_(gradient, request), gradient.pieces)

    def communicate(self, work: Callable[[Transport], T]) -> T:
        """Run `work(transport)` on the communication thread, after all that was submitted. Every rank must do it."""
        return self._thread.run(lambda: work(self._pipeline.transport))

    def _communicate_inside(self, work: Callable[[Inside], T]) -> T:
        """As `communicate`, between the ranks of a host that has several."""
        inside = self._pipeline.inside
        assert inside is not None
        return self._thread.run(lambda: work(inside))

    def refuse(self, error: Exception) -> NoReturn:
        """End on every rank, in order, when this one cannot reduce what the others do, for instance a bad batch.

        The others hear of it when they next reduce something, and raise a `PeerError` with its text; `error` is raised
        here. Nobody waits, and nothing can be reduced afterwards.
        """
        with suppress(Exception):  # whatever has ended this reducer already, here it is `error` that counts
            self._thread.run(lambda: self._pipeline.end_together(error))
        raise error

    def notify(self, number: int) -> None:
        """Tell all ranks a number (a signal, say) with what is reduced from now on: see `notified`."""
        if not 0 <= number < 2**32:
            raise ConfigError(f"a number for all ranks must be 0 to 2**32 - 1, got {number}.")
        self._pipeline.notice = number
        if self.world_size == 1:  # nobody has to be told, and nothing may ever be reduced
            self._pipeline.noticed = max(self._pipeline.noticed, number)

    @property
    def notified(self) -> int:
        """The greatest number that any rank has told by `notify`; between two steps it is the same on all ranks."""
        return self._pipeline.noticed

    def set_gradient_scale(self, scale: float) -> None:
        """Say in which unit gradients come from now on, as a GradScaler sets it: residuals follow."""
        if not scale > 0.0:
            raise ConfigError(f"the gradient scale must be above 0, got {scale}.")
        if scale != self._pipeline.gradient_scale:  # it rarely does, and then nobody has to wait
            self._thread.run(lambda: self._pipeline.rescale(scale))

    @property
    def step(self) -> int:
        """How many steps are behind us."""
        return self._pipeline.step

    @property
    def last_step(self) -> StepRecord:
        """All buckets of the latest step as one record."""
        return self._pipeline.records.last_step

    def record_of(self, step: int) -> StepRecord | None:
        """`last_step` if that was step number `step`; None if nothing was reduced in it."""
        return self._pipeline.records.of(step)

    @property
    def decisions(self) -> dict[str, Decision]:
        """What `algorithm="auto"` or `wire="auto"` has decided, and why, by the name of a bucket's first parameter."""
        pipeline = self._pipeline
        return pipeline.tuner.decisions(pipeline.grouping.current) if pipeline.tuner is not None else {}

    # -- state ---------------------------------------------------------------------------------------------------

    def residuals(self) -> dict[str, Tensor]:
        """A copy of what this rank still owes, by parameter name. With `hosts`, each rank owes one part of each."""
        flat = self._thread.read(self._pipeline.residuals)
        return {name: r.view(self._shapes[name]) if name in self._shapes else r for name, r in flat.items()}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors and plain values only. Every rank has its own."""
        return self._thread.read(self._pipeline.state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the state was taken."""
        error = self._thread.run(lambda: _error_of(lambda: self._pipeline.load_state_dict(state)))
        if error is not None:
            raise error

    @property
    def reducer(self) -> Reducer:
        """Itself, so that `oktopk.save` and `load` take a reducer as they take a handle that has one."""
        return self

    def rank_state(self) -> dict[str, Any]:
        """What the file of this rank holds."""
        return self.state_dict()

    def from_rank_states(self, states: RankStates) -> Mapping[str, Any]:
        """This rank's state. At another world size regions and thresholds are found anew."""
        if states.is_same_world:
            return states.nearest
        return {
            **states.first,
            "rank": self.rank,
            "world_size": self.world_size,
            "ranks_per_host": self.hosts.ranks_per_host,
            "algorithms": {},
            "residuals": states.owed("residuals"),
            "velocities": states.owed("velocities"),
        }

    def close(self) -> None:
        """Stop the communication thread and leave the process group. The reducer cannot be used afterwards."""
        self._thread.close()

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _error_of(work: Callable[[], None]) -> Exception | None:
    """What it raises. A state that does not fit is its caller's business: the communication thread goes on."""
    try:
        work()
    except Exception as error:
        return error
    return None


def _require_senders(config: ReducerConfig, algorithm: str, algorithm_class: type[Any]) -> None:
    if config.mean_over == "senders" and not algorithm_class.knows_senders:
        able = " or ".join(repr(name) for name, (_, one) in ALGORITHMS.items() if one.knows_senders)
        raise ConfigError(
            f"mean_over='senders' needs an algorithm whose ranks learn who sent an entry, got {algorithm!r}: "
            f"take {able}, or mean_over='all'."
        )
