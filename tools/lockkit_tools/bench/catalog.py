"""Who is measured on a URL: lockkit's sync and async APIs, libraries that lock on the same servers, and baselines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Self, get_args
from urllib.parse import quote

import lockkit
from lockkit.backend import Capabilities
from lockkit.configuration import profiles, registry
from lockkit.url import parse
from lockkit_tools.bench.subject import Face, Kind, Role, Scope, Subject

_POLL_SECONDS = 0.25
"""Longest back-off of lockkit's own polling, where a backend cannot wake its waiters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """
    A library, or a baseline.

    Attributes:
        schemes: Of the URLs on which it locks.
        label: What people call it.
        target: Its adapter, within `lockkit_tools.bench.adapters`.
        role: Library or baseline.
        scope: Whom it excludes.
        face: Its face.
        module: What must be there to import; empty for a baseline.
        distribution: What is to be installed for it.
        poll: See `Subject.poll`.
        renews: See `Subject.renews`.
        workloads: See `Subject.workloads`.
        kinds: See `Subject.kinds`.
        tuning: See `Subject.tuning`.
        quick: Measured in a first look too.
        mode: For which option ``mode`` of the URL; None: for any, or none.
    """

    schemes: tuple[str, ...]
    label: str
    target: str
    role: Role = "peer"
    scope: Scope = "network"
    face: Face = "blocking"
    module: str = ""
    distribution: str = ""
    poll: float = 0.0
    renews: bool = False
    workloads: tuple[str, ...] | None = None
    kinds: tuple[Kind, ...] = ("lock",)
    tuning: str = ""
    mode: str | None = None
    quick: bool = True

    def subject(self, url: str, group: str) -> Subject:
        """Make the subject for a URL."""
        missing = ""
        if self.module and find_spec(self.module) is None:
            missing = f"not installed: pip install {self.distribution}"
        return Subject(
            label=self.label,
            target=f"lockkit_tools.bench.adapters.{self.target}",
            url=url,
            group=group,
            face=self.face,
            role=self.role,
            scope=self.scope,
            version=_version(self.distribution),
            poll=self.poll,
            renews=self.renews,
            workloads=self.workloads,
            kinds=self.kinds,
            tuning=self.tuning,
            missing=missing,
            imports=_installed(self.module, *_DRIVERS.get(parse(url).scheme, ())),
        )


_DRIVERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "postgresql": ("psycopg",),
        "mysql": ("pymysql",),
        "mariadb": ("pymysql",),
        "zookeeper": ("kazoo.client",),
        "zk": ("kazoo.client",),
    }
)
"""What adapters import when they connect, by the scheme."""

_NODE = ("redis", "valkey", "unix")
_ETCD = ("etcd", "etcd3")
_WAITS_FOR_EVER = "its own limit of the waiting time is lifted"
_POOL = "connection pool of 10,000, no socket timeout"

# Schemes, scope, the interval in which a waiter looks again, whether its heart keeps the lock alive, and the mode.
_TOOZ: tuple[tuple[tuple[str, ...], Scope, float, bool, str | None], ...] = (
    (("file",), "machine", 0.1, False, None),
    (("redis", "valkey"), "network", 0.1, True, None),
    (("zookeeper", "zk"), "network", 0.0, True, None),
    (("etcd", "etcd3"), "network", 1.0, True, None),
    (("postgresql",), "network", 0.0, False, "advisory"),
    (("mysql", "mariadb"), "network", 1.0, False, "advisory"),
)

# Schemes, scope, the API, the adapter, and the interval in which a waiter looks again: it doubles up to the ttl.
_MITHRIL: tuple[tuple[tuple[str, ...], Scope, Face, str, float], ...] = (
    (("file",), "machine", "blocking", "mithril:Mithril", 0.1),
    (_NODE, "network", "blocking", "mithril:Mithril", 0.0),
    (_NODE, "network", "asyncio", "mithril:MithrilAsyncio", 0.0),
)

# Schemes, the driver, what the classes of its baselines are called, and the scope.
_SQL: tuple[tuple[tuple[str, ...], str, str, Scope], ...] = (
    (("postgresql",), "psycopg", "Postgresql", "network"),
    (("mariadb", "mysql"), "PyMySQL", "Mysql", "network"),
)

# Of the standard library: what is in both modules, and the module of each API.
_STANDARD: tuple[tuple[str, Kind], ...] = (("Lock", "lock"), ("Semaphore", "permit"))
_MODULES: tuple[tuple[Face, str], ...] = (("blocking", "threading"), ("asyncio", "asyncio"))

# Ratios are taken to the first baseline of an API.
ENTRIES: tuple[Entry, ...] = (
    *(
        Entry(
            schemes=("memory",),
            label=f"{module}.{name}",
            target=f"memory:{module.capitalize()}{name}",
            role="baseline",
            scope="process",
            face=face,
            kinds=(kind,),
        )
        for name, kind in _STANDARD
        for face, module in _MODULES
    ),
    Entry(
        schemes=("file",),
        label="flock + read + write",
        target="files:Flock",
        role="baseline",
        scope="machine",
        kinds=("lock", "locks"),
    ),
    Entry(
        schemes=("file",),
        label="portalocker",
        target="files:Portalocker",
        scope="machine",
        module="portalocker",
        distribution="portalocker",
        poll=0.25,
        tuning=_WAITS_FOR_EVER,
    ),
    Entry(
        schemes=("file",),
        label="filelock",
        target="files:FileLock",
        scope="machine",
        module="filelock",
        distribution="filelock",
        poll=0.05,
    ),
    Entry(
        schemes=("file",),
        label="filelock",
        target="files:AsyncFileLock",
        scope="machine",
        face="asyncio",
        module="filelock",
        distribution="filelock",
        poll=0.05,
    ),
    Entry(
        schemes=_NODE,
        label="raw socket",
        target="redis:RawRedis",
        role="baseline",
        workloads=("pair", "contention"),
        kinds=("lock", "read", "write", "permit", "locks", "once"),
        tuning="asks again at once while the lock is busy",
    ),
    Entry(
        schemes=_NODE,
        label="raw socket + BLPOP",
        target="redis:RawPushRedis",
        role="baseline",
        workloads=("contention", "handoff", "idle"),
        kinds=("lock", "election"),
    ),
    Entry(
        schemes=_NODE,
        label="redis-py Lock",
        target="redis:RedisPy",
        module="redis",
        distribution="redis",
        poll=0.1,
        tuning=_POOL,
    ),
    Entry(
        schemes=_NODE,
        label="redis-py Lock",
        target="redis:RedisPyAsyncio",
        face="asyncio",
        module="redis",
        distribution="redis",
        poll=0.1,
        tuning=_POOL,
    ),
    Entry(
        schemes=_NODE,
        label="python-redis-lock",
        target="redis:PythonRedisLock",
        module="redis_lock",
        distribution="python-redis-lock",
        renews=True,
        tuning=_POOL,
    ),
    Entry(
        schemes=_NODE,
        label="fencekit",
        target="redis:Fencekit",
        module="fencekit",
        distribution="fencekit",
        poll=0.05,
        tuning=f"{_POOL}, waits for up to a day",
    ),
    *(
        Entry(
            schemes=schemes,
            label="mithril-locks",
            target=target,
            scope=scope,
            face=face,
            module="mithril",
            distribution="mithril-locks",
            poll=poll,
            renews=True,
            tuning=_WAITS_FOR_EVER,
        )
        for schemes, scope, face, target, poll in _MITHRIL
    ),
    Entry(
        schemes=("redlock",),
        label="raw sockets, fenced",
        target="redis:RawFencedRedlock",
        role="baseline",
        poll=0.002,
        workloads=("pair", "contention"),
        tuning="three rounds, each sent to all nodes before an answer is read",
    ),
    Entry(
        schemes=("redlock",),
        label="raw sockets, no token",
        quick=False,
        target="redis:RawRedlock",
        role="baseline",
        poll=0.002,
        workloads=("pair", "contention"),
        tuning="two rounds, each sent to all nodes before an answer is read",
    ),
    *(
        Entry(
            schemes=schemes,
            label=label,
            target=target,
            module=module,
            distribution=distribution,
            poll=0.2,
            tuning=tuning,
            quick=quick,
        )
        # They lock on one node as they do on five.
        for schemes, quick in ((_NODE, False), (("redlock",), True))
        for label, target, module, distribution, tuning in (
            ("pottery Redlock", "redis:Pottery", "pottery", "pottery", _POOL),
            ("redlock-py", "redis:RedlockPy", "redlock", "redlock-py", f"{_POOL}, asked again when it gives up"),
        )
    ),
    Entry(
        schemes=_ETCD,
        label="gRPC, by hand",
        target="etcd:RawEtcd",
        role="baseline",
        workloads=("pair", "contention", "handoff"),
        kinds=("lock", "read", "write", "permit", "locks", "election"),
        tuning="one transaction and one delete; who is late watches the key",
    ),
    Entry(
        schemes=_ETCD,
        label="gRPC, by hand",
        target="etcd:RawEtcdAsyncio",
        face="asyncio",
        role="baseline",
        workloads=("pair", "contention", "handoff"),
        tuning="one transaction and one delete; who is late watches the key",
    ),
    Entry(
        schemes=_ETCD,
        label="pyetcd",
        target="etcd:PyEtcd",
        module="pyetcd",
        distribution="etcd-sdk-python",
        tuning=_WAITS_FOR_EVER,
    ),
    Entry(
        schemes=_ETCD,
        label="etcd3gw",
        target="etcd:Etcd3Gw",
        module="etcd3gw",
        distribution="etcd3gw",
        poll=0.05,
        tuning="asked again while it says no: its `with` enters without the lock",
    ),
    Entry(
        schemes=("zookeeper", "zk"),
        label="kazoo, by hand",
        target="zookeeper:RawZooKeeper",
        kinds=("lock", "locks"),
        role="baseline",
        workloads=("pair", "contention", "handoff"),
        tuning="create, get_children, delete; watches the one before",
    ),
    Entry(
        schemes=("zookeeper", "zk"),
        label="kazoo Lock",
        target="zookeeper:KazooLock",
        module="kazoo",
        distribution="kazoo",
        renews=True,
        kinds=("lock", "read", "write", "permit", "locks", "election"),
    ),
    *(
        Entry(
            schemes=schemes,
            label=f"{library}, by hand",
            target=f"sql:Raw{database}Table",
            kinds=("lock", "locks"),
            role="baseline",
            scope=scope,
            poll=0.002,
            workloads=("pair", "contention"),
            mode="table",
        )
        for schemes, library, database, scope in (*_SQL, (("sqlite",), "sqlite3", "Sqlite", "machine"))
    ),
    *(
        Entry(
            schemes=schemes,
            label=f"{library}, {what}",
            quick=not unfenced,
            target=f"sql_session:Raw{database}{mode.capitalize()}{unfenced}",
            role="baseline",
            workloads=("pair", "contention", "handoff"),
            mode=mode,
        )
        for mode in ("row", "advisory")
        for schemes, library, database, _ in _SQL
        for what, unfenced in (("by hand", ""), ("no token", "Unfenced"))
    ),
    *(
        Entry(
            schemes=("postgresql", "mariadb", "mysql"),
            label=label,
            target=target,
            module="sqlalchemy_dlock",
            distribution="sqlalchemy-dlock",
            tuning=f"{connection}; advisory locks, without token and ttl; no limit on the pool",
            mode=mode,
            # The same lock beside each of lockkit's modes: once is enough for a first look.
            quick=mode == "advisory",
        )
        for mode in ("table", "row", "advisory")
        for label, target, connection in (
            ("sqlalchemy-dlock", "sql:Dlock", "a connection from the engine's pool for each section"),
            ("sqlalchemy-dlock, kept", "sql:DlockKept", "one connection and transaction for all sections"),
        )
    ),
    *(
        Entry(
            schemes=schemes,
            label="tooz",
            target="tooz:Tooz",
            scope=scope,
            module="tooz",
            distribution="tooz",
            poll=poll,
            renews=renews,
            mode=mode,
            quick=False,
            tuning="with its heart beating",
        )
        for schemes, scope, poll, renews, mode in _TOOZ
    ),
)


def subjects(
    urls: Sequence[str],
    *,
    faces: Collection[Face],
    scratch: Mapping[str, Path] | None = None,
    peers: bool = True,
    quick: bool = False,
) -> list[Subject]:
    """List who is measured."""
    locations = {url: _Location.of(url, (scratch or {}).get(url)) for url in urls}
    found = [subject for url in urls for subject in locations[url].lockkit()]
    if peers:
        found += [subject for location in locations.values() for subject in location.others(quick=quick)]
    return _numbered([subject for subject in found if subject.face in faces])


def imports() -> list[Subject]:
    """List whose import is measured."""
    statements = {
        "import lockkit": "import lockkit",
        "connect('memory://')": "import lockkit; lockkit.connect('memory://')",
        "import lockkit.aio": "import lockkit.aio",
        "import asyncio": "import asyncio",
        "import filelock": "import filelock",
        "import portalocker": "import portalocker",
        "import redis.lock": "import redis.lock",
    }
    return [
        Subject(
            label=label,
            target=statement,
            url="",
            group="import",
            face="blocking",
            role="lockkit" if "lockkit" in statement else "peer",
            scope="process",
            version=_version(module) if module != "asyncio" else "",
            workloads=("import",),
            missing="" if find_spec(module) else f"not installed: pip install {module}",
        )
        for label, statement in statements.items()
        for module in [statement.removeprefix("import ").partition(".")[0].partition(";")[0]]
    ]


def lock_directory(url: str) -> Path | None:
    """Find a directory for scratch files on the file system where a ``file:`` URL locks. None: it is no such URL."""
    parsed = parse(url)
    if parsed.scheme != "file":
        return None
    directory = Path(parsed.path) if parsed.path else profiles.default_directory()
    while not directory.is_dir():
        directory = directory.parent
    return directory


@dataclass(frozen=True, slots=True)
class _Location:
    """
    Where subjects lock.

    Attributes:
        url: For lockkit and all others.
        scheme: Its scheme.
        group: What people call it, without password.
        capabilities: Of lockkit's backend there.
    """

    url: str
    scheme: str
    group: str
    capabilities: Capabilities

    @classmethod
    def of(cls, url: str, scratch: Path | None) -> Self:
        with lockkit.connect(url) as client:
            group, capabilities = client.url, client.capabilities
        if scratch is not None:
            url = f"file://{quote(str(scratch))}"
        return cls(url, parse(url).scheme, group, capabilities)

    def lockkit(self) -> Iterator[Subject]:
        faces: tuple[tuple[Face, str], ...] = (("blocking", "Blocking"), ("asyncio", "Asyncio"))
        lacks = _lacks(self.capabilities)
        for face, name in faces:
            yield Subject(
                label="lockkit",
                target=f"lockkit_tools.bench.adapters.own:{name}",
                url=self.url,
                group=self.group,
                face=face,
                role="lockkit",
                scope=self.capabilities.scope,
                version=lockkit.__version__,
                poll=_POLL_SECONDS if self.capabilities.wakeup == "poll" else 0.0,
                renews=True,
                kinds=tuple(kind for kind in get_args(Kind) if kind not in lacks),
                lacks=lacks,
                session_each=self.capabilities.crash_release == "connection",
                imports=(
                    registry.find(self.scheme, self.mode).__module__,
                    *_installed(*_DRIVERS.get(self.scheme, ())),
                ),
            )

    @property
    def mode(self) -> str | None:
        """Of the backend, where it has several."""
        return dict(parse(self.url).query).get("mode") or registry.modes(self.scheme)[0]

    def others(self, *, quick: bool) -> Iterator[Subject]:
        # By the whole scheme: on redis+cluster:// these libraries would talk to one node only.
        return (
            entry.subject(self.url, self.group)
            for entry in ENTRIES
            if self.scheme in entry.schemes and entry.mode in {None, self.mode} and (entry.quick or not quick)
        )


def _lacks(capabilities: Capabilities) -> dict[str, str]:
    """Say which primitives lockkit does not offer on a backend, and why."""
    has = {
        "read": (capabilities.shared_mode, "read locks (capabilities.shared_mode is False)"),
        "permit": (capabilities.permits != "none", "semaphores (capabilities.permits is 'none')"),
        "once": (capabilities.notes, "notes, which once needs (capabilities.notes is False)"),
    }
    return {kind: f"the backend has no {what}" for kind, (there, what) in has.items() if not there}


def _numbered(found: list[Subject]) -> list[Subject]:
    """Tell equal entries apart."""
    seen: dict[str, int] = {}
    numbered = []
    for subject in found:
        seen[subject.key] = number = seen.get(subject.key, 0) + 1
        numbered.append(replace(subject, number=number))
    return numbered


def _installed(*modules: str) -> tuple[str, ...]:
    return tuple(module for module in modules if module and find_spec(module.partition(".")[0]) is not None)


def _version(distribution: str) -> str:
    if not distribution:
        return ""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
