"""mithril-locks, on Redis and in files."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from lockkit.url import parse
from lockkit_tools.bench.adapters.base import Adapter, Anew, AsyncAdapter, Library
from lockkit_tools.bench.adapters.redis import redis_client

_FOREVER = 1e6
"""Seconds; its own timeout of 10 s would turn a long wait into an error."""


class Mithril(Adapter):
    """Its ``Lock`` over `RedisBackend` or `FileBackend`."""

    async def open(self) -> None:
        self._lock: Library = import_module("mithril").Lock
        backends = import_module("mithril.backends")
        url = parse(self.url)
        self._backend: Library = (
            backends.FileBackend(Path(url.path))
            if url.scheme == "file"
            else backends.RedisBackend(redis_client(self.url))
        )

    def lock(self, name: str) -> Library:
        options = {"backend": self._backend, "ttl": self.ttl, "timeout": _FOREVER, "auto_renewal": self.renews}
        return Anew(lambda: self._lock(name, **options))

    def token(self, entered: Library) -> int | None:
        return int(entered.fencing_token)

    def still_held(self, lock: Library, entered: Library) -> bool | None:
        """By asking the server whose the lock is."""
        del entered
        return bool(self._backend.get_owner(lock.held.token.lock_name) == lock.held.owner_id)


class MithrilAsyncio(Mithril, AsyncAdapter):
    """Its ``AsyncLock`` over `AsyncRedisBackend`."""

    async def open(self) -> None:
        self._lock = import_module("mithril.aio").AsyncLock
        self._client = redis_client(self.url, "redis.asyncio")
        self._backend = import_module("mithril.backends.aio").AsyncRedisBackend(self._client)

    def still_held(self, lock: Library, entered: Library) -> bool | None:
        del lock, entered
        return None

    async def close(self) -> None:
        await self._client.aclose()
