"""Who is measured on a URL: lockkit's sync and async APIs, libraries that lock on the same servers, and baselines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args
from urllib.parse import quote

import lockkit
from lockkit.backend import Capabilities
from lockkit.configuration import profiles, registry
from lockkit.url import parse
from lockkit_tools.bench.subject import Face, Kind, Role, Scope, Subject


@dataclass(frozen=True, slots=True)
class Entry:
    """A library, or a baseline, and where it is measured."""

    schemes: tuple[str, ...]  # of the URLs on which it locks
    module: str  # what must be there to import; empty for a baseline
    distribution: str  # what is to be installed for it; empty for a baseline
    mode: str | None  # for which option ``mode`` of the URL; None: for any, or none
    quick: bool  # measured in a first look too
    template: Subject  # the subject, but for what depends on URL and machine

    def subject(self, url: str, group: str) -> Subject:
        """Make the subject for a URL."""
        missing = bool(self.module) and not find_spec(self.module)
        return replace(
            self.template,
            url=url,
            group=group,
            version=_version(self.distribution),
            missing=f"not installed: pip install {self.distribution}" if missing else "",
            imports=_installed(self.module, *_DRIVERS.get(parse(url).scheme, ())),
        )


def _entry(
    schemes: tuple[str, ...],
    label: str,
    target: str,
    module: str = "",
    *,
    distribution: str = "",
    mode: str | None = None,
    quick: bool = True,
    **about: Any,
) -> Entry:
    role: Role = "peer" if module else "baseline"
    about = {"face": "blocking", "scope": "network", "role": role, **about}
    template = Subject(label=label, target=f"lockkit_tools.bench.adapters.{target}", url="", group="", **about)
    return Entry(schemes, module, distribution or module, mode, quick, template)


_DRIVERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "postgresql": ("psycopg",),
        "mysql": ("pymysql",),
        "mariadb": ("pymysql",),
        "zookeeper": ("kazoo.client",),
        "zk": ("kazoo.client",),
        "s3": ("obstore",),
    }
)
"""What adapters import when they connect, by the scheme."""

_NODE, _REDLOCK, _FILE = ("redis", "valkey", "unix"), ("redlock",), ("file",)
_ETCD, _ZOOKEEPER = ("etcd", "etcd3"), ("zookeeper", "zk")

_PAIRS = ("pair", "contention")
_WAITS = (*_PAIRS, "handoff")

_WAITS_FOR_EVER = "its own limit of the waiting time is lifted"
_POOL = "connection pool of 10,000, no socket timeout"
_WATCHES = "one transaction and one delete; who is late watches the key"

# Schemes, scope, the interval in which a waiter looks again, whether its heart keeps the lock alive, and the mode.
_TOOZ: tuple[tuple[tuple[str, ...], Scope, float, bool, str | None], ...] = (
    (_FILE, "machine", 0.1, False, None),
    (("redis", "valkey"), "network", 0.1, True, None),
    (_ZOOKEEPER, "network", 0.0, True, None),
    (_ETCD, "network", 1.0, True, None),
    (("postgresql",), "network", 0.0, False, "advisory"),
    (("mysql", "mariadb"), "network", 1.0, False, "advisory"),
)

# Schemes, scope, the API, the adapter, and the interval in which a waiter looks again.
_MITHRIL: tuple[tuple[tuple[str, ...], Scope, Face, str, float], ...] = (
    (_FILE, "machine", "blocking", "mithril:Mithril", 0.1),
    (_NODE, "network", "blocking", "mithril:Mithril", 0.0),
    (_NODE, "network", "asyncio", "mithril:MithrilAsyncio", 0.0),
)

# Schemes, the driver, what the classes of its baselines are called, and the scope.
_SQL: tuple[tuple[tuple[str, ...], str, str, Scope], ...] = (
    (("postgresql",), "psycopg", "Postgresql", "network"),
    (("mariadb", "mysql"), "PyMySQL", "Mysql", "network"),
)

# Ratios are taken to the first baseline of an API.
# fmt: off
ENTRIES: tuple[Entry, ...] = (
    _entry(("memory",), "threading.Lock", "memory:Threading", scope="process"),
    _entry(("memory",), "asyncio.Lock", "memory:Asyncio", scope="process", face="asyncio"),
    _entry(("memory",), "threading.Semaphore", "memory:Threading", scope="process", kinds=("permit",)),
    _entry(("memory",), "asyncio.Semaphore", "memory:Asyncio", scope="process", face="asyncio", kinds=("permit",)),
    _entry(_FILE, "flock + read + write", "files:Flock", scope="machine", kinds=("lock", "locks")),
    _entry(
        _FILE, "portalocker", "files:Portalocker", "portalocker", scope="machine", poll=0.25, tuning=_WAITS_FOR_EVER
    ),
    _entry(_FILE, "filelock", "files:FileLock", "filelock", scope="machine", poll=0.05),
    _entry(_FILE, "filelock", "files:AsyncFileLock", "filelock", scope="machine", face="asyncio", poll=0.05),
    _entry(
        _NODE, "raw socket", "redis:RawRedis", workloads=_PAIRS, tuning="asks again at once while the lock is busy",
        kinds=("lock", "read", "write", "permit", "locks", "once"),
    ),
    _entry(
        _NODE, "raw socket + BLPOP", "redis:RawPushRedis",
        workloads=("contention", "handoff", "idle"), kinds=("lock", "election"),
    ),
    _entry(_NODE, "redis-py Lock", "redis:RedisPy", "redis", poll=0.1, tuning=_POOL),
    _entry(_NODE, "redis-py Lock", "redis:RedisPyAsyncio", "redis", face="asyncio", poll=0.1, tuning=_POOL),
    _entry(
        _NODE, "python-redis-lock", "redis:PythonRedisLock", "redis_lock",
        distribution="python-redis-lock", renews=True, tuning=_POOL,
    ),
    _entry(_NODE, "fencekit", "redis:Fencekit", "fencekit", poll=0.05, tuning=f"{_POOL}, waits for up to a day"),
    *(
        _entry(
            schemes, "mithril-locks", target, "mithril", distribution="mithril-locks",
            scope=scope, face=face, poll=poll, renews=True, tuning=_WAITS_FOR_EVER,
        )
        # The interval doubles up to the ttl.
        for schemes, scope, face, target, poll in _MITHRIL
    ),
    _entry(
        _REDLOCK, "raw sockets, fenced", "redis:RawFencedRedlock", workloads=_PAIRS, poll=0.002,
        tuning="three rounds, each sent to all nodes before an answer is read",
    ),
    _entry(
        _REDLOCK, "raw sockets, no token", "redis:RawRedlock", workloads=_PAIRS, poll=0.002, quick=False,
        tuning="two rounds, each sent to all nodes before an answer is read",
    ),
    *(
        _entry(schemes, label, target, module, distribution=distribution, poll=0.2, tuning=tuning, quick=quick)
        # They lock on one node as they do on five.
        for schemes, quick in ((_NODE, False), (_REDLOCK, True))
        for label, target, module, distribution, tuning in (
            ("pottery Redlock", "redis:Pottery", "pottery", "pottery", _POOL),
            ("redlock-py", "redis:RedlockPy", "redlock", "redlock-py", f"{_POOL}, asked again when it gives up"),
        )
    ),
    _entry(
        _ETCD, "gRPC, by hand", "etcd:RawEtcd", workloads=_WAITS, tuning=_WATCHES,
        kinds=("lock", "read", "write", "permit", "locks", "election"),
    ),
    _entry(_ETCD, "gRPC, by hand", "etcd:RawEtcdAsyncio", face="asyncio", workloads=_WAITS, tuning=_WATCHES),
    _entry(_ETCD, "pyetcd", "etcd:PyEtcd", "pyetcd", distribution="etcd-sdk-python", tuning=_WAITS_FOR_EVER),
    _entry(
        _ETCD, "etcd3gw", "etcd:Etcd3Gw", "etcd3gw", poll=0.05,
        tuning="asked again while it says no: its `with` enters without the lock",
    ),
    _entry(
        _ZOOKEEPER, "kazoo, by hand", "zookeeper:RawZooKeeper", workloads=_WAITS, kinds=("lock", "locks"),
        tuning="create, get_children, delete; watches the one before",
    ),
    _entry(
        _ZOOKEEPER, "kazoo Lock", "zookeeper:KazooLock", "kazoo", renews=True,
        kinds=("lock", "read", "write", "permit", "locks", "election"),
    ),
    *(
        _entry(
            schemes, f"{library}, by hand", f"sql:Raw{database}Table", mode="table",
            scope=scope, poll=0.002, workloads=_PAIRS, kinds=("lock", "locks"),
        )
        for schemes, library, database, scope in (*_SQL, (("sqlite",), "sqlite3", "Sqlite", "machine"))
    ),
    *(
        _entry(
            schemes, f"{library}, {what}", f"sql:Raw{database}{mode.capitalize()}{unfenced}",
            mode=mode, quick=not unfenced, workloads=_WAITS,
        )
        for mode in ("row", "advisory")
        for schemes, library, database, _ in _SQL
        for what, unfenced in (("by hand", ""), ("no token", "Unfenced"))
    ),
    *(
        _entry(
            ("postgresql", "mariadb", "mysql"), label, target, "sqlalchemy_dlock", distribution="sqlalchemy-dlock",
            # The same lock beside each of lockkit's modes: once is enough for a first look.
            mode=mode, quick=mode == "advisory",
            tuning=f"{connection}; advisory locks, without token and ttl; no limit on the pool",
        )
        for mode in ("table", "row", "advisory")
        for label, target, connection in (
            ("sqlalchemy-dlock", "sql:Dlock", "a connection from the engine's pool for each section"),
            ("sqlalchemy-dlock, kept", "sql:DlockKept", "one connection and transaction for all sections"),
        )
    ),
    *(
        _entry(
            schemes, "tooz", "tooz:Tooz", "tooz",
            scope=scope, poll=poll, renews=renews, mode=mode, quick=False, tuning="with its heart beating",
        )
        for schemes, scope, poll, renews, mode in _TOOZ
    ),
)
# fmt: on


def subjects(
    urls: Sequence[str],
    *,
    faces: Collection[Face],
    scratch: Mapping[str, Path] | None = None,
    peers: bool = True,
    quick: bool = False,
) -> list[Subject]:
    """List who is measured."""
    found, others = list[Subject](), list[Subject]()
    for given in dict.fromkeys(urls):
        with lockkit.connect(given) as client:
            group, can = client.url, client.capabilities
        url = f"file://{quote(str(scratch[given]))}" if scratch and given in scratch else given
        scheme, mode = parse(url).scheme, dict(parse(url).query).get("mode")
        mode = mode or registry.modes(scheme)[0]
        found += list(_lockkit(url, group, can, mode)) * urls.count(given)
        # By the whole scheme: on redis+cluster:// these libraries would talk to one node only.
        others += [
            entry.subject(url, group)
            for entry in ENTRIES
            if scheme in entry.schemes and entry.mode in {None, mode} and (entry.quick or not quick)
        ]
    return _numbered([subject for subject in found + (others if peers else []) if subject.face in faces])


def _lockkit(url: str, group: str, can: Capabilities, mode: str | None) -> Iterator[Subject]:
    lacks = _lacks(can)
    scheme = parse(url).scheme
    backend = registry.find(scheme, mode)
    for face in get_args(Face):
        yield Subject(
            label="lockkit",
            target=f"lockkit_tools.bench.adapters.own:{face.capitalize()}",
            url=url,
            group=group,
            face=face,
            role="lockkit",
            scope=can.scope,
            version=lockkit.__version__,
            poll=backend.poll_seconds if can.wakeup == "poll" else 0.0,
            ttl_min=can.min_ttl,
            renews=True,
            kinds=tuple(kind for kind in get_args(Kind) if kind not in lacks),
            lacks=lacks,
            session_each=can.crash_release == "connection",
            imports=(backend.__module__, *_installed(*_DRIVERS.get(scheme, ()))),
        )


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
