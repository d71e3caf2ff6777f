"""Making the pieces of a sweep, and saying how long it will take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from oktopk.bench.target.pieces import Piece

FIRST_WORDS = 0.1  # share of a piece until which starting it is most of what was done


@dataclass(frozen=True)
class Progress:
    """How far a sweep is."""

    done: int  # pieces
    of: int
    name: str  # of the piece under way
    share: float  # of it
    remaining: float | None  # seconds, if it goes on like this; None: not known yet

    @property
    def is_finished(self) -> bool:
        """Whether the piece is."""
        return self.share >= 1.0


def make_all(
    wanted: Sequence[Piece], hear: Callable[[Progress], None], clock: Callable[[], float] = perf_counter
) -> None:
    """Make what is not there yet. What was finished before an interruption stays."""
    missing = [piece for piece in wanted if not piece.is_finished()]
    taken: dict[str, list[float]] = {}
    for number, piece in enumerate(missing):
        started = clock()
        rest = [other.part for other in missing[number + 1 :]]

        def say(share: float) -> None:
            left = estimate(clock() - started, share, piece.part, rest, taken)  # noqa: B023
            done = len(wanted) - len(rest) - 1  # noqa: B023
            hear(Progress(done + (share >= 1.0), len(wanted), piece.name, share, left))  # noqa: B023

        say(0.0)
        piece.make(say)
        taken.setdefault(piece.part, []).append(clock() - started)
        say(1.0)


def estimate(
    passed: float, share: float, part: str, rest: Sequence[str], taken: Mapping[str, Sequence[float]]
) -> float | None:
    """Seconds left: pieces take what others of their part took; the one under way, what it is on the way to take."""
    known = {name: sum(times) / len(times) for name, times in taken.items()}
    under_way = passed / share if share > FIRST_WORDS else known.get(part)
    if under_way is None:
        return None
    usual = known.get(part, under_way)
    return max(0.0, under_way - passed) + sum(known.get(other, usual) for other in rest)
