"""Tells whether a host is this machine or another one."""

from __future__ import annotations

import socket
from ipaddress import ip_address


def addresses(host: str) -> frozenset[str]:
    """Return the addresses of a host; empty if its name cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()  # a name that only a driver or a proxy understands
    return frozenset(str(entry[4][0]).partition("%")[0] for entry in found)


def is_loopback(host: str) -> bool:
    """Tell whether every address of a host is a loopback address, which no other machine can reach."""
    found = addresses(host)
    return bool(found) and all(ip_address(address).is_loopback for address in found)
