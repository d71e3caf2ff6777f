"""Flags from dataclasses: help with an example, values from a TOML file, the nearest name for a wrong one."""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro

from oktopk.errors import ConfigError
from oktopk.training.values import as_fields

T = TypeVar("T")
CONFIG_FLAG = "--config"


def parse(command: type[T], args: Sequence[str], prog: str) -> T:
    """The command with its fields from the flags, then from the file of `--config`, then from their defaults."""
    file, rest = take_file(args)
    default = {"default": filled(command, file.values, file.path)} if file.values else {}
    parsed: T = tyro.cli(command, args=rest, prog=prog, description=description(command), **default)
    return parsed


@dataclass(frozen=True)
class ConfigFile:
    """What the file of `--config` says; nothing where there is none."""

    path: str
    values: Mapping[str, Any]


def take_file(args: Sequence[str]) -> tuple[ConfigFile, list[str]]:
    """The file of `--config`, read, and the other arguments."""
    path, rest = take(args, CONFIG_FLAG)
    return ConfigFile(path or "", read_config(Path(path)) if path else {}), rest


def filled(command: type[Any], values: Mapping[str, Any], source: str) -> Any:
    """A command with values for some of its fields; one that has no default and no value must be a flag."""
    needed = {f.name: tyro.MISSING for f in fields(command) if f.default is MISSING and f.default_factory is MISSING}
    return command(**needed | as_fields(command, values, source))


def description(command: type) -> str:
    """The class docstring, its example kept as it is written."""
    return (inspect.getdoc(command) or "") + f"\n\n{CONFIG_FLAG} FILE reads any of these options from a TOML file."


def to_flags(values: Mapping[str, Any], types: Mapping[str, Any]) -> list[str]:
    """Flags that say the same as `values`; tables of options are laid flat, None is left out."""
    flags: list[str] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and (name not in types or _is_suppressed(types[name])):
            flags += to_flags(value, types)
        elif value is not None:
            flags += _flag(name, value, types.get(name))
    return flags


def field_types(command: type) -> dict[str, Any]:
    """Type of each field, with tyro's markers."""
    hints = get_type_hints(command, include_extras=True)
    return {f.name: hints[f.name] for f in fields(command)}


def take(args: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of `flag` (as `--flag X` or `--flag=X`) and the other arguments."""
    value: str | None = None
    rest: list[str] = []
    waiting = False
    for arg in args:
        if waiting:
            value, waiting = arg, False
        elif arg == flag:
            waiting = True
        elif arg.startswith(flag + "="):
            value = arg.partition("=")[2]
        else:
            rest.append(arg)
    if waiting:
        raise ConfigError(f"{flag} wants a value after it.")
    return value, rest


def leading_words(args: Sequence[str]) -> int:
    """How many arguments stand before the first flag."""
    return next((index for index, arg in enumerate(args) if arg.startswith("-")), len(args))


def read_config(path: Path) -> dict[str, Any]:
    """The values of a TOML or JSON file."""
    if not path.is_file():
        raise ConfigError(f"there is no configuration file {path}: give a TOML file, e.g. configs/synth_small.toml.")
    text = path.read_text(encoding="utf-8")
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {path.suffix.lstrip('.').upper() or 'TOML'}: {error}.") from None
    return dict(values)


def _flag(name: str, value: Any, kind: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool) and (kind is bool or kind is None):
        return [flag if value else "--no-" + name.replace("_", "-")]
    if isinstance(value, Mapping):
        return [flag, *(str(word) for pair in value.items() for word in pair)]
    if isinstance(value, (list, tuple)):
        return [flag, *(str(item) for item in value)]
    return [flag, str(value)]


def _is_suppressed(kind: Any) -> bool:
    return tyro.conf.Suppress in getattr(kind, "__metadata__", ())
