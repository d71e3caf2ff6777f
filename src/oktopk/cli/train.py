"""`oktopk train`: starts workers or joins those that are there, and trains."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from oktopk.cli.arguments import (
    ConfigFile,
    description,
    field_types,
    filled,
    leading_words,
    take,
    take_file,
    to_flags,
)
from oktopk.cli.console import console
from oktopk.cli.progress import make_observer
from oktopk.errors import ConfigError, nearest
from oktopk.training.algorithms import find_config
from oktopk.training.config import TrainConfig
from oktopk.training.environment import find_rank
from oktopk.training.trainer import resumed_config, train
from oktopk.training.workers import bind_worker, launch_command, launch_workers
from oktopk.training.workload import find_classes, make_workload, preset_recipe
from oktopk.training.world import joined_world
from oktopk.workloads import WORKLOADS
from oktopk.workloads.base import Recipe

_MODULE = "oktopk.cli"
_TABLES = ("workload_options", "algorithm_options")
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
    emulate_hosts: int = 0  # deal the workers out over this many hosts that exist only here (root, iproute2); 0: none
    network: str = "loopback"  # of emulated hosts: a rate such as 1gbit, or as fast as the machine moves bytes
    trust: bool = False  # with --resume: import the module:Class that the run names, whatever it is

    @classmethod
    def parse(cls, args: Sequence[str], prog: str) -> Train:
        """Flags before the TOML file before, with --resume, what the run was started with."""
        file, rest = take_file(args)
        resume, _ = take(rest, "--resume")
        if resume is not None:
            workload = next(iter(rest[: leading_words(rest)]), file.values.get("workload"))
            before = resumed_config(Path(resume), workload, "--trust" in rest).to_json()
            known = {name: value for name, value in before.items() if value is not None}
            file = ConfigFile(file.path or resume, known | dict(file.values))
        command: Train = parse_train(cls, file, rest, prog)
        return command

    def __call__(self) -> int:
        if self.dry_run:
            return self._describe()
        if find_rank() is None and self.emulate_hosts:
            return self._emulate()
        if find_rank() is None and self.workers > 1:
            return launch_workers(self.workers, [_MODULE, "train", *to_argv(self)])
        return self._work()

    def _emulate(self) -> int:
        from oktopk.bench.cluster import emulated_cluster
        from oktopk.bench.hosted import run_on_hosts
        from oktopk.bench.network import Network

        per_host, left_over = divmod(self.workers, self.emulate_hosts)
        if left_over or not per_host:
            raise ConfigError(f"{self.workers} workers cannot be dealt out evenly over {self.emulate_hosts} hosts.")
        argv = [sys.executable, "-u", "-m", _MODULE, "train", *to_argv(replace(self, emulate_hosts=0))]
        with emulated_cluster(self.emulate_hosts, Network.parse(self.network), per_host) as cluster:
            return run_on_hosts(cluster, argv)

    def _work(self) -> int:
        bind_worker(find_rank())
        with joined_world() as world:
            observer = make_observer(self.quiet)
            try:
                train(as_config(self), world, observer)
            finally:
                observer.close()
        return 0

    def _describe(self) -> int:
        config = as_config(self)
        resolved = config.resolved(config.recipe(make_workload(config).recipe, config.steppers))
        console().print_json(json.dumps(resolved.to_json()))
        argv = ["train", *to_argv(replace(self, dry_run=False))]
        command = launch_command(self.workers, [_MODULE, *argv]) if self.workers > 1 else shlex.join(["oktopk", *argv])
        console().print(f"launch: {command}", markup=False, soft_wrap=True)
        return 0


def parse_train(command: type[Any], file: ConfigFile, args: Sequence[str], prog: str) -> Any:
    """A command that trains, with the flags of the workload and the algorithm that are asked for."""
    words = list(args[: leading_words(args)])
    workload = words[0] if words else str(file.values.get("workload", "speech"))
    if ":" not in workload and workload not in WORKLOADS:
        raise ConfigError(f"unknown workload {workload!r}. {nearest(workload, WORKLOADS)}")
    options_of = find_config(_said(args, file, "algorithm") or _usual_algorithm(args, file, workload))
    parts = {"workload": find_classes(workload)[0], "algorithm": options_of, "run": command}
    default = _dealt_out(file, parts)
    given = tyro.cli(type(default), args=args, prog=prog, description=description(command), default=default)
    options = {f.name: getattr(given.workload, f.name) for f in fields(given.workload)}
    return replace(
        given.run,
        **{name: options.pop(name) for name in _COMMON},
        workload_options=options,
        algorithm_options=_unlike(vars(given.algorithm), vars(options_of())),
    )


def _usual_algorithm(args: Sequence[str], file: ConfigFile, workload: str) -> str:
    """What reduces gradients, or updates as they are asked for, unless the user says otherwise."""
    if _said(args, file, "reduce") != "updates":
        return Recipe().algorithm
    every, kept = _said(args, file, "every") or "1", _share(_said(args, file, "keep-owed"))
    asked = TrainConfig(
        workload,
        reduce="updates",
        every=int(every) if every.isdecimal() else "auto",
        keep_owed=kept,
        overlap="--overlap" in args or file.values.get("overlap") is True,
        optimizer=_said(args, file, "optimizer"),  # type: ignore[arg-type]
        mean_over=_said(args, file, "mean-over"),  # type: ignore[arg-type]
    )
    return asked.recipe(preset_recipe(workload, _said(args, file, "preset"))).algorithm


def _share(text: str | None) -> float | None:
    """A number, or True or False; None where it is neither, which the parser then says."""
    try:
        return None if text is None else float({"True": "1", "False": "0"}.get(text, text))
    except ValueError:
        return None


def _said(args: Sequence[str], file: ConfigFile, name: str) -> str | None:
    """What a flag or the file says of a setting."""
    value = take(args, f"--{name}")[0] or file.values.get(name.replace("-", "_"))
    return None if value is None else str(value)


def _dealt_out(file: ConfigFile, parts: Mapping[str, type[Any]]) -> Any:
    """The values of a file, each in the part whose option it is; the last part gets the rest."""
    tables = [file.values.get(name) or {} for name in _TABLES]
    left = {name.replace("-", "_"): value for table in (file.values, *tables) for name, value in table.items()}
    left = {name: value for name, value in left.items() if name not in _TABLES}
    *first, last = parts
    made: dict[str, Any] = {}
    for part in first:
        own = {f.name: left.pop(f.name) for f in fields(parts[part]) if f.name in left}
        made[part] = filled(parts[part], own, file.path)
    return _parser(parts)(**made, **{last: filled(parts[last], left, file.path)})


def to_argv(config: Any) -> list[str]:
    """The shortest arguments that parse to the same command."""
    workload_default = vars(find_classes(config.workload)[0]())
    defaults = {**vars(type(config)()), **{name: workload_default[name] for name in _COMMON}}
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "workload"}
    values["workload_options"] = _unlike(config.workload_options, workload_default)
    values["algorithm_options"] = dict(config.algorithm_options)
    return [config.workload, *to_flags(_unlike(values, defaults), field_types(type(config)))]


def as_config(command: Any) -> TrainConfig:
    """What the library needs of a command."""
    return TrainConfig(**{f.name: getattr(command, f.name) for f in fields(TrainConfig)})


def _unlike(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


def _parser(parts: Mapping[str, type[Any]]) -> type[Any]:
    """One dataclass of several, whose options are flags without a prefix."""
    return make_dataclass(
        "Training", [(name, Annotated[part, tyro.conf.arg(name="")]) for name, part in parts.items()], frozen=True
    )
