"""Addresses by which all hosts reach the first host."""

from __future__ import annotations

import socket

import pytest

from hvdtrain.system.machine.network import (
    address_for_all,
    address_towards,
    addresses,
    interface_towards,
    is_this_host,
    local_names,
    reachable_at,
)

DOCKER = "172.17.0.1/16"  # the same on each host that has it


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ((["10.0.0.1/24"], ["10.0.0.2/24"], ["10.0.0.3/24"]), "10.0.0.1"),
        ((["10.0.0.1/24", "10.9.0.1/16"], ["10.9.7.2/16"]), "10.9.0.1"),
        (([DOCKER, "10.0.0.1/24"], [DOCKER, "10.0.0.2/24"]), "10.0.0.1"),
        ((["10.0.0.1/24"], ["10.0.0.2/24"], ["10.0.1.3/24"]), None),  # a router between them
        ((["10.0.0.1/24"], []), None),
        (([], ["10.0.0.2/24"]), None),
        (([DOCKER], [DOCKER]), None),
    ],
)
def test_the_first_network_shared_by_all_hosts(
    hosts: tuple[list[str], ...], expected: str | None
) -> None:
    assert address_for_all(hosts) == expected


def test_this_host_by_name_and_by_address() -> None:
    here = local_names()
    for name in ("localhost", socket.gethostname(), f"{socket.gethostname()}.some.domain"):
        assert is_this_host(name, here)
    assert is_this_host("127.0.0.1", here)
    assert not is_this_host("127.9.9.9", here)


@pytest.mark.parametrize(
    ("name", "local", "same"),
    [
        ("node1.cluster", "node1", True),
        ("node1", "node1.cluster", True),
        ("node1", "node10", False),
        ("node1.site_b", "node1.site_a", False),
        ("node1.site_a", "node1.site_a", True),
        ("::1", "::1", True),
        ("0:0:0:0:0:0:0:1", "::1", True),
        ("7a01.cluster", "7a01", True),
        # Addresses have no domain.
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3", "10.1.2.4", False),
        ("10.1.2.3", "10", False),
    ],
)
def test_names_with_and_without_domain(name: str, local: str, same: bool) -> None:
    assert is_this_host(name, {"localhost", local}) == same


def test_rank_0_is_reachable_in_the_shared_network_or_at_all_addresses() -> None:
    assert reachable_at([["10.9.0.1/16", "10.0.0.1/24"], ["10.0.0.2/24"]]) == ["10.0.0.1"]
    assert reachable_at([["10.0.0.1/24"], ["10.0.1.2/24"]]) == ["10.0.0.1", "127.0.0.1"]
    assert reachable_at([[], []]) == ["127.0.0.1"]


def test_this_host() -> None:
    assert (address_towards("127.0.0.1"), interface_towards("127.0.0.1")) == ("127.0.0.1", "lo")
    assert addresses("lo") == ["127.0.0.1/8"]
    assert addresses("lo,no-such") == ["127.0.0.1/8"]
    assert not any(address.startswith("127.") for address in addresses())
    assert interface_towards("no-such-host.invalid") is None
