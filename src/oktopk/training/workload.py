"""From a name to a workload: those of the package, and `module:Class` of anyone else."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, cast

from oktopk.errors import ConfigError
from oktopk.training.config import TrainConfig
from oktopk.workloads import workload_classes
from oktopk.workloads.base import Recipe, Workload

Progress = Callable[[int, int], None]  # items done, items in all
_COMMON = ("preset", "data", "batch_size")  # fields of every workload's configuration that `TrainConfig` has too


def find_classes(name: str) -> tuple[type[Any], type[Any]]:
    """Configuration class and workload class. Those of `module:Class` are `Class.Config` and `Class`."""
    if ":" not in name:
        return workload_classes(name)
    module, _, attribute = name.partition(":")
    # As `python -m` does: a module in the current folder is found.
    sys.path[:0] = [] if os.getcwd() in sys.path or "" in sys.path else [os.getcwd()]
    try:
        found = getattr(importlib.import_module(module), attribute)
        return found.Config, found
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"cannot find the workload {name!r} ({error}): it must be module:Class, importable from here, and the "
            "class must have an attribute Config, the dataclass of its options."
        ) from None


def preset_recipe(workload: str, preset: str | None) -> Recipe:
    """How a preset is trained, without its data. A workload of your own tells only with them: here the usual way."""
    config_class = find_classes(workload)[0]
    presets: Mapping[str | None, Any] = getattr(sys.modules[config_class.__module__], "PRESETS", {})
    name = preset or getattr(config_class(), "preset", None)
    return cast(Recipe, presets[name].recipe) if name in presets else Recipe()


def make_workload(config: TrainConfig, progress: Progress | None = None) -> Workload:
    """The workload a configuration names, with its options; `progress` hears how far it is with preparing data."""
    config_class, workload_class = find_classes(config.workload)
    said = {name: getattr(config, name) for name in _COMMON if getattr(config, name) is not None}
    try:
        options = config_class(**said, **config.workload_options)
    except TypeError as error:
        raise ConfigError(f"workload {config.workload!r} does not take these options: {error}.") from None
    heard = {"progress": progress} if "progress" in signature(workload_class).parameters else {}
    return cast(Workload, workload_class(options, config.seed, **heard))
