"""Names of this host, and addresses by which hosts reach each other; nothing is sent."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Sequence
from ipaddress import IPv4Interface, ip_address
from pathlib import Path

import psutil

INTERFACE = "GLOO_SOCKET_IFNAME"  # variable with the interface that connects the hosts
DISCARD = 9  # port of the discard service


def local_names() -> frozenset[str]:
    """Return the possible names of this host in a list of hosts: host name and addresses."""
    interfaces = psutil.net_if_addrs().values()
    addresses = (address.address for interface in interfaces for address in interface)
    return frozenset({"localhost", socket.gethostname(), *addresses})


def is_this_host(name: str, local: Collection[str]) -> bool:
    """Return whether ``name`` is among the ``local`` names; one without domain fits any domain."""
    return any(name in (known, _short(known)) or _short(name) == known for known in local)


def _short(name: str) -> str:
    """Return the name of a host without its domain; an address is unchanged."""
    try:
        return str(ip_address(name))
    except ValueError:
        return name.partition(".")[0]


def addresses(interfaces: str | None = None) -> list[str]:
    """Return IPv4 addresses, e.g. ``10.0.0.7/24``, of the interfaces ``eth0,eth1``.

    By default, of all without loopback.
    """
    up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    local_addresses = [
        IPv4Interface(f"{address.address}/{address.netmask or 32}")  # some tunnels have none
        for name, local in psutil.net_if_addrs().items()
        if name in (interfaces.split(",") if interfaces else up)
        for address in local
        if address.family == socket.AF_INET
    ]
    return [str(address) for address in local_addresses if interfaces or not address.is_loopback]


def has_fabric() -> bool:
    """Return whether this host has an InfiniBand or Omni-Path adapter, which registers memory."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def boot_id() -> str:
    """Return the ID of this boot of this host, which no host of the same name has; empty: unknown.

    In a container it is that of the machine.
    """
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.is_file() else ""


def address_for_all(hosts: Iterable[Sequence[str]]) -> str | None:
    """Return the first host's address in its first network that all hosts share.

    None if there is no such network, e.g. with a router between hosts.
    """
    lists = [[IPv4Interface(address) for address in local] for local in hosts]
    for mine in lists[0]:
        neighbours = [
            {address.ip for address in local if address.ip in mine.network} for local in lists
        ]
        # A container bridge has the same address on each host, and connects none of them.
        if all(neighbours) and len(set.union(*neighbours)) == sum(map(len, neighbours)):
            return str(mine.ip)
    return None


def reachable_at(hosts: Collection[Sequence[str]]) -> list[str]:
    """Return the first host's address in a network of all hosts, or all that it has."""
    first = [address.partition("/")[0] for address in next(iter(hosts))]
    shared = address_for_all(hosts)
    # Loopback last: two "hosts" may be containers that share only this.
    return [shared] if shared else [*first, "127.0.0.1"]


def address_towards(host: str) -> str | None:
    """Return the source address of packets to ``host``, or None if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, DISCARD))  # for a datagram socket this only looks up the route
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def interface_towards(host: str) -> str | None:
    """Return the interface of packets to ``host``, or None if there is no route."""
    mine = address_towards(host)
    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, local in interfaces if mine in {address.address for address in local}), None
    )
