"""Finds who can be asked what a server does: one class for each kind of server, by the URL's scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockkit.url import parse
from lockkit_tools.bench.addresses import addresses, why_not_through
from lockkit_tools.bench.machine import file_system
from lockkit_tools.bench.observer import Observer
from lockkit_tools.bench.redis_connection import node_urls


class _Directory(Observer):
    """Lock files: what they lie on."""

    def __init__(self, url: str) -> None:
        self._path = Path(parse(url).path)

    def about(self) -> dict[str, str]:
        found = file_system(self._path)
        return {"files on": found} if found else {}


def watch(url: str) -> Observer:
    """Make the observer for a URL; one that gives no figures where the server cannot be asked."""
    if not url:
        return Observer()
    parsed = parse(url)
    if parsed.base in _REDIS:
        return _load("server_redis:RedisObserver")(node_urls(url)) if parsed.driver is None else Observer()
    if parsed.base == "file":
        return _Directory(url)
    if parsed.base == "sqlite":
        return _load("server_sql:SqliteObserver")(url)
    # Servers with certificates, and those behind a Unix socket, are not asked.
    if parsed.base in _NETWORK and not why_not_through(url):
        return _NETWORK[parsed.base](url)
    return Observer()


def _load(target: str) -> Callable[..., Observer]:
    """Import a class when it is wanted: the processes that lock load this module too, and must start quickly."""
    module, _, name = target.partition(":")
    found: Any = getattr(import_module(f"lockkit_tools.bench.{module}"), name)
    return found  # type: ignore[no-any-return]


def _zookeeper(url: str) -> Observer:
    return _load("server_quorum:ZooKeeperObserver")(addresses(url))


def _etcd(url: str) -> Observer:
    return _load("server_quorum:EtcdObserver")(addresses(url))


def _postgresql(url: str) -> Observer:
    return _load("server_sql:PostgresObserver")(url) if find_spec("psycopg") else Observer()


def _mysql(url: str) -> Observer:
    return _load("server_sql:MysqlObserver")(url) if find_spec("pymysql") else Observer()


_REDIS = ("redis", "valkey", "unix", "redlock")

_NETWORK: Mapping[str, Callable[[str], Observer]] = MappingProxyType(
    {
        "zookeeper": _zookeeper,
        "zk": _zookeeper,
        "etcd": _etcd,
        "etcd3": _etcd,
        "postgresql": _postgresql,
        "mysql": _mysql,
        "mariadb": _mysql,
    }
)
