"""
The guard for data in etcd: a write that succeeds only while the lock is held.

Lock and data are in one store, so the store need not remember tokens. The transaction that writes compares the
``create_revision`` of the lock's key with the token (as ``IsOwner`` of etcd's Go ``concurrency`` package does): if the
lease has expired or was revoked, or the lock was broken, that key is gone, and nothing is written.

That does what the two marks of `lockkit.fencing.TokenGuard` do, without storing them: while a reader's key is there, no
writer's key that could write is, and the reverse. What a key may be used for is in the key itself: a reader's writes
nothing, nor does a writer's once its value says that it was downgraded, which the same transaction compares.
"""

from __future__ import annotations

from typing import Any

from lockkit.backends.etcd import keys
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.keys import Contender
from lockkit.errors import ConfigurationError, StaleToken
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, Runtime, drive
from lockkit.storage.etcd.client import Key, Lease, Store, Value, as_bytes, text_of
from lockkit.storage.tokens import stale_token


class _Guard:
    """What both guards do, written once: the methods of `AsyncEtcdGuard`, on any runtime."""

    def __init__(self, runtime: Runtime, client: object) -> None:
        self._store = Store(runtime, client)

    async def put(self, key: Key, value: Value, *, lease: Lease) -> None:
        """Write a key, unless the lease is stale. See `EtcdGuard.put`."""
        data = as_bytes(key, "key")
        put = rpc.PutRequest(key=data, value=as_bytes(value, "value", empty=True))
        await self._change(rpc.RequestOp(request_put=put), data, lease)

    async def delete(self, key: Key, *, lease: Lease) -> bool:
        """Delete a key, unless the lease is stale. See `EtcdGuard.delete`."""
        data = as_bytes(key, "key")
        deletion = rpc.DeleteRangeRequest(key=data)
        answer = await self._change(rpc.RequestOp(request_delete_range=deletion), data, lease)
        return bool(answer.responses[0].response_delete_range.deleted)

    async def check(self, *, lease: Lease, shared: bool = False) -> None:
        """Raise unless the lease holds the lock now, as etcd sees it. See `EtcdGuard.check`."""
        await self._run([], _contender(lease).name, lease, shared=shared)

    @staticmethod
    def condition(lease: Lease, *, shared: bool = False) -> tuple[bytes, int]:
        """Give what a transaction of your own has to compare. See `EtcdGuard.condition`."""
        contender = _contender(lease)
        if contender.mode == "shared" and not shared:
            raise _reads_only(lease, contender.name)
        return contender.key, contender.create_revision

    async def _change(self, operation: rpc.RequestOp, key: bytes, lease: Lease) -> Any:  # noqa: ANN401 - a message
        return await self._run([operation], text_of(key), lease, shared=False)

    async def _run(self, operations: list[rpc.RequestOp], name: str, lease: Lease, *, shared: bool) -> Any:  # noqa: ANN401 - a message
        contender, label = _contender(lease), self._store.label
        request = rpc.TxnRequest(compare=[contender.compare_revision], success=operations)
        if not shared:
            if contender.mode == "shared":
                raise _reads_only(lease, name, label)
            request.compare.append(_is_not_downgraded(contender))
        request.failure.add(request_range=keys.oldest_of(contender.prefix, keys_only=True))
        answer = await self._store.transact(request, name, changes=bool(operations))
        if answer.succeeded:
            return answer
        found = answer.responses[0].response_range.kvs
        # Permits are held beside one another, so a newer one says nothing about this one.
        oldest = found[0].create_revision if found and contender.slot is None else 0
        if oldest > lease.token:
            raise stale_token("the change", lease.token, oldest, name=name, backend=label)
        if oldest == lease.token:
            raise _reads_only(lease, name, label)
        message = (
            f"the change to {name!r} at {label} was refused: the lease with token {lease.token} does not "
            f"hold lock {contender.name!r} any more. Stop the work, and acquire the lock again before you start over"
        )
        raise StaleToken(message, name=name, backend=label)


class AsyncEtcdGuard(_Guard):
    """
    Guards data in the etcd in which the lock is, with asyncio.

    The same as `EtcdGuard`; what does I/O is awaited.
    """

    def __init__(self, client: Any) -> None:  # noqa: ANN401 - of one of several libraries
        """
        Use a client. No I/O.

        Args:
            client: The `lockkit.aio.Client` that the locks are from, or what `lockkit.aio.from_client` takes for etcd.
        """
        super().__init__(AsyncioRuntime(), client)


class EtcdGuard:
    """
    Guards data in the etcd in which the lock is, blocking. Threads may share it.

    ::

        guard = lockkit.fencing.EtcdGuard(client)
        with client.lock("seat:12A") as lease:
            guard.put("seat/12A/customer", "Ada", lease=lease)

    Stronger than a comparison of tokens: etcd refuses a write as soon as the lock is not held any more, even before
    another client holds it. Every change is one transaction and one round trip. Writes that bypass the guard are not
    guarded.

    Raises:
        lockkit.StaleToken: By each change, when the lease does not hold the lock any more, or only for reading: it is a
            reader's, or was downgraded. Nothing was written.
        lockkit.BackendUnavailable: By each call, when etcd gave no usable answer. The message says so if a change may
            have been made.
        lockkit.ConfigurationError: By each call, when the lease is not one of etcd's.
    """

    def __init__(self, client: Any) -> None:  # noqa: ANN401 - of one of several libraries
        """
        Use a client. No I/O.

        Args:
            client: The `lockkit.Client` that the locks are from, or what `lockkit.from_client` takes for etcd. It must
                lead to the cluster that has the locks.
        """
        self._core = _Guard(BlockingRuntime(), client)

    def put(self, key: Key, value: Value, *, lease: Lease) -> None:
        """
        Write a key, unless the lease is stale.

        Args:
            key: What to write.
            value: What to write there.
            lease: Under which you work.
        """
        drive(self._core.put(key, value, lease=lease))

    def delete(self, key: Key, *, lease: Lease) -> bool:
        """
        Delete a key, unless the lease is stale.

        Args:
            key: What to delete.
            lease: Under which you work.

        Returns:
            Whether it was there.
        """
        return drive(self._core.delete(key, lease=lease))

    def check(self, *, lease: Lease, shared: bool = False) -> None:
        """
        Raise unless the lease holds the lock now, as etcd sees it. Proves nothing about the next moment.

        Args:
            lease: Under which you work.
            shared: You only read: ``lease.mode == "shared"``. Without it, a lease that only reads is refused.
        """
        drive(self._core.check(lease=lease, shared=shared))

    @staticmethod
    def condition(lease: Lease, *, shared: bool = False) -> tuple[bytes, int]:
        """
        Return what your own transaction has to compare: the lock's key, and its ``create_revision``. No I/O.

        Args:
            lease: Under which you work.
            shared: The transaction only reads what other holders write: ``lease.mode == "shared"``. Without it, a lease
                that only reads is refused.

        Raises:
            StaleToken: The lease only reads.
        """
        return _Guard.condition(lease, shared=shared)


def _contender(lease: object) -> Contender:
    state = lease._record.grant.state if isinstance(lease, Lease) else None  # noqa: SLF001 - ours
    if not isinstance(state, Contender):
        message = "lease must be a lease of a lock on etcd, the one under which you work"
        raise ConfigurationError(message)
    return state


def _is_not_downgraded(contender: Contender) -> rpc.Compare:
    return rpc.Compare(
        target=rpc.Compare.VALUE, result=rpc.Compare.GREATER, key=contender.key, value=keys.BEHIND_SHARED
    )


def _reads_only(lease: Lease, name: str, backend: str | None = None) -> StaleToken:
    place = f"{name!r} at {backend}" if backend else f"{name!r}"
    message = (
        f"the change to {place} was refused: the lease with token {lease.token} holds its lock only for reading. "
        "Acquire the write side, rwlock(name).write(), to change data; pass shared=True to check a lease that reads"
    )
    return StaleToken(message, name=name, backend=backend)
