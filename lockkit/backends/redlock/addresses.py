"""Which nodes a Redlock has, from a URL or from clients of the application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import redis
import redis.asyncio

from lockkit.backends.redis.address import Target
from lockkit.backends.redis.options import (
    check_arguments,
    check_async,
    database,
    warn_of_unverified,
    wrong_url,
)
from lockkit.runtime import Kind
from lockkit.units import Seconds
from lockkit.url import Url

NODES_MAX = 9
"""Each costs a message per call, and nine already survive the failure of four."""


def url_targets(url: Url, options: Mapping[str, Any], driver: Mapping[str, Any], kind: Kind) -> list[Target]:
    """
    Return the nodes of a URL.

    ConfigurationError: The URL is incomplete or has parts that do not belong there, or redis-py does not accept its
    options.
    """
    timeout = options["node_timeout"]
    limits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    arguments = {"db": database(url, url.path.strip("/"), options), **driver, **limits}
    targets = [Target.of(host, arguments, tls=url.base == "redlocks") for host in url.hosts]
    for target in targets[:1]:
        check_arguments(url, target, kind)
    _check_nodes(targets, url.safe_text)
    return [replace(target, tls=targets[0].tls) for target in targets]


def adopt_targets(clients: Sequence[Any], timeout: Seconds, kind: Kind) -> list[Target] | None:
    """
    Return the nodes of a list of redis-py's clients; None if they are something else.

    lockkit opens its own connections beside the clients' pools: those have time limits that suit a single server, and
    lockkit must know whether a node is up before it sends anything.
    """
    check_async(clients, kind)
    client_class = redis.asyncio.Redis if kind == "asyncio" else redis.Redis
    if not clients or not all(isinstance(client, client_class) for client in clients):
        return None
    targets = [Target.lent(client.connection_pool, timeout) for client in clients]
    _check_nodes(targets, url_of(targets))
    warn_of_unverified(targets, kind, url_of(targets))
    return targets


def counted(count: int) -> str:
    """Give a number of nodes for people."""
    return f"{count} node{'' if count == 1 else 's'}"


def url_of(targets: Sequence[Target]) -> str:
    """Return the URL to show for nodes of the application's clients."""
    scheme = "redlocks" if all(target.form == "tls" for target in targets) else "redlock"
    return f"{scheme}://{','.join(target.label for target in targets)}"


def _check_nodes(targets: Sequence[Target], url: str) -> None:
    labels = [target.label for target in targets]
    if not 1 <= len(labels) <= NODES_MAX:
        raise wrong_url(url, f"it has {len(labels)} nodes, and must have 1 to {NODES_MAX}, preferably 3 or 5")
    repeated = next((label for label in labels if labels.count(label) > 1), None)
    if repeated is not None:
        raise wrong_url(url, f"{repeated} is repeated, and must not vote twice: name independent servers")
