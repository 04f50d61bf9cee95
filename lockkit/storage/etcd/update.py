"""Optimistic updates of a key in etcd: see `lockkit.optimistic`. The version is etcd's own ``mod_revision``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockkit import validation
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.errors import ConfigurationError
from lockkit.optimistic import DELETE, Delete
from lockkit.storage.etcd.client import Store, as_bytes, text_of
from lockkit.storage.retry import Conflict, check_bounds, retry

if TYPE_CHECKING:
    from lockkit.runtime import Runtime

__all__ = ["KeyUpdate"]


class KeyUpdate:
    """One call: what the sync and async APIs share."""

    def __init__(self, runtime: Runtime, client: object, key: object, fn: object) -> None:
        self._key = as_bytes(key, "key")
        self._name = text_of(self._key)
        if not callable(fn):
            message = f"fn must be a function of the current value, not {validation.shown(fn)}"
            raise ConfigurationError(message, name=self._name)
        self._fn: Callable[[Any], Any] = fn
        self._store = Store(runtime, client)

    async def run(self, attempts: object, timeout: object) -> Any:  # noqa: ANN401 - what `fn` returns
        """Try until it succeeds or a bound is reached."""
        bounds = check_bounds(attempts, timeout, self._name)
        store = self._store
        return await retry(store.runtime, self._try, bounds, name=self._name, label=lambda: store.label)

    async def _try(self) -> Any:  # noqa: ANN401 - what `fn` returns
        """Read, call `fn`, write if the key has not changed meanwhile; else raise `Conflict`."""
        read = rpc.TxnRequest()
        read.success.add(request_range=rpc.RangeRequest(key=self._key))
        answer = await self._store.transact(read, self._name, changes=False)
        found = answer.responses[0].response_range.kvs
        new = await self._store.runtime.io(self._fn(found[0].value if found else None))
        if new is None:
            return None
        # A missing key has the mod_revision 0.
        before = found[0].mod_revision if found else 0
        change = rpc.TxnRequest()
        change.compare.add(target=rpc.Compare.MOD, key=self._key, mod_revision=before)
        if new is DELETE:
            change.success.add(request_delete_range=rpc.DeleteRangeRequest(key=self._key))
        else:
            # A key that is attached to a lease stays so.
            put = rpc.PutRequest(key=self._key, value=self._checked(new), ignore_lease=bool(found))
            change.success.add(request_put=put)
        answer = await self._store.transact(change, self._name, changes=True)
        if not answer.succeeded:
            raise Conflict
        return new

    def _checked(self, new: object) -> bytes:
        """
        Check what `fn` returned, and return it as bytes.

        Raises:
            ConfigurationError: etcd cannot store it.
        """
        if isinstance(new, Delete) or not isinstance(new, (str, bytes)):
            message = (
                f"fn returned {validation.shown(new)}: it must return a str or bytes, lockkit.optimistic.DELETE, "
                "or None to leave the value as it is"
            )
            raise ConfigurationError(message, name=self._name)
        return as_bytes(new, "value", empty=True)
