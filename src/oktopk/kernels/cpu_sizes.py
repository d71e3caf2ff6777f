"""Sizes that compiled loops and their callers agree on."""

WORD = 64  # entries compared at once: one bit of a uint64 each
LINE_BYTES = 64  # of a cache line
LINE = 16  # entries of float32 in one
RUN = 16  # neighbours that are drawn together are also worked on together: a cache line of float32
DIGIT = 12  # bits a radix pass resolves: 4096 counters stay in the first-level cache
TILE = 2048  # entries worked on while they are in the first-level cache
STRIPE = 1 << 13  # entries of each stretch that a scan of differences reads at the same time
STRIPES = 4  # such stretches: more keep more of the memory busy; what all hold must fit the second-level cache
WINDOW = 1 << 15  # entries of the index space that sum_windows covers at once
