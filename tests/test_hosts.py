"""Ranks meet and reduce whatever their host calls itself, and whatever `localhost` means there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hosts
import oktopk
from oktopk.errors import ConfigError
from oktopk.transport import TorchTransport
from oktopk.transport.addresses import own_host
from worlds import run_processes

WHY_NOT = hosts.why_not()
needs_namespaces = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def _reduce_once() -> tuple[str, list[float]]:
    transport = TorchTransport()
    assert transport._witness is not None
    address = str(transport._witness._listener.getsockname()[0])
    with oktopk.Reducer("dense", group=transport) as reducer:
        return address, reducer.reduce("weight", torch.full((3,), float(reducer.rank))).tolist()


@pytest.mark.processes
@needs_namespaces
@pytest.mark.parametrize(
    ("line", "name", "interface", "address"),
    [
        ("::1 here", "here", "", "::1"),
        ("127.0.1.1 here", "here", "", "127.0.1.1"),
        ("127.0.1.1 here", "here", "lo", "127.0.0.1"),
        ("", "nowhere", "", "127.0.0.1"),
    ],
    ids=["IPv6 comes first", "the name is 127.0.1.1", "an interface is chosen", "the name does not resolve"],
)
def test_two_ranks_reduce_where(line: str, name: str, interface: str, address: str, tmp_path: Path) -> None:
    variables = {"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": interface}
    host = hosts.Host(tmp_path, f"::1 localhost\n127.0.0.1 localhost\n{line}\n", name, variables)
    assert run_processes(2, _reduce_once, before=host) == [(address, [0.5] * 3)] * 2


def test_an_address_of_another_machine_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for resolved, host in ((["192.0.2.77", "127.0.0.3"], "127.0.0.3"), (["192.0.2.77"], "127.0.0.1")):
        monkeypatch.setattr("oktopk.transport.addresses._resolve", lambda _, found=resolved: found)
        assert own_host() == host


def test_the_interface_is_the_one_that_gloo_is_told_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert own_host() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-device")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME names 'no-such-device'.* choose one of .*lo"):
        own_host()


def test_an_interface_without_ipv4_has_its_ipv6_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe800000000000000000000000000001 07 40 20 80 ib-six\n"
        "fd000000000000000000000000000002 07 40 00 80 ib-six\n"
        "fe800000000000000000000000000003 08 40 20 80 ib-link\n"
    )
    monkeypatch.setattr("oktopk.transport.addresses._IPV6_ADDRESSES", table)
    for interface, host in (("ib-six", "fd00::2"), ("ib-link", "fe80::3%ib-link")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        assert own_host() == host
