"""Small values that all ranks know, and errors that all ranks raise."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from oktopk.errors import OkTopkError, PeerError
from oktopk.transport.base import Transport

T = TypeVar("T")


def share(value: Any, transport: Transport) -> list[Any]:
    """Every rank's JSON value, by rank."""
    message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(other.tolist())) for other in transport.all_gather(message)]


def share_error(error: Exception | None, transport: Transport) -> list[str | None]:
    """What went wrong on each rank, in words; None where nothing did."""
    return share(None if error is None else explain(error), transport)


def first_error(
    error: Exception | None, texts: Sequence[str | None], kind: type[OkTopkError] = PeerError
) -> Exception | None:
    """What to raise if any rank has an error: this rank's own, or one of `kind` that names the first that has one."""
    others = (kind(f"rank {rank}: {text}") for rank, text in enumerate(texts) if text is not None)
    return error if error is not None else next(others, None)


def raise_any(error: Exception | None, texts: Sequence[str | None], kind: type[OkTopkError] = PeerError) -> None:
    """Raise on every rank if any rank has an error."""
    found = first_error(error, texts, kind)
    if found is not None:
        raise found


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """An action's result, or what went wrong: the other ranks must hear of it before it is raised."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def explain(error: Exception) -> str:
    """Our own errors say everything themselves; others need their type."""
    return str(error) if isinstance(error, OkTopkError) else f"{type(error).__name__}: {error}"
