"""Optimistic updates of a key in etcd: see `lockkit.optimistic`. The version is etcd's own ``mod_revision``."""

from __future__ import annotations

from typing import Any

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.runtime import Runtime
from lockkit.storage.etcd.client import Store, as_bytes, text_of
from lockkit.storage.retry import DELETE, Conflict, OptimisticUpdate


class KeyUpdate(OptimisticUpdate):
    """One call of `lockkit.optimistic.update_key` or `lockkit.optimistic.update_key_async`."""

    def __init__(self, runtime: Runtime, client: object, key: object, fn: object) -> None:
        """Check the arguments. No I/O."""
        self._key = as_bytes(key, "key")
        super().__init__(runtime, fn, text_of(self._key))
        self._store = Store(runtime, client)

    @property
    def label(self) -> str:
        """See `OptimisticUpdate.label`."""
        return self._store.label

    async def attempt(self) -> Any:  # noqa: ANN401 - what `fn` returns
        """See `OptimisticUpdate.attempt`."""
        read = rpc.TxnRequest()
        read.success.add(request_range=rpc.RangeRequest(key=self._key))
        answer = await self._store.transact(read, self.name, changes=False)
        found = answer.responses[0].response_range.kvs
        new = await self.new_value(found[0].value if found else None)
        if new is None:
            return None
        # A key that does not exist has the mod_revision 0.
        before = found[0].mod_revision if found else 0
        change = rpc.TxnRequest()
        change.compare.add(target=rpc.Compare.MOD, key=self._key, mod_revision=before)
        if new is DELETE:
            change.success.add(request_delete_range=rpc.DeleteRangeRequest(key=self._key))
        else:
            # A key that is attached to an etcd lease stays attached.
            value = as_bytes(new, "value", empty=True)
            change.success.add(request_put=rpc.PutRequest(key=self._key, value=value, ignore_lease=bool(found)))
        answer = await self._store.transact(change, self.name, changes=True)
        if not answer.succeeded:
            raise Conflict
        return new
