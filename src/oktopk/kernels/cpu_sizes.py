"""Sizes that compiled loops and their callers agree on."""

WORD = 64  # entries compared at once: one bit of a uint64 each
LINE_BYTES = 64  # of a cache line
DIGIT = 12  # bits a radix pass resolves: 4096 counters stay in the first-level cache
TILE = 2048  # entries worked on while they are in the first-level cache
WINDOW = 1 << 15  # entries of the index space that sum_windows covers at once
