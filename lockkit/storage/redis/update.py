"""
Optimistic updates of a string in Redis or Valkey: see `lockkit.optimistic`.

One connection serves the whole try, from ``WATCH`` to ``EXEC``. If it is lost, the watch is lost with it, and the try
fails.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import redis
import redis.asyncio
import redis.exceptions

from lockkit.errors import Unsupported
from lockkit.runtime import Runtime
from lockkit.storage.redis.client import (
    DRIVER_ERRORS,
    Key,
    Value,
    check_client,
    check_key,
    data_error,
    label_of,
    milliseconds,
    text_of,
    unknown_outcome,
)
from lockkit.storage.retry import DELETE, Conflict, Delete, OptimisticUpdate
from lockkit.units import Seconds

_LOST = (redis.ConnectionError, redis.TimeoutError, OSError)


class StringUpdate(OptimisticUpdate):
    """One call of `lockkit.optimistic.with_retry` or `lockkit.optimistic.with_retry_async`."""

    values = (str, bytes, int, float)
    values_named = "a str, bytes, int or float"

    def __init__(self, runtime: Runtime, client: object, key: Key, fn: object, ttl: Seconds | timedelta | None) -> None:
        """Check the arguments. No I/O."""
        other = "with_retry_async" if runtime.kind == "blocking" else "with_retry"
        check_client(client, runtime.kind, other=f"lockkit.optimistic.{other}")
        check_key(key, "key")
        super().__init__(runtime, fn, text_of(key))
        self._client = client
        self._key = key
        self._ttl_ms = milliseconds(ttl, "ttl")

    @property
    def label(self) -> str:
        """See `OptimisticUpdate.label`."""
        return label_of(self._client)

    async def attempt(self) -> Any:  # noqa: ANN401 - what `fn` returns
        """See `OptimisticUpdate.attempt`."""
        pipe = self._pipeline()
        try:
            new = await self.new_value(await self._read(pipe))
            if new is not None:
                await self._write(pipe, new)
        finally:
            # Returns the connection to the pool, watching nothing.
            await self.runtime.io(pipe.reset())
        return new

    def _pipeline(self) -> Any:  # noqa: ANN401 - two classes of redis-py's
        client: Any = self._client
        if isinstance(client, redis.asyncio.RedisCluster):
            message = (
                "redis.asyncio.RedisCluster sends a transaction again without its WATCH after a lost connection, so it "
                "could overwrite changes of others: use with_retry and a redis.RedisCluster, or take a lock"
            )
            raise Unsupported(message, name=self.name)
        if isinstance(client, redis.RedisCluster):
            # For the same reason this uses a transaction of the node that has the key, not one of the Cluster's own.
            try:
                node: Any = client.get_node_from_key(self._key)  # type: ignore[no-untyped-call]
                client = client.get_redis_connection(node)
            except DRIVER_ERRORS as error:
                raise data_error(error, self._client, self._key) from error
        return client.pipeline(transaction=True)

    async def _read(self, pipe: Any) -> Any:  # noqa: ANN401 - see above, and the key's value
        try:
            await self.runtime.io(pipe.watch(self._key))
            return await self.runtime.io(pipe.get(self._key))
        except redis.WatchError as error:
            raise Conflict from error  # the connection was lost, and the WATCH with it
        except DRIVER_ERRORS as error:
            self._find_slots_again(error)
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
            await self.runtime.io(pipe.execute())
        except redis.WatchError as error:
            # redis-py raises this for a lost connection, too, and advises to try again. But if the answer to EXEC was
            # lost, the change may have been made, and a second try would count one order twice: see the test
            # test_lost_answer_is_not_tried_again.
            if isinstance(error.__context__, _LOST):
                raise unknown_outcome(error.__context__, self._client, self._key) from error
            raise Conflict from error
        except _LOST as error:
            raise unknown_outcome(error, self._client, self._key) from error
        except DRIVER_ERRORS as error:
            # The server refused: EXEC did nothing.
            self._find_slots_again(error)
            raise data_error(error, self._client, self._key) from error

    def _find_slots_again(self, error: BaseException) -> None:
        """In a Cluster, ask which node has which slot when a node is gone or redirects the client."""
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
