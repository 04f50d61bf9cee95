"""
Optimistic locking: change a value without a lock, and do it again if somebody else was quicker.

Where changes are short and collisions rare this is faster than a lock, and nobody can be kept waiting by a holder that
hangs. Where changes are long, or have effects elsewhere, take a lock.

`with_retry` and `with_retry_async` work on a string key of Redis or Valkey: ``WATCH`` and ``GET``, then ``MULTI``,
``SET`` and ``EXEC``, which does nothing if anybody touched the key in between (Redis manual, "Transactions"). The
``transaction()`` of redis-py tries without end and without a pause; here both are bounded:

- at most `attempts` tries, and no new one after `timeout` seconds;
- between two tries a random pause of up to twice, four times, eight times … what the try took. A try collides with
  those that overlap it, so the time of a try is the right unit, whether it is 200 µs or, with a slow `fn`, a second.
  It is at most `PAUSE_MAX`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive

if TYPE_CHECKING:
    from lockkit._redis_client import AsyncClient, Key, Seconds, SyncClient

__all__ = ["ATTEMPTS", "DELETE", "PAUSE_MAX", "TIMEOUT", "Delete", "with_retry", "with_retry_async"]

ATTEMPTS = 100
"""Tries, unless told otherwise. More hold a caller up for longer where it has no chance, fewer give up under bursts."""

TIMEOUT = 10.0
"""Seconds after which no new try begins, unless told otherwise."""

PAUSE_MAX = 0.25
"""Longest pause between two tries, seconds. Longer wastes time after a burst, shorter lets the losers collide again."""


class Delete(Enum):
    """The type of `DELETE`."""

    DELETE = "DELETE"

    def __repr__(self) -> str:
        return "lockkit.optimistic.DELETE"


DELETE: Final = Delete.DELETE
"""What a function returns to have the key deleted."""

Value: TypeAlias = str | bytes | int | float
V = TypeVar("V", bound="Value | Literal[Delete.DELETE] | None")


def with_retry(
    client: SyncClient,
    key: Key,
    fn: Callable[[Any], V],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | None = TIMEOUT,
    ttl: Seconds | None = None,
) -> V:
    """
    Change the value of a key by a function, as if nobody else were there.

    ::

        stock = with_retry(redis.Redis(), "stock:12", lambda now: int(now or 0) - 1)

    Args:
        client: A `redis.Redis` or `redis.RedisCluster`.
        key: A key that holds a string, or nothing.
        fn: Gets the value (bytes, or str with ``decode_responses``; None if there is none) and returns the new one,
            `DELETE`, or None to leave it as it is. **It may be called several times**, so it should have no effects
            elsewhere. What it raises ends the attempt and is raised here; nothing is changed.
        attempts: How many tries there are at most; None sets no bound.
        timeout: Seconds after which no new try begins; 0 tries once, None sets no bound. One of the two must be set.
        ttl: Seconds after which the key goes away; None keeps the expiry that it has, if it has one.

    Returns:
        What `fn` returned in the try that succeeded.

    Raises:
        LockTimeout: Others were quicker each time: also a `TimeoutError`, as for a lock that stayed busy, because the
            same helps: try later, or give up. Nothing was changed.
        BackendUnavailable: Redis gave no usable answer. The message says so if the change may have been made: then it
            is *not* tried again, as a second try could make it twice.
        ConfigurationError: The key holds something else than a string, or an argument is wrong.
    """
    from lockkit._optimistic_redis import Update  # noqa: PLC0415 - loads the driver

    result: V = drive(Update(BlockingRuntime(), client, key, fn, ttl).run(attempts, timeout))
    return result


async def with_retry_async(
    client: AsyncClient,
    key: Key,
    fn: Callable[[Any], V | Awaitable[V]],
    *,
    attempts: int | None = ATTEMPTS,
    timeout: Seconds | None = TIMEOUT,
    ttl: Seconds | None = None,
) -> V:
    """
    Change the value of a key by a function, as if nobody else were there; with asyncio.

    The same as `with_retry`, and `fn` may be ``async def``.

    Raises:
        Unsupported: The client is a `redis.asyncio.RedisCluster`: after a lost connection its transactions are sent
            again without their ``WATCH``, so that a change of somebody else's could be lost.
        LockTimeout: See `with_retry`.
        BackendUnavailable: See `with_retry`.
        ConfigurationError: See `with_retry`.
    """
    from lockkit._optimistic_redis import Update  # noqa: PLC0415 - loads the driver

    result: V = await Update(AsyncioRuntime(), client, key, fn, ttl).run(attempts, timeout)
    return result
