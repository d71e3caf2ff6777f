"""Plain values, as TOML and JSON have them, turned into what the fields of a dataclass want."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from oktopk.errors import ConfigError, nearest


def as_fields(kind: type[Any], values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The values under the names of a dataclass's fields, each with its type; `source` is named in errors."""
    hints, found = get_type_hints(kind), {}
    for name, value in values.items():
        field = name.replace("-", "_")
        if field not in {f.name for f in fields(kind)}:
            raise ConfigError(f"{source} has an unknown option {name!r}. {nearest(field, hints)}")
        try:
            found[field] = typed(value, hints[field])
        except (TypeError, ValueError):
            raise ConfigError(f"{source}: {name} must be {_said(hints[field])}, got {value!r}.") from None
    return found


def typed(value: Any, kind: Any) -> Any:
    """The same value as `kind` wants it; ValueError or TypeError if it cannot be."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _first_that_fits(value, parts)
    if origin is Literal:
        return value if value in parts else _refuse(value)
    if origin is tuple:
        kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(typed(item, part) for item, part in zip(_a(value, (list, tuple)), kinds, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        # Keys are always text in JSON and TOML.
        return {parts[0](key): typed(item, parts[1]) for key, item in _a(value, Mapping).items()}
    if kind is Path:
        return Path(value)
    if kind is float:
        return float(_a(value, (int, float)))
    return value if kind is Any else _a(value, kind)


def _first_that_fits(value: Any, kinds: tuple[Any, ...]) -> Any:
    for kind in kinds:
        try:
            return typed(value, kind)
        except (TypeError, ValueError):
            continue
    return _refuse(value)


def _a(value: Any, kind: Any) -> Any:
    """The value, if it is one of `kind`; true and false are no numbers."""
    return value if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) else _refuse(value)


def _refuse(value: Any) -> Any:
    raise ValueError(value)


def _said(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
