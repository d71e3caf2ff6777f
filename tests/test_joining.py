"""Joining the world: in time, again and again in one store, and with a word about who is missing."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from time import monotonic

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import oktopk
from oktopk.errors import CommunicationError, ConfigError, PeerError
from worlds import free_port, run_processes


def test_a_script_that_nobody_launched_is_told_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR.* not set: start the script with torchrun"):
        oktopk.init_process_group()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_whose_peers_do_not_come_gives_up_in_time(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(free_port())
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    started = monotonic()
    with pytest.raises(CommunicationError, match=rf"rank {rank} .* at 127\.0\.0\.1:{port} within 1 s .*start all 2"):
        oktopk.init_process_group(timeout=timedelta(seconds=1))
    assert monotonic() - started < 20, "torch's own limit is half an hour"


def _join_twice() -> list[list[int]]:
    """In the store of a launcher, which outlives the groups in it; at last rank 1 stays away."""
    rank, seen = dist.get_rank(), []
    dist.destroy_process_group()
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": os.environ["LAUNCHER_PORT"]}
    for time in range(2):
        oktopk.init_process_group(timeout=timedelta(seconds=30))
        with oktopk.Reducer("dense") as reducer:
            seen.append(reducer.communicate(lambda transport, time=time: transport.agree([rank, time])))
        dist.destroy_process_group()
    if rank == 0:
        with pytest.raises(PeerError, match=r"rank 0 waited 1 s for rank 1: all 2 ranks must be started"):
            oktopk.init_process_group(timeout=timedelta(seconds=1))
    return seen


def _set_launcher_port(port: int) -> None:
    os.environ["LAUNCHER_PORT"] = str(port)


@pytest.mark.processes
def test_a_world_can_be_joined_again_in_the_store_of_a_launcher() -> None:
    launcher = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = run_processes(2, _join_twice, before=partial(_set_launcher_port, launcher.port))
    assert world == [[[[0, 0], [1, 0]], [[0, 1], [1, 1]]]] * 2
