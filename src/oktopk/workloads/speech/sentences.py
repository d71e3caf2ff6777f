"""Sentences of AN4's kinds: spelled words, digit strings, numbers, dates and commands."""

from __future__ import annotations

from random import Random
from string import ascii_uppercase

DIGITS = ("ZERO", "OH", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
TEENS = ("TEN", "ELEVEN", "TWELVE", "THIRTEEN", "FOURTEEN", "FIFTEEN", "SIXTEEN", "SEVENTEEN", "EIGHTEEN", "NINETEEN")
TENS = ("TWENTY", "THIRTY", "FORTY", "FIFTY", "SIXTY", "SEVENTY", "EIGHTY", "NINETY")
MONTHS = (
    "JANUARY", "FEBRUARY", "MARCH", "APRIL", "MAY", "JUNE",
    "JULY", "AUGUST", "SEPTEMBER", "OCTOBER", "NOVEMBER", "DECEMBER",
)  # fmt: skip
ORDINALS = (
    "FIRST", "SECOND", "THIRD", "FOURTH", "FIFTH", "SIXTH", "SEVENTH", "EIGHTH", "NINTH", "TENTH", "ELEVENTH",
    "TWELFTH", "THIRTEENTH", "FOURTEENTH", "FIFTEENTH", "SIXTEENTH", "SEVENTEENTH", "EIGHTEENTH", "NINETEENTH",
    "TWENTIETH",
)  # fmt: skip
COMMANDS = ("YES", "NO", "GO", "STOP", "START", "HELP", "REPEAT")
VERBS = ("ENTER", "ERASE", "RUBOUT")
NAMES = (
    "ALLEGHENY", "AMANDA", "BARBARA", "BAKER", "BENNETT", "CALDWELL", "CAROLINE", "CHESTNUT", "CLIFTON", "DANIEL",
    "DOROTHY", "DUBOIS", "EDGEWOOD", "ELIZABETH", "FITZGERALD", "FOSTER", "FRANKLIN", "GRAHAM", "HARRISBURG", "HAZEL",
    "HUBERT", "IRENE", "JACKSON", "JOSEPH", "KENNEDY", "KIRKWOOD", "LAWRENCE", "LOUISA", "MARQUETTE", "MAXWELL",
    "MONROE", "NORWICH", "OAKLAND", "OLIVER", "PHILIP", "QUENTIN", "RAYMOND", "ROXBURY", "SHADYSIDE", "SYLVIA",
    "THOMAS", "ULYSSES", "VAUGHN", "VICTOR", "WALNUT", "WHITFIELD", "XAVIER", "YVONNE", "ZELDA", "ZIMMERMAN",
)  # fmt: skip


def sentence(rng: Random) -> str:
    """One sentence, in capitals and within the recogniser's alphabet."""
    kinds = (_spelled, _digits, _numbers, _date, _edit, _mixed, _command)
    return rng.choices(kinds, weights=(26, 22, 14, 10, 14, 8, 6))[0](rng)


def _spelled(rng: Random) -> str:
    return " ".join(rng.choice(NAMES)[:8])


def _digits(rng: Random) -> str:
    return " ".join(rng.choices(DIGITS, k=rng.choice((3, 5, 5, 7))))


def _numbers(rng: Random) -> str:
    return " ".join(_below_hundred(rng) for _ in range(rng.choice((1, 2, 2, 3))))


def _date(rng: Random) -> str:
    return f"{rng.choice(MONTHS)} {rng.choice(ORDINALS)} NINETEEN {_two_digits(rng)}"


def _edit(rng: Random) -> str:
    return f"{rng.choice(VERBS)} {_mixed(rng) if rng.random() < 0.6 else _digits(rng)}"


def _mixed(rng: Random) -> str:
    return " ".join([*rng.choices(ascii_uppercase, k=rng.randint(2, 4)), _below_hundred(rng)])


def _command(rng: Random) -> str:
    return rng.choice(COMMANDS)


def _below_hundred(rng: Random) -> str:
    return rng.choice((rng.choice(DIGITS[2:]), rng.choice(TEENS), _two_digits(rng)))


def _two_digits(rng: Random) -> str:
    return rng.choice(TENS) + (f" {rng.choice(DIGITS[2:])}" if rng.random() < 0.8 else "")
