"""What a network is like: its rate, its latency, and how people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from oktopk.errors import ConfigError

SLOWEST, FASTEST = 1e4, 4e11  # bits per second that a token-bucket filter and a laptop can make sense of
LONGEST = 10.0  # seconds of one-way latency

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:bit|bits|bit/s|bps)", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", re.IGNORECASE)
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Network:
    """The link of every host to the switch between them."""

    bits_per_second: float | None  # None: as fast as the kernel moves bytes
    latency: float = 0.0  # seconds one way

    @staticmethod
    def parse(rate: str, latency: str = "0ms") -> Network:
        """`Network.parse("1gbit", "50ms")`; the rate "loopback" means unshaped."""
        seconds = parse_seconds(latency)
        if rate.strip().lower() == "loopback":
            return Network(None, seconds)
        return Network(parse_rate(rate), seconds)

    @property
    def label(self) -> str:
        rate = "loopback" if self.bits_per_second is None else rate_label(self.bits_per_second)
        return f"{rate} {self.latency * 1e3:g}ms" if self.latency else rate


def parse_rate(text: str) -> float:
    """Bits per second of "100mbit", "1gbit", "2.5 Gbit/s"."""
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"a network rate looks like 100mbit, 1gbit or loopback, got {text!r}.")
    rate = float(found[1]) * _PREFIXES[found[2].lower()]
    if not SLOWEST <= rate <= FASTEST:
        raise ConfigError(
            f"cannot emulate a rate of {text!r}: give one between {rate_label(SLOWEST)} and {rate_label(FASTEST)}."
        )
    return rate


def parse_seconds(text: str) -> float:
    """Seconds of "50ms", "200us", "1s"."""
    found = _TIME.fullmatch(text.strip())
    if found is None or float(found[1]) * _UNITS[found[2].lower()] > LONGEST:
        raise ConfigError(f"a latency looks like 50ms or 200us and is at most {LONGEST:g}s, got {text!r}.")
    return float(found[1]) * _UNITS[found[2].lower()]


def rate_label(bits_per_second: float) -> str:
    """The rate as `parse_rate` reads it."""
    for prefix, factor in (("g", 1e9), ("m", 1e6), ("k", 1e3)):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:g}{prefix}bit"
    return f"{bits_per_second:g}bit"
