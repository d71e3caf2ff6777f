"""`oktopk train`: starts workers or joins those that are there, and trains."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from oktopk.cli.arguments import (
    CONFIG_FLAG,
    description,
    field_types,
    leading_words,
    merged,
    read_config,
    take,
    to_flags,
)
from oktopk.cli.console import console
from oktopk.cli.progress import make_observer
from oktopk.errors import ConfigError, nearest
from oktopk.training.algorithms import find_config
from oktopk.training.config import TrainConfig
from oktopk.training.environment import find_rank
from oktopk.training.trainer import resumed_config, train
from oktopk.training.workers import launch_command, launch_workers, settle_in
from oktopk.training.workload import find_classes, make_workload
from oktopk.training.world import joined_world
from oktopk.workloads import WORKLOADS

_MODULE = "oktopk.cli"
_COMMON = ("preset", "data", "batch_size")  # flags that the workload explains better than `TrainConfig` can


@dataclass(frozen=True)
class Train(TrainConfig):
    """Train a workload on one or many workers.

    Options of the workload and of the algorithm you name are listed too: try `oktopk train vision --help` or
    `oktopk train --algorithm gaussiank --help`. Under torchrun, mpirun or srun the same command joins the ranks
    that are there instead of starting workers.

    Example:
        oktopk train speech --workers 2 --algorithm oktopk --density 0.02 --epochs 2 --max-steps 4
        oktopk train --config configs/synth_small.toml --dry-run
    """

    workload: tyro.conf.Positional[str] = "speech"  # what to train: speech, vision, ptb, bert, gpt, or module:Class
    preset: tyro.conf.Suppress[str | None] = None
    data: tyro.conf.Suppress[str | None] = None
    batch_size: tyro.conf.Suppress[int | None] = None
    workload_options: tyro.conf.Suppress[Mapping[str, Any]] = field(default_factory=dict)
    algorithm_options: tyro.conf.Suppress[Mapping[str, Any]] = field(default_factory=dict)
    dry_run: bool = False  # print the resolved configuration and the launch command, and do nothing
    quiet: bool = False  # print nothing but errors and the last line
    trust: bool = False  # with --resume: import the module:Class that the run names, whatever it is

    @classmethod
    def parse(cls, args: Sequence[str], prog: str) -> Train:
        """Flags before the TOML file before, with --resume, what the run was started with."""
        path, rest = take(args, CONFIG_FLAG)
        values = read_config(Path(path)) if path else {}
        resume, _ = take(rest, "--resume")
        if resume is not None:
            workload = next(iter(rest[: leading_words(rest)]), values.get("workload"))
            values = to_values(resumed_config(Path(resume), workload, "--trust" in rest)) | values
        command: Train = parse_train(cls, values, rest, prog)
        return command

    def __call__(self) -> int:
        if self.dry_run:
            return self._describe()
        if find_rank() is None and self.workers > 1:
            return launch_workers(self.workers, [_MODULE, "train", *to_argv(self)])
        return self._work()

    def _work(self) -> int:
        settle_in(find_rank())
        with joined_world() as world:
            observer = make_observer(self.quiet)
            try:
                train(as_config(self), world, observer)
            finally:
                observer.close()
        return 0

    def _describe(self) -> int:
        config = as_config(self)
        resolved = config.resolved(config.recipe(make_workload(config).recipe))
        console().print_json(json.dumps(resolved.to_json()))
        argv = ["train", *to_argv(replace(self, dry_run=False))]
        command = launch_command(self.workers, [_MODULE, *argv]) if self.workers > 1 else shlex.join(["oktopk", *argv])
        console().print(f"launch: {command}", markup=False, soft_wrap=True)
        return 0


def parse_train(command: type[Any], values: Mapping[str, Any], args: Sequence[str], prog: str) -> Any:
    """A command that trains, with the flags of the workload and the algorithm that are asked for."""
    words = list(args[: leading_words(args)])
    workload = words[0] if words else str(values.get("workload", "speech"))
    algorithm = take(args, "--algorithm")[0] or str(values.get("algorithm", "oktopk"))
    if ":" not in workload and workload not in WORKLOADS:
        raise ConfigError(f"unknown workload {workload!r}. {nearest(workload, WORKLOADS)}")
    parser = _parser(command, find_classes(workload)[0], find_config(algorithm))
    types = {name: kind for part in field_types(parser).values() for name, kind in field_types(_bare(part)).items()}
    given = tyro.cli(parser, args=merged(values, args, types), prog=prog, description=description(command))
    options = {f.name: getattr(given.workload, f.name) for f in fields(given.workload)}
    return replace(
        given.run,
        **{name: options.pop(name) for name in _COMMON},
        workload_options=options,
        algorithm_options={f.name: getattr(given.algorithm, f.name) for f in fields(given.algorithm)},
    )


def to_argv(config: Any) -> list[str]:
    """The shortest arguments that parse to the same command."""
    workload_default = vars(find_classes(config.workload)[0]())
    defaults = {**vars(type(config)()), **{name: workload_default[name] for name in _COMMON}}
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "workload"}
    values["workload_options"] = _unlike(config.workload_options, workload_default)
    values["algorithm_options"] = _unlike(config.algorithm_options, vars(find_config(config.algorithm)()))
    return [config.workload, *to_flags(_unlike(values, defaults), field_types(type(config)))]


def to_values(config: TrainConfig) -> dict[str, Any]:
    """A configuration as the values of a file."""
    return {name: value for name, value in config.to_json().items() if value is not None}


def as_config(command: Any) -> TrainConfig:
    """What the library needs of a command."""
    return TrainConfig(**{f.name: getattr(command, f.name) for f in fields(TrainConfig)})


def _unlike(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


def _parser(command: type[Any], workload_config: type[Any], algorithm_config: type[Any]) -> type[Any]:
    parts = {"run": command, "workload": workload_config, "algorithm": algorithm_config}
    return make_dataclass(
        command.__name__,
        [(name, Annotated[part, tyro.conf.arg(name="")], field(default_factory=part)) for name, part in parts.items()],
        frozen=True,
    )


def _bare(annotated: Any) -> type[Any]:
    bare: type[Any] = annotated.__origin__
    return bare
