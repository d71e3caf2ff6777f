"""What the link between ranks is like, measured: under a launcher between its ranks, else on emulated hosts."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from statistics import median

import torch.distributed as dist

from oktopk.bench.cluster import Cluster, open_cluster
from oktopk.bench.machine import Machine, measure_machine
from oktopk.bench.network import Network
from oktopk.bench.probe import one_round, stream
from oktopk.bench.processes import run_ranks

PROBE_BYTES = 8_000_000


@dataclass(frozen=True)
class Link:
    """What one rank can tell of the network."""

    rank: int
    world_size: int
    bits_per_second: float
    round_seconds: float


def measure_under_launcher() -> Link | None:
    """The link between the ranks that a launcher started; None when this process is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    dist.init_process_group("gloo")
    try:
        seconds = [one_round() for _ in range(20)]
        rates = [stream(PROBE_BYTES) for _ in range(3)]
        return Link(dist.get_rank(), dist.get_world_size(), 8 * max(rates), median(seconds))
    finally:
        dist.destroy_process_group()


def measure_machine_in(cluster: Cluster, density: float) -> Machine:
    """The machine's costs, with rounds as they are in this cluster."""
    record = run_ranks(cluster, "oktopk.bench.probe:measure", {"nbytes": 1000}, timeout=120)[0][0]
    return replace(measure_machine(density), round_seconds=record["round_seconds"])


def measure_here(hosts: int, network: Network, per_host: int) -> tuple[Link, tuple[str, ...]]:
    """The link between emulated hosts, or loopback; and what must be known of it."""
    with open_cluster(hosts, network, per_host) as cluster:
        record = run_ranks(cluster, "oktopk.bench.probe:measure", {"nbytes": PROBE_BYTES}, timeout=120)[0][0]
        notes = cluster.notes
    link = Link(0, hosts * per_host, 8 * record["bytes_per_second"], record["round_seconds"])
    return link, notes
