"""Where a URL leads: the servers in it, and the same URL with other ones in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from lockkit.url import parse

DEFAULT_PORTS: Mapping[str, int] = MappingProxyType(
    {
        "redis": 6379,
        "valkey": 6379,
        "redlock": 6379,
        "zookeeper": 2181,
        "zk": 2181,
        "etcd": 2379,
        "etcd3": 2379,
        "postgresql": 5432,
        "mysql": 3306,
        "mariadb": 3306,
    }
)
"""Of the URL schemes whose servers can be put behind a proxy."""


def addresses(url: str) -> list[tuple[str, int]]:
    """Give host and port of every server of a URL; empty if it has none, or their default port is not known."""
    parsed = parse(url)
    default = DEFAULT_PORTS.get(parsed.base)
    found = [(host.host, host.port or default) for host in parsed.hosts]
    return [(host, port) for host, port in found if port is not None] if default else []


def redirected(url: str, new_addresses: Sequence[str]) -> str:
    """Give the URL with other servers, and all else as it is."""
    scheme, _, rest = url.partition("://")
    end = min((index for index in (rest.find("/"), rest.find("?")) if index >= 0), default=len(rest))
    users = [part.rpartition("@")[:2] for part in rest[:end].split(",")]
    hosts = [f"{user}{sign}{address}" for (user, sign), address in zip(users, new_addresses, strict=True)]
    return f"{scheme}://{','.join(hosts)}{rest[end:]}"


def why_not_through(url: str) -> str:
    """Say why the servers of a URL cannot be put behind a proxy; empty if they can."""
    parsed = parse(url)
    if parsed.base.startswith("redis") and parsed.driver in {"sentinel", "cluster"}:
        return "its servers tell clients where to go: past the proxy"
    if not addresses(url):
        return "the URL names no server that a proxy could stand in for"
    if any(name.startswith("ssl") or name in {"ca", "use_ssl"} for name, _ in parsed.query):
        return "its certificate is the server's, not the proxy's"
    return ""


def title(group: str) -> str:
    """Name a place for a person: ``postgresql, mode=row``."""
    if ":" not in group:
        return group
    url = parse(group.partition(" ")[0])  # object stores show their endpoint after it
    mode = [f"mode={value}" for name, value in url.query if name == "mode"]
    nodes = [f"{len(url.hosts)} nodes"] if len(url.hosts) > 1 else []
    return ", ".join([url.scheme, *mode, *nodes])
