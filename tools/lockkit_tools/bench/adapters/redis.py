"""
Redis: raw sockets as baselines, and the Python libraries.

Every library gets what makes it fastest and lets it wait for ever, without changing its algorithm or its polling.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module

from lockkit_tools.bench.adapters.base import Adapter, AsyncAdapter, Bracket, Library, in_turn, several_names
from lockkit_tools.bench.redis_connection import (
    FENCE,
    FENCED_SET,
    PERMIT,
    READ,
    RELEASE,
    RELEASE_AND_SIGNAL,
    WRITE,
    connect_to,
    node_urls,
)
from lockkit_tools.servers.resp import Answer, RespConnection, encode

_CONNECTIONS_MAX = 10_000
"""Above any number of waiters: redis-py's default of 100 ends a library's waiters with an error."""


# -- baselines ---------------------------------------------------------------------------------------------------------


class RawRedis(Adapter):
    """
    ``SET NX PX`` and a guarded delete by ``EVALSHA`` on one raw socket. Asks again at once while it is busy.

    Readers and permits are members of a sorted set, whose scores are their ends. A waiting writer stops no readers.
    """

    def lock(self, name: str) -> Library:
        return self._lock(connect_to(self.url), name)

    def locks(self, name: str, count: int) -> Library:
        connection = connect_to(self.url)
        return in_turn([self._lock(connection, one) for one in several_names(name, count)])

    def read(self, name: str) -> Library:
        return self._scripted(READ, b"2", b"{%b}" % name.encode(), _shares(name))

    def write(self, name: str) -> Library:
        return self._scripted(WRITE, b"2", b"{%b}" % name.encode(), _shares(name))

    def permit(self, name: str, count: int) -> Library:
        return self._scripted(PERMIT, b"1", _shares(name), permits=count)

    def once(self, name: str) -> Library:
        """The result of a key: one ``GET``. Nothing is held."""
        connection = connect_to(self.url)
        get, put = encode(b"GET", name.encode()), encode(b"SET", name.encode(), b"1", b"EX", b"600")
        return Bracket(lambda: connection.ask(put) if connection.ask(get) is None else None, lambda: None)

    @property
    def _ttl_ms(self) -> bytes:
        return b"%d" % (self.ttl * 1000)

    def _lock(self, connection: RespConnection, name: str) -> Bracket:
        release, key, ttl_ms = connection.load(RELEASE), name.encode(), self._ttl_ms
        return _owned(
            connection,
            lambda owner: encode(b"SET", key, owner, b"NX", b"PX", ttl_ms),
            lambda owner: encode(b"EVALSHA", release, b"1", key, owner),
            refused=None,
        )

    def _scripted(self, script: bytes, *keys: bytes, permits: int = 1) -> Bracket:
        connection = connect_to(self.url)
        take, release = connection.load(script), connection.load(RELEASE)
        arguments = (self._ttl_ms, b"%d" % permits)

        def freeing(owner: bytes) -> bytes:
            if script is WRITE:
                return encode(b"EVALSHA", release, b"1", keys[1], owner)
            return encode(b"ZREM", keys[-1], owner)

        return _owned(connection, lambda owner: encode(b"EVALSHA", take, *keys, owner, *arguments), freeing, refused=0)


class RawPushRedis(RawRedis):
    """As `RawRedis`, but a waiter sleeps in ``BLPOP`` on a list that a release pushes to."""

    def _lock(self, connection: RespConnection, name: str) -> Bracket:
        release, key, ttl_ms = connection.load(RELEASE_AND_SIGNAL), name.encode(), self._ttl_ms
        signal = key + b":signal"
        return _owned(
            connection,
            lambda owner: encode(b"SET", key, owner, b"NX", b"PX", ttl_ms),
            lambda owner: encode(b"EVALSHA", release, b"2", key, signal, owner),
            refused=None,
            wait=encode(b"BLPOP", signal, b"%d" % max(1, int(self.ttl))),
        )


def _shares(name: str) -> bytes:
    return b"{%b}:shares" % name.encode()


def _owned(
    connection: RespConnection,
    take: Callable[[bytes], bytes],
    release: Callable[[bytes], bytes],
    *,
    refused: int | None,
    wait: bytes = b"",
) -> Bracket:
    """Make a lock of two requests of its owner, a new one each time; between tries it may send another to wait."""
    owner = b""

    def enter() -> None:
        nonlocal owner
        owner = secrets.token_hex(16).encode()
        request = take(owner)
        while connection.ask(request) == refused:
            if wait:
                connection.ask(wait)

    return Bracket(enter, lambda: connection.ask(release(owner)))


class RawRedlock(Adapter):
    """One round of ``SET NX PX`` and one of deletes, each sent to all nodes before any answer is read."""

    def lock(self, name: str) -> Library:
        nodes = [connect_to(url) for url in node_urls(self.url)]
        quorum = len(nodes) // 2 + 1
        release = _load(nodes, RELEASE)
        grant = self._granting(nodes, name.encode(), quorum)
        owner = b""

        def enter() -> int | None:
            nonlocal owner
            while True:
                owner = secrets.token_hex(16).encode()
                granted, token = grant(owner)
                if granted >= quorum:
                    return token
                leave()
                # Apart, or the nodes are split between contenders again and again.
                time.sleep(secrets.randbelow(2000) / 1e6)

        def leave() -> None:
            _scatter(nodes, encode(b"EVALSHA", release, b"1", name.encode(), owner))

        return Bracket(enter, leave)

    def _granting(
        self, nodes: list[RespConnection], key: bytes, quorum: int
    ) -> Callable[[bytes], tuple[int, int | None]]:
        """Give what asks for the lock: how many nodes grant it to an owner, and the token."""
        del quorum
        ttl_ms = b"%d" % (self.ttl * 1000)

        def grant(owner: bytes) -> tuple[int, None]:
            answers = _scatter(nodes, encode(b"SET", key, owner, b"NX", b"PX", ttl_ms))
            return sum(answer is not None for answer in answers), None

        return grant


class RawFencedRedlock(RawRedlock):
    """As `RawRedlock`, with the second round that a fencing token takes."""

    def _granting(
        self, nodes: list[RespConnection], key: bytes, quorum: int
    ) -> Callable[[bytes], tuple[int, int | None]]:
        ttl_ms, keys = b"%d" % (self.ttl * 1000), (b"2", key, b"{%b}:fence" % key)
        set_sha, fence_sha = _load(nodes, FENCED_SET), _load(nodes, FENCE)

        def grant(owner: bytes) -> tuple[int, int | None]:
            answers = _scatter(nodes, encode(b"EVALSHA", set_sha, *keys, owner, ttl_ms))
            counters = [answer for answer in answers if isinstance(answer, int) and answer > 0]
            if len(counters) < quorum:
                return 0, None
            token = max(counters) + 1
            confirmed = _scatter(nodes, encode(b"EVALSHA", fence_sha, *keys, owner, b"%d" % token))
            return confirmed.count(1), token

        return grant


def _scatter(nodes: list[RespConnection], request: bytes) -> list[Answer]:
    for node in nodes:
        node.send(request)
    return [node.receive() for node in nodes]


def _load(nodes: list[RespConnection], script: bytes) -> bytes:
    """Load a script on every node; its name is the same everywhere."""
    (sha,) = {node.load(script) for node in nodes}
    return sha


# -- libraries ---------------------------------------------------------------------------------------------------------


def redis_client(url: str, module: str = "redis") -> Library:
    """Connect with redis-py, or with its asyncio client."""
    # Without socket_timeout: redis-py 8 gives up a BLPOP after 5 s, and with it python-redis-lock's waiters.
    return import_module(module).Redis.from_url(url, socket_timeout=None, max_connections=_CONNECTIONS_MAX)


class RedisPy(Adapter):
    """redis-py's ``Lock``."""

    async def open(self) -> None:
        self._client = redis_client(self.url)

    def lock(self, name: str) -> Library:
        return self._client.lock(name, timeout=self.ttl)


class RedisPyAsyncio(AsyncAdapter):
    """redis-py's asyncio ``Lock``."""

    async def open(self) -> None:
        self._client = redis_client(self.url, "redis.asyncio")

    def lock(self, name: str) -> Library:
        return self._client.lock(name, timeout=self.ttl)

    async def close(self) -> None:
        await self._client.aclose()


class PythonRedisLock(Adapter):
    """python-redis-lock's ``Lock``. Its expiry is in whole seconds."""

    async def open(self) -> None:
        self._client = redis_client(self.url)
        self._lock: Library = import_module("redis_lock").Lock

    def lock(self, name: str) -> Library:
        return self._lock(self._client, name, expire=max(1, int(self.ttl)), auto_renewal=self.renews)

    def still_held(self, lock: Library, entered: Library) -> bool | None:
        """By asking the server whose the key is."""
        del entered
        return bool(lock.get_owner_id() == lock.id)


class Fencekit(Adapter):
    """fencekit's ``DistributedLock``. Each section is a call of ``acquire`` and one of ``release``, as in ``hold``."""

    async def open(self) -> None:
        self._locks: Library = import_module("fencekit").DistributedLock(redis_client(self.url))

    def lock(self, name: str) -> Library:
        handle: Library = None
        ttl, wait = timedelta(seconds=self.ttl), timedelta(days=1)

        def enter() -> Library:
            nonlocal handle
            handle = self._locks.acquire(name, ttl=ttl, blocking=True, wait=wait)
            return handle

        return Bracket(enter, lambda: self._locks.release(handle))

    def token(self, entered: Library) -> int | None:
        return int(entered.token.value)


class Pottery(Adapter):
    """pottery's ``Redlock``, over one node or several."""

    async def open(self) -> None:
        self._masters = {redis_client(url) for url in node_urls(self.url)}
        self._redlock: Library = import_module("pottery").Redlock

    def lock(self, name: str) -> Library:
        return self._redlock(key=name, masters=self._masters, auto_release_time=self.ttl)


class RedlockPy(Adapter):
    """redlock-py, over one node or several. It gives up after three tries: a caller who wants the lock asks again."""

    async def open(self) -> None:
        clients = [redis_client(url) for url in node_urls(self.url)]
        self._manager: Library = import_module("redlock").Redlock(clients)

    def lock(self, name: str) -> Library:
        held: Library = None

        def enter() -> Library:
            nonlocal held
            while not (lock := self._manager.lock(name, int(self.ttl * 1000))):
                pass
            held = lock
            return held

        return Bracket(enter, lambda: self._manager.unlock(held))
