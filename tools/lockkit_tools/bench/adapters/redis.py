"""
Redis: raw sockets as baselines, and the Python libraries.

Every library gets what makes it fastest and lets it wait for ever, without changing its algorithm or its polling.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from lockkit.units import Seconds
from lockkit_tools.bench.adapters.base import AsyncAdapter, BlockingAdapter, InTurn, several_names
from lockkit_tools.bench.redis_connection import (
    FENCE,
    FENCED_SET,
    PERMIT,
    READ,
    RELEASE,
    RELEASE_AND_SIGNAL,
    WRITE,
    RawConnection,
    connect_to,
    encode,
    node_urls,
)
from lockkit_tools.bench.subject import Kind

_CONNECTIONS_MAX = 10_000
"""Above any number of waiters: redis-py's default of 100 ends a library's waiters with an error."""


class _Bracket:
    """A context manager of two methods."""

    def enter(self) -> object:
        """Lock."""
        raise NotImplementedError

    def leave(self) -> None:
        """Unlock."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


# -- baselines ---------------------------------------------------------------------------------------------------------


class RawRedis(BlockingAdapter):
    """
    ``SET NX PX`` and a guarded delete by ``EVALSHA`` on one raw socket. Asks again at once while it is busy.

    Readers and permits are members of a sorted set, whose scores are their ends. A waiting writer stops no readers.
    """

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return _RawLock(connect_to(self.url), name, self.ttl)

    def primitive(self, kind: Kind, name: str, count: int = 1) -> AbstractContextManager[Any]:
        if kind == "lock":
            return self.lock(name)
        connection = connect_to(self.url)
        made: dict[Kind, Callable[[], AbstractContextManager[Any]]] = {
            "read": lambda: _RawShare(connection, name, self.ttl, READ),
            "write": lambda: _RawWrite(connection, name, self.ttl),
            "permit": lambda: _RawShare(connection, name, self.ttl, PERMIT, count),
            "once": lambda: _RawDone(connection, name),
            "locks": lambda: InTurn([_RawLock(connection, one, self.ttl) for one in several_names(name, count)]),
        }
        return made[kind]()


class _RawLock(_Bracket):
    def __init__(self, connection: RawConnection, name: str, ttl: Seconds) -> None:
        self._connection = connection
        self._release_sha = connection.load(RELEASE)
        self._name = name.encode()
        self._ttl_ms = b"%d" % (ttl * 1000)
        self._owner = b""

    def enter(self) -> object:
        owner = self._owner = secrets.token_hex(16).encode()
        request = encode(b"SET", self._name, owner, b"NX", b"PX", self._ttl_ms)
        while self._connection.ask(request) is None:
            pass
        return self

    def leave(self) -> None:
        self._connection.ask(encode(b"EVALSHA", self._release_sha, b"1", self._name, self._owner))


class _RawShare(_Bracket):
    """A reader, or a permit: a member of a sorted set."""

    def __init__(self, connection: RawConnection, name: str, ttl: Seconds, script: bytes, permits: int = 1) -> None:
        self._connection = connection
        self._sha = connection.load(script)
        self._set = b"{%b}:shares" % name.encode()
        # Of permits the set is the only key, and comes first; of readers the writer's does.
        self._keys = (b"1", self._set) if script is PERMIT else (b"2", b"{%b}" % name.encode(), self._set)
        self._arguments = (b"%d" % (ttl * 1000), b"%d" % permits)
        self._owner = b""

    def enter(self) -> object:
        owner = self._owner = secrets.token_hex(16).encode()
        request = encode(b"EVALSHA", self._sha, *self._keys, owner, *self._arguments)
        while self._connection.ask(request) == 0:
            pass
        return self

    def leave(self) -> None:
        self._connection.ask(encode(b"ZREM", self._set, self._owner))


class _RawWrite(_Bracket):
    """A writer, beside `_RawShare`."""

    def __init__(self, connection: RawConnection, name: str, ttl: Seconds) -> None:
        self._connection = connection
        self._sha, self._release_sha = connection.load(WRITE), connection.load(RELEASE)
        self._key = b"{%b}" % name.encode()
        self._set = self._key + b":shares"
        self._ttl_ms = b"%d" % (ttl * 1000)
        self._owner = b""

    def enter(self) -> object:
        owner = self._owner = secrets.token_hex(16).encode()
        request = encode(b"EVALSHA", self._sha, b"2", self._key, self._set, owner, self._ttl_ms)
        while self._connection.ask(request) == 0:
            pass
        return self

    def leave(self) -> None:
        self._connection.ask(encode(b"EVALSHA", self._release_sha, b"1", self._key, self._owner))


class _RawDone(_Bracket):
    """The result of a key: one ``GET``."""

    def __init__(self, connection: RawConnection, name: str) -> None:
        self._connection = connection
        self._get = encode(b"GET", name.encode())
        self._set = encode(b"SET", name.encode(), b"1", b"EX", b"600")

    def enter(self) -> object:
        if self._connection.ask(self._get) is None:
            self._connection.ask(self._set)
        return self

    def leave(self) -> None:
        """Nothing is held."""


class RawPushRedis(BlockingAdapter):
    """As `RawRedis`, but a waiter sleeps in ``BLPOP`` on a list that a release pushes to."""

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return _RawPushLock(connect_to(self.url), name, self.ttl)

    def primitive(self, kind: Kind, name: str, count: int = 1) -> AbstractContextManager[Any]:
        """See `BlockingAdapter.primitive`. A leader is who has the lock."""
        del count
        assert kind in {"lock", "election"}, kind
        return self.lock(name)


class _RawPushLock(_RawLock):
    def __init__(self, connection: RawConnection, name: str, ttl: Seconds) -> None:
        super().__init__(connection, name, ttl)
        self._release_sha = connection.load(RELEASE_AND_SIGNAL)
        self._signal = self._name + b":signal"
        self._wait = encode(b"BLPOP", self._signal, b"%d" % max(1, int(ttl)))

    def enter(self) -> object:
        owner = self._owner = secrets.token_hex(16).encode()
        request = encode(b"SET", self._name, owner, b"NX", b"PX", self._ttl_ms)
        while self._connection.ask(request) is None:
            self._connection.ask(self._wait)
        return self

    def leave(self) -> None:
        self._connection.ask(encode(b"EVALSHA", self._release_sha, b"2", self._name, self._signal, self._owner))


class RawRedlock(BlockingAdapter):
    """One round of ``SET NX PX`` and one of deletes, each sent to all nodes before any answer is read."""

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return _RawRedlock([connect_to(url) for url in node_urls(self.url)], name, self.ttl)


class _RawRedlock(_Bracket):
    def __init__(self, connections: list[RawConnection], name: str, ttl: Seconds) -> None:
        self._connections = connections
        self._quorum = len(connections) // 2 + 1
        self._name = name.encode()
        self._ttl_ms = b"%d" % (ttl * 1000)
        self._owner = b""
        self._release_sha = _load(connections, RELEASE)

    def enter(self) -> object:
        while True:
            owner = self._owner = secrets.token_hex(16).encode()
            if self._granted(owner):
                return self
            self.leave()
            # Apart, or the nodes are split between contenders again and again.
            time.sleep(secrets.randbelow(2000) / 1e6)

    def _granted(self, owner: bytes) -> bool:
        answers = self._scatter(encode(b"SET", self._name, owner, b"NX", b"PX", self._ttl_ms))
        return sum(answer is not None for answer in answers) >= self._quorum

    def leave(self) -> None:
        self._scatter(encode(b"EVALSHA", self._release_sha, b"1", self._name, self._owner))

    def _scatter(self, request: bytes) -> list[object]:
        for connection in self._connections:
            connection.send(request)
        return [connection.receive() for connection in self._connections]


def _load(connections: list[RawConnection], script: bytes) -> bytes:
    """Load a script on every node; its name is the same everywhere."""
    (sha,) = {connection.load(script) for connection in connections}
    return sha


class RawFencedRedlock(BlockingAdapter):
    """As `RawRedlock`, with the second round that a fencing token takes."""

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return _RawFencedRedlock([connect_to(url) for url in node_urls(self.url)], name, self.ttl)

    def token(self, entered: Any) -> int | None:  # noqa: ANN401 - see Adapter
        return int(entered.token)


class _RawFencedRedlock(_RawRedlock):
    def __init__(self, connections: list[RawConnection], name: str, ttl: Seconds) -> None:
        super().__init__(connections, name, ttl)
        self._counter = b"{%b}:fence" % self._name
        self._set_sha = _load(connections, FENCED_SET)
        self._fence_sha = _load(connections, FENCE)
        self.token = 0

    def _granted(self, owner: bytes) -> bool:
        keys = (b"2", self._name, self._counter)
        answers = self._scatter(encode(b"EVALSHA", self._set_sha, *keys, owner, self._ttl_ms))
        counters = [answer for answer in answers if isinstance(answer, int) and answer > 0]
        if len(counters) < self._quorum:
            return False
        self.token = max(counters) + 1
        confirmed = self._scatter(encode(b"EVALSHA", self._fence_sha, *keys, owner, b"%d" % self.token))
        return confirmed.count(1) >= self._quorum


# -- libraries ---------------------------------------------------------------------------------------------------------


def redis_client(url: str, module: str = "redis") -> Any:  # noqa: ANN401 - generic over settings that do not matter here
    """Connect with redis-py, or with its asyncio client."""
    # Without socket_timeout: redis-py 8 gives up a BLPOP after 5 s, and with it python-redis-lock's waiters.
    return import_module(module).Redis.from_url(url, socket_timeout=None, max_connections=_CONNECTIONS_MAX)


class RedisPy(BlockingAdapter):
    """redis-py's ``Lock``."""

    async def open(self) -> None:
        self._client = redis_client(self.url)

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        lock: AbstractContextManager[Any] = self._client.lock(name, timeout=self.ttl)
        return lock


class RedisPyAsyncio(AsyncAdapter):
    """redis-py's asyncio ``Lock``."""

    async def open(self) -> None:
        self._client = redis_client(self.url, "redis.asyncio")

    def lock(self, name: str, *, renew: bool = False) -> AbstractAsyncContextManager[Any]:
        del renew
        lock: AbstractAsyncContextManager[Any] = self._client.lock(name, timeout=self.ttl)
        return lock

    async def close(self) -> None:
        await self._client.aclose()


class PythonRedisLock(BlockingAdapter):
    """python-redis-lock's ``Lock``."""

    async def open(self) -> None:
        self._client = redis_client(self.url)
        self._module: Any = import_module("redis_lock")

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        """See `BlockingAdapter.lock`. Its expiry is in whole seconds."""
        lock: AbstractContextManager[Any] = self._module.Lock(
            self._client, name, expire=max(1, int(self.ttl)), auto_renewal=renew
        )
        return lock

    def still_held(self, lock: Any, entered: Any) -> bool | None:  # noqa: ANN401 - see Adapter
        """By asking the server whose the key is."""
        del entered
        return bool(lock.get_owner_id() == lock.id)


class Fencekit(BlockingAdapter):
    """fencekit's ``DistributedLock``."""

    async def open(self) -> None:
        self._locks: Any = import_module("fencekit").DistributedLock(redis_client(self.url))

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return _FencekitLock(self._locks, name, self.ttl)

    def token(self, entered: Any) -> int | None:  # noqa: ANN401 - see Adapter
        return int(entered.handle.token.value)


class _FencekitLock(_Bracket):
    """Each section is a call of ``acquire`` and one of ``release``, as in its ``hold``."""

    def __init__(self, locks: Any, name: str, ttl: Seconds) -> None:  # noqa: ANN401 - the library's
        self._locks, self._name = locks, name
        self._ttl, self._wait = timedelta(seconds=ttl), timedelta(days=1)
        self.handle: Any = None

    def enter(self) -> object:
        self.handle = self._locks.acquire(self._name, ttl=self._ttl, blocking=True, wait=self._wait)
        return self

    def leave(self) -> None:
        self._locks.release(self.handle)


class Pottery(BlockingAdapter):
    """pottery's ``Redlock``, over one node or several."""

    async def open(self) -> None:
        self._masters = {redis_client(url) for url in node_urls(self.url)}
        self._module: Any = import_module("pottery")

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        lock: AbstractContextManager[Any] = self._module.Redlock(
            key=name, masters=self._masters, auto_release_time=self.ttl
        )
        return lock


class RedlockPy(BlockingAdapter):
    """redlock-py, over one node or several."""

    async def open(self) -> None:
        clients = [redis_client(url) for url in node_urls(self.url)]
        self._manager: Any = import_module("redlock").Redlock(clients)

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return _RedlockPyLock(self._manager, name, int(self.ttl * 1000))


class _RedlockPyLock(_Bracket):
    """It gives up after three tries: a caller who wants the lock asks again."""

    def __init__(self, manager: Any, name: str, ttl_ms: int) -> None:  # noqa: ANN401 - an untyped library
        self._manager = manager
        self._name = name
        self._ttl_ms = ttl_ms
        self._lock: Any = None

    def enter(self) -> object:
        while not (lock := self._manager.lock(self._name, self._ttl_ms)):
            pass
        self._lock = lock
        return lock

    def leave(self) -> None:
        self._manager.unlock(self._lock)
