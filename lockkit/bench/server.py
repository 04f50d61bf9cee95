"""Finds who can be asked what a server does: one class for each kind of server, by the URL's scheme."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lockkit.bench.machine import file_system
from lockkit.bench.observer import Observer
from lockkit.bench.places import addresses, why_not_through
from lockkit.bench.server_quorum import EtcdObserver, ZooKeeperObserver
from lockkit.bench.server_redis import RedisObserver
from lockkit.bench.server_sql import MysqlObserver, PostgresObserver, SqliteObserver
from lockkit.bench.wire import node_urls
from lockkit.url import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["watch"]

_REDIS = ("redis", "valkey", "unix", "redlock")


class _Directory(Observer):
    """Lock files: what they lie on."""

    def __init__(self, url: str) -> None:
        self._path = Path(parse(url).path)

    def about(self) -> dict[str, str]:
        """See `Observer.about`."""
        found = file_system(self._path)
        return {"files on": found} if found else {}


def watch(url: str) -> Observer:
    """
    Make the observer for a URL; one that gives no figures where the server cannot be asked.

    Raises:
        OSError: It could be asked, but does not answer.
    """
    if not url:
        return Observer()
    parsed = parse(url)
    if parsed.base in _REDIS:
        return RedisObserver(node_urls(url)) if parsed.driver is None else Observer()
    driver, make = _MAKERS.get(parsed.base, ("", _nobody))
    reachable = not why_not_through(url) or parsed.base in _EMBEDDED
    return make(url) if reachable and (not driver or find_spec(driver)) else Observer()


def _nobody(_: str) -> Observer:
    return Observer()


_EMBEDDED = ("sqlite", "file")
_MAKERS: Mapping[str, tuple[str, Callable[[str], Observer]]] = {
    "zookeeper": ("", lambda url: ZooKeeperObserver(addresses(url))),
    "zk": ("", lambda url: ZooKeeperObserver(addresses(url))),
    "etcd": ("", lambda url: EtcdObserver(addresses(url))),
    "etcd3": ("", lambda url: EtcdObserver(addresses(url))),
    "postgresql": ("psycopg", PostgresObserver),
    "mysql": ("pymysql", MysqlObserver),
    "mariadb": ("pymysql", MysqlObserver),
    "sqlite": ("", SqliteObserver),
    "file": ("", _Directory),
}
"""By scheme: the driver that must be there, and the class. Servers with certificates are not asked."""
