"""By which addresses hosts reach one another, as their routes tell; nothing is sent."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Interface

import psutil

DISCARD = 9  # a port


def addresses(interface: str | None = None) -> list[str]:
    """Return the IPv4 addresses of this host as ``10.0.0.7/24``, without loopback.

    Args:
        interface: name of the interface; None: all that are up.
    """
    up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    found = [
        IPv4Interface(f"{one.address}/{one.netmask or 32}")  # some tunnels tell none
        for name, ours in psutil.net_if_addrs().items()
        if name in ([interface] if interface else up)
        for one in ours
        if one.family == socket.AF_INET
    ]
    return [str(one) for one in found if interface or not one.is_loopback]


def address_for_all(hosts: Mapping[str, Sequence[str]]) -> str | None:
    """Return the address of the first host in the first of its networks that all hosts share.

    None where there is none, as behind a router.

    Args:
        hosts: ``addresses`` of each.
    """
    lists = [[IPv4Interface(one) for one in ours] for ours in hosts.values()]
    for mine in lists[0]:
        neighbours = [{one.ip for one in ours if one.ip in mine.network} for ours in lists]
        # A bridge of containers has the same address on each host, and leads to none of them.
        if all(neighbours) and len(set.union(*neighbours)) == sum(map(len, neighbours)):
            return str(mine.ip)
    return None


def address_towards(host: str) -> str | None:
    """Return the address from which packets to ``host`` leave, None if there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, DISCARD))  # of a datagram: looks up the route
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def interface_towards(host: str) -> str | None:
    """Return the interface by which packets to ``host`` leave, None if there is none."""
    mine = address_towards(host)
    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, ours in interfaces if any(one.address == mine for one in ours)), None
    )
