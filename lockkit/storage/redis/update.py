"""
Optimistic updates of a string in Redis or Valkey: see `lockkit.optimistic`.

The connection that watches the key is kept from ``WATCH`` to ``EXEC``; if it is lost in between, so is the watch,
and the try with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import redis
import redis.asyncio
import redis.exceptions

from lockkit import validation
from lockkit.errors import ConfigurationError, Unsupported
from lockkit.optimistic import DELETE, Delete, Value
from lockkit.storage.redis.client import (
    DRIVER_ERRORS,
    Key,
    Seconds,
    check_client,
    check_key,
    data_error,
    label_of,
    milliseconds,
    text_of,
    unknown_outcome,
)
from lockkit.storage.retry import Conflict, check_bounds, retry

if TYPE_CHECKING:
    from lockkit.runtime import Runtime

__all__ = ["Update"]

_LOST = (redis.ConnectionError, redis.TimeoutError, OSError)


class Update:
    """One call: what both faces do, written once."""

    def __init__(self, runtime: Runtime, client: object, key: Key, fn: object, ttl: Seconds | None) -> None:
        other = "with_retry_async" if runtime.kind == "blocking" else "with_retry"
        check_client(client, runtime.kind, other=f"lockkit.optimistic.{other}")
        check_key(key, "key")
        self._name = text_of(key)
        if not callable(fn):
            message = f"fn must be a function of the current value, not {validation.shown(fn)}"
            raise ConfigurationError(message, name=self._name)
        self._runtime = runtime
        self._client = client
        self._key = key
        self._fn: Callable[[Any], Any] = fn
        self._ttl_ms = milliseconds(ttl, "ttl")

    async def run(self, attempts: object, timeout: Seconds | None) -> Any:  # noqa: ANN401 - what `fn` returns
        """Try until it succeeds or a bound is reached."""
        bounds = check_bounds(attempts, timeout, self._name)
        label = partial(label_of, self._client)
        return await retry(self._runtime, self._try, bounds, name=self._name, label=label)

    async def _try(self) -> Any:  # noqa: ANN401 - what `fn` returns
        """Read, ask `fn`, write if nobody touched the key; else raise `Conflict`."""
        io = self._runtime.io
        pipe = self._pipeline()
        try:
            current = await self._read(pipe)
            new = self._checked(await io(self._fn(current)))
            if new is not None:
                await self._write(pipe, new)
        finally:
            # Gives the connection back, watching nothing.
            await io(pipe.reset())
        return new

    def _pipeline(self) -> Any:  # noqa: ANN401 - two classes of redis-py's
        client: Any = self._client
        if isinstance(client, redis.asyncio.RedisCluster):
            message = (
                "redis.asyncio.RedisCluster sends a transaction again without its WATCH after a lost connection, so "
                "changes of others could be lost: use with_retry and a redis.RedisCluster, or take a lock"
            )
            raise Unsupported(message, name=self._name)
        if isinstance(client, redis.RedisCluster):
            # For the same reason not the Cluster's own transactions, but those of the node that has the key.
            try:
                node: Any = client.get_node_from_key(self._key)  # type: ignore[no-untyped-call]
                client = client.get_redis_connection(node)
            except DRIVER_ERRORS as error:
                raise data_error(error, self._client, self._key) from error
        return client.pipeline(transaction=True)

    async def _read(self, pipe: Any) -> Any:  # noqa: ANN401 - see above, and what is there
        try:
            await self._runtime.io(pipe.watch(self._key))
            return await self._runtime.io(pipe.get(self._key))
        except redis.WatchError as error:
            raise Conflict from error  # the connection was lost, and the WATCH with it
        except DRIVER_ERRORS as error:
            self._relearn(error)
            raise data_error(error, self._client, self._key) from error

    async def _write(self, pipe: Any, new: Value | Literal[Delete.DELETE]) -> None:  # noqa: ANN401 - see above
        pipe.multi()
        if new is DELETE:
            pipe.delete(self._key)
        elif self._ttl_ms is None:
            pipe.set(self._key, new, keepttl=True)
        else:
            pipe.set(self._key, new, px=self._ttl_ms)
        try:
            await self._runtime.io(pipe.execute())
        except redis.WatchError as error:
            # redis-py raises it for a lost connection, too, and advises to try again. But if the answer to EXEC was
            # lost, the change may have been made, and a second try would count one order twice: see the test
            # test_lost_answer_is_not_tried_again.
            if isinstance(error.__context__, _LOST):
                raise unknown_outcome(error.__context__, self._client, self._key) from error
            raise Conflict from error
        except _LOST as error:
            raise unknown_outcome(error, self._client, self._key) from error
        except DRIVER_ERRORS as error:
            # The server said no: EXEC did nothing.
            self._relearn(error)
            raise data_error(error, self._client, self._key) from error

    def _relearn(self, error: BaseException) -> None:
        """
        In a Cluster, find out again who has which slot when a node is gone or sends us elsewhere.

        Raises:
            Conflict: The slot has moved, so the next try goes to the right node.
        """
        if not isinstance(self._client, redis.RedisCluster):
            return
        moved = isinstance(error, (redis.exceptions.AskError, redis.exceptions.TryAgainError))
        if moved or isinstance(error, _LOST):
            try:
                self._client.nodes_manager.initialize()
            except DRIVER_ERRORS as unreachable:
                raise data_error(unreachable, self._client, self._key) from unreachable
        if moved:
            raise Conflict from error

    def _checked(self, new: object) -> Value | Literal[Delete.DELETE] | None:
        """
        Look at what `fn` returned.

        Raises:
            ConfigurationError: Redis cannot store it.
        """
        if isinstance(new, bool) or not isinstance(new, (str, bytes, int, float, Delete, type(None))):
            message = (
                f"fn returned {validation.shown(new)}: it must return a str, bytes, int or float, "
                "lockkit.optimistic.DELETE, or None to leave the value as it is"
            )
            raise ConfigurationError(message, name=self._name)
        return new
