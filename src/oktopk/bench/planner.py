"""Does it pay? Step times predicted from a link, a machine and a model: alpha (rounds), beta (bytes), gamma (work).

    step = compute + gamma + max(alpha + beta - hidden behind backward, what no backward can hide)

Everything here is arithmetic: `machine.py` measures gamma, the user or `advise` says what the network is like.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2

from oktopk.algorithms import ALGORITHMS
from oktopk.bench.cost_model import VALUE_BYTES, predict
from oktopk.bench.machine import Machine
from oktopk.bench.network import Network, rate_label
from oktopk.config import OkTopkConfig, require_density
from oktopk.errors import ConfigError
from oktopk.primitives.partition import told_words
from oktopk.reduction.agreement import agreement_words

FRAMING = 0.957  # payload of a full Ethernet frame over its time on the wire, as iperf measures it
INSIDE_ROUNDS = 3  # between ranks of a host: what they hold, parts, what was won
BUCKET_BYTES = 25 << 20  # DDP's own
ADVISED = ("float32", "float16", "bfloat16", "int8")  # narrower values: for who has tried what they do to the training
SLOWEST, FASTEST = 1e5, 1e13  # bits per second between which a break-even is looked for
CLUSTER_SIZES = (2, 4, 8, 16, 64, 256, 1024, 10_000)  # hosts, on paper
LINKS = {
    "datacentre, 10 Gbit/s": Network(1e10, 5e-5),
    "office, 1 Gbit/s": Network(1e9, 2e-4),
    "internet, 500 Mbit/s, 50 ms": Network(5e8, 0.05),
    "internet, 50 Mbit/s, 50 ms": Network(5e7, 0.05),
}


@dataclass(frozen=True)
class Scenario:
    """A model on a cluster."""

    numel: int = 27_570_000
    density: float = 0.01
    ranks: int = 4
    ranks_per_host: int = 1
    network: Network = Network(1e9)  # noqa: RUF009
    compute_seconds: float = 0.2  # a step without synchronisation
    backward_seconds: float = 0.1  # the part of it that synchronisation can hide behind
    ranks_per_core: float = 1.0  # above 1, ranks share cores and all work takes longer
    bucket_bytes: int = BUCKET_BYTES
    flat: bool = False  # every rank reduces for itself, also where several are on a host

    def __post_init__(self) -> None:
        require_density(self.density)
        for name in ("numel", "ranks", "ranks_per_host", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        if self.ranks % self.ranks_per_host:
            raise ConfigError(f"{self.ranks} ranks do not fill hosts of {self.ranks_per_host}: give a multiple of it.")
        if not 0 <= self.backward_seconds <= self.compute_seconds:
            raise ConfigError(
                f"backward is a part of compute: got {self.backward_seconds} s of {self.compute_seconds} s."
            )

    @property
    def k(self) -> int:
        return max(1, round(self.density * self.numel))

    @property
    def buckets(self) -> int:
        return max(1, ceil(4 * self.numel / self.bucket_bytes))

    @property
    def hosts(self) -> int:
        return self.ranks // self.ranks_per_host

    @property
    def has_hosts(self) -> bool:
        """Whether ranks of a host reduce together first."""
        return not self.flat and self.ranks_per_host > 1 and self.hosts > 1

    @property
    def of_a_part(self) -> Scenario:
        """What one rank of each host does for its part of the gradient."""
        share = self.ranks_per_host
        return replace(
            self,
            numel=max(1, self.numel // share),
            ranks=self.hosts,
            ranks_per_host=1,
            bucket_bytes=max(1, self.bucket_bytes // share),
        )


@dataclass(frozen=True)
class Prediction:
    """What one way to synchronise should cost."""

    algorithm: str
    wire: str
    step_seconds: float
    work_seconds: float  # gamma: scanning, packing, adding
    link_seconds: float  # beta: bytes over the link
    wait_seconds: float  # alpha: rounds and messages
    bytes_per_rank: float

    @property
    def name(self) -> str:
        return f"{self.algorithm} {self.wire}"


def predict_step(scenario: Scenario, machine: Machine, algorithm: str, wire: str) -> Prediction:
    """Predict the step time of one algorithm and wire format."""
    nbytes = expected_bytes(scenario, machine, algorithm, wire)
    costs = _costs_over_hosts if scenario.has_hosts and algorithm != "dense" else _costs
    work, link, wait = costs(scenario, machine, algorithm, wire, nbytes)
    transfer = link + wait
    # On shared cores there is nothing to hide behind: backward of one rank already waits for that of another.
    hidden = scenario.backward_seconds * (1 - 1 / scenario.buckets) if scenario.ranks_per_core <= 1 else 0.0
    exposed = max(transfer - hidden, transfer / scenario.buckets)
    step = scenario.compute_seconds + (work + exposed if scenario.ranks > 1 else 0.0)
    return Prediction(algorithm, wire, step, work, link, wait, nbytes)


def _costs(
    scenario: Scenario, machine: Machine, algorithm: str, wire: str, nbytes: float
) -> tuple[float, float, float]:
    """Seconds of work, of bytes over the link, and of rounds."""
    work = _work_seconds(scenario, machine, algorithm, wire)
    link = _link_seconds(scenario, machine, algorithm, nbytes, _leaving(scenario, algorithm))
    return work, link, _wait_seconds(scenario, machine, algorithm)


def _costs_over_hosts(
    scenario: Scenario, machine: Machine, algorithm: str, wire: str, nbytes: float
) -> tuple[float, float, float]:
    """The same of ranks that have a part each, and of what they do inside their host."""
    part, neighbours = scenario.of_a_part, scenario.ranks_per_host - 1
    inside = part.numel * neighbours * (machine.hand_over_per_entry + machine.fill_per_entry)
    inside += scenario.k * machine.per_pair["float32"]
    work = _work_seconds(replace(part, bucket_bytes=4 * part.numel), machine, algorithm, wire)
    work += inside * max(1.0, scenario.ranks_per_core)
    link = _link_seconds(part, machine, algorithm, nbytes, scenario.ranks_per_host)
    rounds = scenario.buckets * INSIDE_ROUNDS * machine.round_seconds
    return work, link, _wait_seconds(part, machine, algorithm) + rounds


def predict_all(scenario: Scenario, machine: Machine) -> list[Prediction]:
    """Every algorithm with every wire format whose costs were measured, the fastest first."""
    sparse = [name for name in ALGORITHMS if name != "dense" and name in machine.per_entry]
    pairs = [("dense", "float32")] + [(name, wire) for name in sparse for wire in machine.per_pair]
    return sorted((predict_step(scenario, machine, *pair) for pair in pairs), key=lambda p: p.step_seconds)


def best_sparse(scenario: Scenario, machine: Machine) -> Prediction:
    """The fastest way to send the largest entries without rounding them much: others cost more than time."""
    others = ("dense", "randomk")
    return next(p for p in predict_all(scenario, machine) if p.algorithm not in others and p.wire in ADVISED)


def expected_bytes(scenario: Scenario, machine: Machine, algorithm: str, wire: str) -> float:
    """Bytes that one rank sends in one step: what is expected, where `cost_model` bounds."""
    if scenario.has_hosts and algorithm != "dense":
        words = agreement_words(told_words(scenario.hosts))
        agreed = 8 * words * (scenario.ranks - scenario.hosts) * scenario.buckets
        return expected_bytes(scenario.of_a_part, machine, algorithm, wire) + agreed
    ranks, k, numel = scenario.ranks, scenario.k, scenario.numel
    if ranks == 1:
        return 0.0
    share, pair = (ranks - 1) / ranks, _pair_bytes(machine, scenario.density, wire)
    overhead = predict(algorithm, numel, k, ranks, wire).overhead_bytes * scenario.buckets
    union = numel * (1 - (1 - scenario.density) ** ranks)
    payload = {
        "dense": 8 * numel * share,
        "topka": pair * k * (ranks - 1),
        "gaussiank": pair * k * (ranks - 1),
        "topkdsa": (pair * k + min(_pair_bytes(machine, union / numel, wire) * union, 4 * numel)) * share,
        "randomk": 2 * VALUE_BYTES[wire] * k * share,
        "gtopk": pair * k * ceil(log2(ranks)),  # at the root, which all others wait for
        "oktopk": 2 * pair * k * share,
    }
    return payload[algorithm] + overhead


def break_even(scenario: Scenario, machine: Machine, algorithm: str, wire: str) -> float | None:
    """Bits per second above which dense is faster; None if it never is."""

    def dense_wins(rate: float) -> bool:
        there = replace(scenario, network=replace(scenario.network, bits_per_second=rate))
        ours = predict_step(there, machine, algorithm, wire).step_seconds
        return predict_step(there, machine, "dense", "float32").step_seconds < ours

    if dense_wins(SLOWEST):
        return SLOWEST
    if not dense_wins(FASTEST):
        return None
    low, high = SLOWEST, FASTEST
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if dense_wins(middle) else (middle, high)
    return high


def recommend(scenario: Scenario, machine: Machine) -> str:
    """The advice, in one sentence."""
    dense = predict_step(scenario, machine, "dense", "float32")
    sparse = best_sparse(scenario, machine)
    gain = dense.step_seconds / sparse.step_seconds
    border = break_even(scenario, machine, sparse.algorithm, sparse.wire)
    if gain <= 1.0:
        below = f"; below {_round_rate(border)} {sparse.name} pays" if border and border > SLOWEST else ""
        return f"use dense: {sparse.name} would take {1 / gain:.2g}x as long at density {scenario.density:g}{below}."
    above = f"above {_round_rate(border)} use dense" if border else "dense is slower at any bandwidth"
    return f"use {sparse.name} at density {scenario.density:g}: {gain:.2g}x over dense; {above}."


def speedup(scenario: Scenario, machine: Machine, prediction: Prediction) -> float:
    """How much faster than dense."""
    return predict_step(scenario, machine, "dense", "float32").step_seconds / prediction.step_seconds


def _pair_bytes(machine: Machine, density: float, wire: str) -> float:
    """Bytes of a pair at a density other than the measured one: an index costs about log2(1 / density) bits."""
    bits = log2(machine.density / min(1.0, max(density, 1e-9)))
    return max(1.0, machine.bytes_per_pair[wire] + bits / 8)


def _work_seconds(scenario: Scenario, machine: Machine, algorithm: str, wire: str) -> float:
    ranks, k = scenario.ranks, scenario.k
    packed = {
        "dense": 0.0,
        "topka": k * ranks,
        "gaussiank": k * ranks,
        "topkdsa": k + min(ranks * k, scenario.numel),
        "randomk": 0.0 if wire == "float32" else k,
        "gtopk": k * 2 * ceil(log2(max(2, ranks))),
        "oktopk": 2 * k,  # packed once, unpacked twice, added once, and looked through for winners
    }[algorithm]
    work = scenario.numel * _per_entry(scenario, machine, algorithm) + packed * machine.per_pair[wire]
    return work * max(1.0, scenario.ranks_per_core)


def _per_entry(scenario: Scenario, machine: Machine, algorithm: str) -> float:
    saved = machine.per_entry["oktopk"] - machine.fused_per_entry
    is_fused = scenario.buckets == 1 and algorithm != "dense"
    return machine.per_entry[algorithm] - (saved if is_fused else 0.0)


def _link_seconds(scenario: Scenario, machine: Machine, algorithm: str, nbytes: float, leaving: float) -> float:
    """The slower of the host's link and the socket layer."""
    stack = 2 * nbytes / machine.stack_bytes_per_second * max(1.0, scenario.ranks_per_core)
    if scenario.network.bits_per_second is None or scenario.ranks == 1:
        return stack
    # The tree of gtopk is climbed and then descended; every other exchange uses both directions at once.
    through = nbytes * leaving * (2 if algorithm == "gtopk" else 1)
    return max(stack, 8 * through / (scenario.network.bits_per_second * FRAMING))


def _leaving(scenario: Scenario, algorithm: str) -> float:
    """Bytes through a host's link over bytes of one rank."""
    if scenario.ranks == scenario.ranks_per_host:
        return 0.0
    if algorithm == "dense":
        return 1.0  # a ring crosses each link once, whoever else is on the host
    return scenario.ranks_per_host * (scenario.ranks - scenario.ranks_per_host) / (scenario.ranks - 1)


def _wait_seconds(scenario: Scenario, machine: Machine, algorithm: str) -> float:
    cost = predict(algorithm, scenario.numel, scenario.k, scenario.ranks)
    rounds = cost.rounds
    if algorithm in ("topkdsa", "oktopk"):
        # The split serves a few peers at a time, and each window waits for the one before.
        rounds += ceil((scenario.ranks - 1) / OkTopkConfig().in_flight) - 1
    # Messages of one round leave one after the other, each through the socket layer.
    more = max(0, cost.messages - rounds) * machine.message_seconds * max(1.0, scenario.ranks_per_core)
    return scenario.buckets * (rounds * (scenario.network.latency + machine.round_seconds) + more)


def _round_rate(bits_per_second: float | None) -> str:
    return (
        "any rate" if bits_per_second is None else rate_label(float(f"{bits_per_second:.2g}")).replace("bit", "bit/s")
    )
