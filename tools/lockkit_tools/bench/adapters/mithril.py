"""mithril-locks, on Redis and in files."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from lockkit.url import parse
from lockkit_tools.bench.adapters.base import AsyncAdapter, BlockingAdapter
from lockkit_tools.bench.adapters.redis import redis_client

_FOREVER = 1e6
"""Seconds; its own timeout of 10 s would turn a long wait into an error."""


class Mithril(BlockingAdapter):
    """Its ``Lock`` over `RedisBackend` or `FileBackend`."""

    async def open(self) -> None:
        self._lock: Any = import_module("mithril").Lock
        backends = import_module("mithril.backends")
        url = parse(self.url)
        self._backend = (
            backends.FileBackend(Path(url.path))
            if url.scheme == "file"
            else backends.RedisBackend(redis_client(self.url))
        )

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        return _AnewBlocking(
            self._lock, name, backend=self._backend, ttl=self.ttl, timeout=_FOREVER, auto_renewal=renew
        )

    def token(self, entered: Any) -> int | None:  # noqa: ANN401 - see Adapter
        return int(entered.fencing_token)

    def still_held(self, lock: Any, entered: Any) -> bool | None:  # noqa: ANN401 - see Adapter
        """By asking the server whose the lock is."""
        del entered
        return bool(self._backend.get_owner(lock.held.token.lock_name) == lock.held.owner_id)


class MithrilAsyncio(AsyncAdapter):
    """Its ``AsyncLock`` over `AsyncRedisBackend`."""

    async def open(self) -> None:
        self._lock: Any = import_module("mithril.aio").AsyncLock
        self._client = redis_client(self.url, "redis.asyncio")
        self._backend = import_module("mithril.backends.aio").AsyncRedisBackend(self._client)

    def lock(self, name: str, *, renew: bool = False) -> AbstractAsyncContextManager[Any]:
        return _AnewAsyncio(self._lock, name, backend=self._backend, ttl=self.ttl, timeout=_FOREVER, auto_renewal=renew)

    def token(self, entered: Any) -> int | None:  # noqa: ANN401 - see Adapter
        return int(entered.fencing_token)

    async def close(self) -> None:
        await self._client.aclose()


class _Anew:
    """Each section makes a lock of its own: theirs can be entered once."""

    def __init__(self, make: Any, name: str, **options: Any) -> None:  # noqa: ANN401 - the library's
        self._make, self._name, self._options = make, name, options
        self.held: Any = None

    def fresh(self) -> Any:  # noqa: ANN401 - the library's
        self.held = self._make(self._name, **self._options)
        return self.held


class _AnewBlocking(_Anew):
    def __enter__(self) -> object:
        return self.fresh().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.held.__exit__(kind, error, trace)


class _AnewAsyncio(_Anew):
    async def __aenter__(self) -> object:
        return await self.fresh().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.held.__aexit__(kind, error, trace)
