"""
redis-py's ``Lock`` over lockkit, as thin as it can be, for redis-py's own tests of it.

Same signature, same methods, same exceptions. What differs in spite of that is a difference between the two libraries:
`tests.interop.redis_py_differences` names each, with its reason.

redis-py has no prefix, and its tests look at the key ``foo`` of the lock ``foo``: so lockkit's prefix is empty here.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

from redis.exceptions import LockError, LockNotOwnedError

import lockkit
import lockkit.aio

ENDLESS_TTL = 30.0
"""A lock without ``timeout`` is kept for ever by redis-py. lockkit keeps none for ever: it renews."""

_clients: WeakKeyDictionary[Any, lockkit.Client] = WeakKeyDictionary()
_async_clients: WeakKeyDictionary[Any, lockkit.aio.Client] = WeakKeyDictionary()


class _Common:
    """What both faces have: the arguments, and the lease of each thread."""

    def __init__(  # noqa: PLR0917 - redis-py's
        self,
        redis: Any,  # noqa: ANN401 - either face's client
        name: str,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,  # noqa: FBT001, FBT002 - redis-py's
        blocking_timeout: float | None = None,
        thread_local: bool = True,  # noqa: FBT001, FBT002 - redis-py's
        raise_on_release_error: bool = True,  # noqa: FBT001, FBT002 - redis-py's
    ) -> None:
        """Take what redis-py's takes. ``sleep`` has no meaning: lockkit is woken."""
        del sleep
        self.redis = redis
        self.name = name
        self.timeout = timeout
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.raise_on_release_error = raise_on_release_error
        self.local: Any = threading.local() if thread_local else SimpleNamespace()
        self.local.token = None

    def _wait(self, blocking: bool | None, blocking_timeout: float | None) -> float | None:  # noqa: FBT001 - redis-py's
        """Seconds to wait, as lockkit counts: 0 for one try, None without limit."""
        if not (self.blocking if blocking is None else blocking):
            return 0.0
        return self.blocking_timeout if blocking_timeout is None else blocking_timeout

    def _options(self) -> dict[str, Any]:
        """``timeout`` of redis-py's is lockkit's ttl, which redis-py does not renew."""
        return {"ttl": self.timeout or ENDLESS_TTL, "renew": not self.timeout}

    def _took(self, lease: Any) -> Literal[True]:  # noqa: ANN401 - either face's
        self.local.lease = lease
        self.local.token = lease.owner.encode()
        return True

    def _owned_lease(self) -> Any:  # noqa: ANN401 - either face's lease
        if self.local.token is None:
            raise LockError("Cannot release a lock that's not owned or is already unlocked.", lock_name=self.name)
        return self.local.lease

    def _held(self, what: str) -> Any:  # noqa: ANN401 - either face's lease
        if self.local.token is None:
            raise LockError(f"Cannot {what} an unlocked lock", lock_name=self.name)
        if self.timeout is None:
            raise LockError(f"Cannot {what} a lock with no timeout", lock_name=self.name)
        return self.local.lease

    def _lost(self, what: str) -> LockNotOwnedError:
        return LockNotOwnedError(f"Cannot {what} a lock that's no longer owned", lock_name=self.name)

    def _entering_failed(self) -> LockError:
        return LockError("Unable to acquire lock within the time specified", lock_name=self.name)


class Lock(_Common):
    """`redis.lock.Lock`."""

    def _client(self) -> lockkit.Client:
        """One client of ours for each of redis-py's."""
        return _clients.setdefault(self.redis, lockkit.from_client(self.redis, prefix=""))

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,  # noqa: FBT001 - redis-py's
        blocking_timeout: float | None = None,
        token: str | None = None,
    ) -> bool:
        """Acquire; False if it stayed busy."""
        del sleep, token
        lock = self._client().lock(self.name, **self._options())
        lease = lock.try_acquire(self._wait(blocking, blocking_timeout))
        return lease is not None and self._took(lease)

    def locked(self) -> bool:
        """Tell whether anybody holds it."""
        return self._client().lock(self.name).locked()

    def owned(self) -> bool:
        """Tell whether we hold it, by the server's word."""
        return self.local.token is not None and bool(self.local.lease.confirm())

    def release(self) -> None:
        """Release. As in redis-py, the lease is forgotten whatever the server says."""
        lease = self._owned_lease()
        self.local.token = None
        try:
            lease.release()
        except lockkit.LockLost as error:
            raise self._lost("release") from error

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:  # noqa: FBT001, FBT002 - redis-py's
        """Add to the time left, or set it."""
        lease = self._held("extend")
        self._set(lease, additional_time if replace_ttl else lease.remaining() + additional_time, "extend")
        return True

    def reacquire(self) -> Literal[True]:
        """Set the time left to the full ``timeout``."""
        lease = self._held("reacquire")
        self._set(lease, self.timeout, "reacquire")
        return True

    def _set(self, lease: Any, seconds: float | None, what: str) -> None:  # noqa: ANN401 - lockkit.Lease
        try:
            lease.extend(seconds)
        except lockkit.LockLost as error:
            raise self._lost(what) from error

    def __enter__(self) -> Self:
        if self.acquire():
            return self
        raise self._entering_failed()

    def __exit__(self, *_: object) -> None:
        try:
            self.release()
        except LockError:
            if self.raise_on_release_error:
                raise


class AsyncLock(_Common):
    """`redis.asyncio.lock.Lock`."""

    def _client(self) -> lockkit.aio.Client:
        """One client of ours for each of redis-py's."""
        return _async_clients.setdefault(self.redis, lockkit.aio.from_client(self.redis, prefix=""))

    async def acquire(
        self,
        blocking: bool | None = None,  # noqa: FBT001 - redis-py's
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Acquire; False if it stayed busy."""
        del token
        lock = self._client().lock(self.name, **self._options())
        lease = await lock.try_acquire(self._wait(blocking, blocking_timeout))
        return lease is not None and self._took(lease)

    async def locked(self) -> bool:
        """Tell whether anybody holds it."""
        return await self._client().lock(self.name).locked()

    async def owned(self) -> bool:
        """Tell whether we hold it, by the server's word."""
        return self.local.token is not None and bool(await self.local.lease.confirm())

    async def release(self) -> None:
        """Release. As in redis-py, a cancelled release can be called again; the blocking one forgets at once."""
        lease = self._owned_lease()
        try:
            await lease.release()
        except lockkit.LockLost as error:
            self.local.token = None
            raise self._lost("release") from error
        self.local.token = None

    async def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:  # noqa: FBT001, FBT002 - redis-py's
        """Add to the time left, or set it."""
        lease = self._held("extend")
        await self._set(lease, additional_time if replace_ttl else lease.remaining() + additional_time, "extend")
        return True

    async def reacquire(self) -> Literal[True]:
        """Set the time left to the full ``timeout``."""
        lease = self._held("reacquire")
        await self._set(lease, self.timeout, "reacquire")
        return True

    async def _set(self, lease: Any, seconds: float | None, what: str) -> None:  # noqa: ANN401 - lockkit.aio.Lease
        try:
            await lease.extend(seconds)
        except lockkit.LockLost as error:
            raise self._lost(what) from error

    async def __aenter__(self) -> Self:
        if await self.acquire():
            return self
        raise self._entering_failed()

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.release()
        except LockError:
            if self.raise_on_release_error:
                raise
