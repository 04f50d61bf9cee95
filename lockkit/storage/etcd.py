"""
Guards and optimistic updates of data in etcd.

The guard is a write that succeeds only while the lock is held.

Lock and data are in one store, so the store need not remember tokens. The transaction that writes compares the
``create_revision`` of the lock's key with the token (as ``IsOwner`` of etcd's Go ``concurrency`` package does): if the
lease has expired or was revoked, or the lock was broken, that key is gone, and nothing is written.

That does what the two marks of `lockkit.fencing.TokenGuard` do, without storing them: while a reader's key is there, no
writer's key that could write is, and the reverse. What a key may be used for is in the key itself: a reader's writes
nothing, nor does a writer's once its value says that it was downgraded, which the same transaction compares.

The version of an optimistic update (`lockkit.optimistic`) is etcd's own ``mod_revision``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar, Protocol, TypeAlias, cast, runtime_checkable

from lockkit.backend import Host
from lockkit.backends.etcd import keys
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.cluster import TXN, Cluster
from lockkit.backends.etcd.keys import Contender
from lockkit.backends.etcd.options import adopt_cluster
from lockkit.errors import BackendUnavailable, ConfigurationError, StaleToken
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, Runtime, drive
from lockkit.storage.retry import DELETE, Conflict, OptimisticUpdate, as_bytes, text_of, unknown_outcome
from lockkit.storage.tokens import stale_token

Key: TypeAlias = str | bytes
Value: TypeAlias = str | bytes


@runtime_checkable
class Lease(Protocol):
    """`lockkit.Lease` or `lockkit.aio.Lease`: what is below the two APIs may not import them."""

    @property
    def token(self) -> int:
        """The fencing token."""
        ...

    @property
    def _record(self) -> Any: ...  # noqa: ANN401 - ours


class Store:
    """An etcd, reached through a lockkit client or a channel of the application."""

    def __init__(self, runtime: Runtime, client: object) -> None:
        """Find the etcd that a client leads to. No I/O."""
        self._engine: Any = getattr(client, "_engine", None)  # of `lockkit.Client` or `lockkit.aio.Client`
        self._cluster: Cluster | None = None
        if self._engine is not None:
            apis = {"blocking": "a lockkit.Client", "asyncio": "a lockkit.aio.Client"}
            if self._engine.runtime.kind != runtime.kind:
                raise ConfigurationError(f"client must be {apis[runtime.kind]}, not {apis[self._engine.runtime.kind]}")
            self.label: str = cast("Any", client).url
            self._cluster_of(self._engine.client.backend)
            return
        # `adopt_cluster` uses nothing of the host but its runtime.
        found = adopt_cluster(client, cast("Host", SimpleNamespace(runtime=runtime)))
        if found is None:
            message = f"client must be a lockkit client on etcd, or a gRPC channel, not {type(client).__name__}"
            raise ConfigurationError(message)
        self.label, self._cluster = found

    def _cluster_of(self, backend: object) -> Cluster:
        cluster = getattr(backend, "cluster", None)
        if not isinstance(cluster, Cluster):
            message = f"client must be an open client of etcd, where the data are; this one is of {self.label}"
            raise ConfigurationError(message)
        return cluster

    async def transact(self, request: rpc.TxnRequest, name: str, *, changes: bool) -> Any:  # noqa: ANN401 - a message
        """Execute a transaction. If it `changes` something it is sent once; its error says if it may have been made."""
        # Asked for each time: a forked child has another one.
        cluster = self._cluster or self._cluster_of(self._engine.client.ready())
        unknown: list[bool] = []
        try:
            return await cluster.call(TXN, request, resend=not changes, on_unknown=lambda: unknown.append(True))
        except BackendUnavailable as error:
            if changes and unknown:
                raise unknown_outcome(name, self.label, error) from error
            raise type(error)(f"{name!r} at {self.label}: {error}", name=name, backend=self.label) from error


class AsyncEtcdGuard:
    """
    Guards data in the etcd in which the lock is, with asyncio.

    The same as `EtcdGuard`; what does I/O is awaited.
    """

    _runtime_class: ClassVar[type[AsyncioRuntime | BlockingRuntime]] = AsyncioRuntime

    def __init__(self, client: Any) -> None:  # noqa: ANN401 - of one of several libraries
        """
        Use a client. No I/O.

        Args:
            client: The `lockkit.aio.Client` that the locks are from, or what `lockkit.aio.from_client` takes for etcd.
        """
        self._store = Store(self._runtime_class(), client)

    async def put(self, key: Key, value: Value, *, lease: Lease) -> None:
        """Write a key, unless the lease is stale. See `EtcdGuard.put`."""
        data = as_bytes(key, "key")
        put = rpc.PutRequest(key=data, value=as_bytes(value, "value", empty=True))
        await self._run([rpc.RequestOp(request_put=put)], text_of(data), lease)

    async def delete(self, key: Key, *, lease: Lease) -> bool:
        """Delete a key, unless the lease is stale. See `EtcdGuard.delete`."""
        data = as_bytes(key, "key")
        deletion = rpc.DeleteRangeRequest(key=data)
        answer = await self._run([rpc.RequestOp(request_delete_range=deletion)], text_of(data), lease)
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

    async def _run(self, operations: list[rpc.RequestOp], name: str, lease: Lease, *, shared: bool = False) -> Any:  # noqa: ANN401 - a message
        contender, label = _contender(lease), self._store.label
        request = rpc.TxnRequest(compare=[contender.compare_revision], success=operations)
        if not shared:
            if contender.mode == "shared":
                raise _reads_only(lease, name, label)
            # Its value says so once it was downgraded.
            request.compare.add(
                target=rpc.Compare.VALUE, result=rpc.Compare.GREATER, key=contender.key, value=keys.BEHIND_SHARED
            )
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


class _Blocking(AsyncEtcdGuard):
    """The same on a client that blocks."""

    _runtime_class = BlockingRuntime


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
        self._core = _Blocking(client)

    def put(self, key: Key, value: Value, *, lease: Lease) -> None:
        """
        Write a key, unless the lease is stale.

        The key loses an etcd lease that it had, as with any put that names none: it stays until it is deleted.

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
        return AsyncEtcdGuard.condition(lease, shared=shared)


def _contender(lease: object) -> Contender:
    state = lease._record.grant.state if isinstance(lease, Lease) else None  # noqa: SLF001 - ours
    if not isinstance(state, Contender):
        raise ConfigurationError("lease must be a lease of a lock on etcd, the one under which you work")
    return state


def _reads_only(lease: Lease, name: str, backend: str | None = None) -> StaleToken:
    place = f"{name!r} at {backend}" if backend else f"{name!r}"
    message = (
        f"the change to {place} was refused: the lease with token {lease.token} holds its lock only for reading. "
        "Acquire the write side, rwlock(name).write(), to change data; pass shared=True to check a lease that reads"
    )
    return StaleToken(message, name=name, backend=backend)


class KeyUpdate(OptimisticUpdate):
    """One call of `lockkit.optimistic.update_key` or `lockkit.optimistic.update_key_async`."""

    def __init__(self, runtime: Runtime, client: object, key: object, fn: object) -> None:
        """Check the arguments. No I/O."""
        self._key = as_bytes(key, "key")
        self._store = Store(runtime, client)
        super().__init__(runtime, fn, text_of(self._key), self._store.label)

    async def _attempt(self) -> Any:  # noqa: ANN401 - what `fn` returns
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
