"""Everything the library raises on purpose.

OkTopkError
|-- ConfigError         a value the user gave makes no sense (also a ValueError)
|-- UnsupportedError    asked of something that cannot work, with what to do instead (also a TypeError)
|-- MismatchError       ranks disagree about what they are reducing
|-- NonFiniteError      NaN or Inf in some rank's gradient
|-- WireError           a message that cannot be decoded
|-- CommunicationError  a collective failed: names rank, phase and step
|   `-- PeerError       another rank failed or vanished
|-- CheckpointError     saved state is missing, damaged, or of something else
|-- ClusterError        the emulated network could not be built or removed
`-- DataError           a corpus or file is not what it should be: names file and remedy
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OkTopkError(Exception):
    """Base of all errors of this library."""


class ConfigError(OkTopkError, ValueError):
    """A value the user gave makes no sense."""


class UnsupportedError(OkTopkError, TypeError):
    """Asked of something that cannot work; the message says what to do instead."""


class MismatchError(OkTopkError):
    """Ranks disagree about what they are reducing."""


class NonFiniteError(OkTopkError, ArithmeticError):
    """NaN or Inf in the gradient of some rank."""


class WireError(OkTopkError):
    """A message that cannot be decoded."""


class CommunicationError(OkTopkError, RuntimeError):
    """A collective failed; the message names rank, phase and step."""


class PeerError(CommunicationError):
    """Another rank failed or vanished."""


class CheckpointError(OkTopkError):
    """Saved state is missing, damaged, or of something else."""


class ClusterError(OkTopkError):
    """The kernel refused to build or to remove the emulated network."""


class DataError(OkTopkError):
    """A corpus or a file is not what it should be."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: ' Did you mean ...?' or the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
