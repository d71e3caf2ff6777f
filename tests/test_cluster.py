"""The emulated cluster: what it builds, what it measures, and that nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oktopk.bench import cluster as cluster_module
from oktopk.bench import processes
from oktopk.bench.cluster import (
    Cluster,
    EmulatedCluster,
    emulated_cluster,
    missing_for_emulation,
    namespaces,
    open_cluster,
    remove_leftovers,
)
from oktopk.bench.network import Network, parse_rate, parse_seconds, rate_label
from oktopk.bench.processes import run_ranks
from oktopk.bench.rank import RankContext
from oktopk.errors import ClusterError, CommunicationError, ConfigError, PeerError

missing = missing_for_emulation()
needs_root = pytest.mark.skipif(missing is not None, reason=f"no emulated network here: {missing}")

HOLDER = """
import sys
from oktopk.bench.cluster import emulated_cluster
from oktopk.bench.network import Network
with emulated_cluster(2, Network.parse("1gbit")) as cluster:
    print(cluster.prefix, flush=True)
    sys.stdin.read()
"""


def die(context: RankContext, victim: int) -> None:
    """A task in which one rank leaves without a word and the others wait for it."""
    if context.rank == victim:
        print("the victim's last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ever(context: RankContext) -> None:
    signal.pause()


@pytest.mark.parametrize(
    ("text", "rate"), [("100mbit", 1e8), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("1gbit/s", 1e9), ("50 kbit", 5e4)]
)
def test_a_rate_is_read_as_people_write_it(text: str, rate: float) -> None:
    assert parse_rate(text) == rate
    assert parse_rate(rate_label(rate)) == rate


@pytest.mark.parametrize("text", ["", "fast", "0gbit", "-1gbit", "1e9", "900gbit", "1bit", "100mb"])
def test_an_impossible_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="gbit"):
        parse_rate(text)


def test_a_latency_is_read_and_an_absurd_one_refused() -> None:
    assert parse_seconds("50ms") == pytest.approx(0.05)
    assert parse_seconds("200us") == pytest.approx(2e-4)
    for text in ("", "50", "-1ms", "1h", "60s"):
        with pytest.raises(ConfigError, match="50ms"):
            parse_seconds(text)


@pytest.mark.parametrize("hosts", [0, -1, 255])
def test_more_hosts_than_addresses_are_refused(hosts: int) -> None:
    with pytest.raises(ConfigError, match=str(hosts)), open_cluster(hosts, Network(None)):
        pass


def test_without_the_tools_it_runs_on_loopback_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_search_path", lambda: "/nonexistent")
    with open_cluster(2, Network.parse("1gbit")) as cluster:
        assert not cluster.emulated
        assert cluster.network.bits_per_second is None, "numbers from loopback must never be labelled 1gbit"
        assert "'ip' is missing" in cluster.notes[0] and "iproute2" in cluster.notes[0]
    with pytest.raises(ClusterError, match="iproute2"), emulated_cluster(2, Network.parse("1gbit")):
        pass


def test_without_root_it_runs_on_loopback_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module.shutil, "which", lambda tool, path=None: f"/sbin/{tool}")
    monkeypatch.setattr(cluster_module.os, "geteuid", lambda: 1000)
    with open_cluster(2, Network.parse("1gbit")) as cluster:
        assert "root" in cluster.notes[0]


@pytest.mark.processes
@needs_root
def test_the_network_is_as_slow_as_it_says_and_is_gone_afterwards() -> None:
    links = subprocess.run(["ip", "link"], capture_output=True, text=True, env=_with_sbin()).stdout
    with emulated_cluster(2, Network.parse("10mbit", "1ms")) as cluster:
        assert set(_of(cluster.prefix)) == {cluster.switch, cluster.namespace(0), cluster.namespace(1)}
        nbytes = 60_000  # after a pause: what a bucket has saved up would pass at once
        records = run_ranks(cluster, "oktopk.bench.probe:measure", {"nbytes": nbytes, "repeats": 3}, timeout=60)
        inside = subprocess.run(["ip", "link"], capture_output=True, text=True, env=_with_sbin()).stdout
    assert records[0][0]["bytes_per_second"] < 1.1 * 10e6 / 8, "the filter lets more through than its rate"
    # Frames carry 66 bytes of headers for at most 1448 of payload, and acknowledgements of the other direction.
    assert 3 * nbytes <= records[0][0]["wire_sent"] <= 1.1 * 3 * nbytes
    assert _names(inside) == _names(links), "a link appeared outside"
    assert not _of(cluster.prefix)


@needs_root
def test_latency_is_shaped_or_the_reader_is_told() -> None:
    with emulated_cluster(1, Network.parse("1gbit", "5ms")) as cluster:
        assert cluster.network.latency == 0.005 or "netem" in cluster.notes[0]


@pytest.mark.processes
@needs_root
def test_a_rank_that_dies_is_named_and_nothing_stays() -> None:
    epitaph = r"(?s)rank 1 on host 1 was killed by SIGKILL.*last words"
    with pytest.raises(PeerError, match=epitaph), emulated_cluster(2, Network(None)) as cluster:
        run_ranks(cluster, "test_cluster:die", {"victim": 1}, timeout=60)
    assert not _of(cluster.prefix)


@pytest.mark.processes
def test_ranks_that_never_finish_are_ended() -> None:
    with pytest.raises(CommunicationError, match=r"ranks \[0\] did not finish within 1 s"):
        run_ranks(Cluster(1), "test_cluster:wait_for_ever", {}, timeout=1)


@pytest.mark.processes
def test_a_signal_while_a_rank_starts_does_not_leave_it_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen] = []
    start = subprocess.Popen

    def signalled(*arguments: object, **options: object) -> subprocess.Popen:
        started.append(start(*arguments, **options))
        os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(processes.subprocess, "Popen", signalled)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(Cluster(2), "test_cluster:wait_for_ever", {}, timeout=60)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


@pytest.mark.processes
@needs_root
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_signal_removes_everything_and_leaves_a_non_zero_code(number: signal.Signals) -> None:
    holder, prefix = _hold()
    holder.send_signal(number)
    assert holder.wait(20) != 0
    assert not _of(prefix)


@pytest.mark.processes
@needs_root
def test_leftovers_of_the_dead_are_removed_and_those_of_others_are_not() -> None:
    live, live_prefix = _hold()
    dead, dead_prefix = _hold()
    foreign = f"oktopk-mine-{os.getpid()}"
    _ip("netns", "add", foreign)
    try:
        dead.kill()
        dead.wait(20)
        assert len(_of(dead_prefix)) == 3
        removed = remove_leftovers()
        assert {name for name in removed if name.startswith(dead_prefix)} == {
            f"{dead_prefix}-{end}" for end in ("switch", "h0", "h1")
        }
        assert not _of(dead_prefix)
        assert len(_of(live_prefix)) == 3 and foreign in namespaces()
    finally:
        _ip("netns", "del", foreign)
        live.terminate()
        live.wait(20)
    assert not _of(live_prefix)


def test_ranks_of_one_host_share_its_namespace() -> None:
    cluster = EmulatedCluster(2, per_host=2, prefix="oktopk-1-1-0")
    if missing is None:
        hosts = [cluster.command(rank, ["true"])[3] for rank in range(4)]
        assert hosts == [cluster.namespace(0)] * 2 + [cluster.namespace(1)] * 2


@pytest.fixture(autouse=True)
def _tasks_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


def _hold() -> tuple[subprocess.Popen[str], str]:
    """A process that holds a cluster until it is ended, and the prefix of its names."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    return holder, holder.stdout.readline().strip()


def _of(prefix: str) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"{prefix}-")]


def _names(links: str) -> set[str]:
    return {line.split(":")[1].strip() for line in links.splitlines() if line[:1].isdigit()}


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, env=_with_sbin())


def _with_sbin() -> dict[str, str]:
    return os.environ | {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
