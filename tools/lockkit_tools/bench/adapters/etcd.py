"""etcd: a transaction and a delete through gRPC by hand as baselines, and the Python libraries."""

from __future__ import annotations

import asyncio
import queue
import secrets
import time
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from importlib import import_module
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.url import parse
from lockkit_tools.bench.adapters.base import AsyncAdapter, BlockingAdapter
from lockkit_tools.bench.subject import Kind

POLL_SECONDS = 0.05
"""How often etcd3gw is asked again: it does not wait by itself."""

_LIMIT = 60.0
_DEFAULT_PORT = 2379


def _address(url: str) -> tuple[str, int]:
    host = parse(url).hosts[0]
    return host.host, host.port or _DEFAULT_PORT


def _serialize(message: Any) -> bytes:  # noqa: ANN401 - a class that protoc made
    data: bytes = message.SerializeToString()
    return data


def _method(kind: Any, path: str, answer: Any) -> Any:  # noqa: ANN401 - of grpc's two stacks
    return kind(f"/etcdserverpb.{path}", request_serializer=_serialize, response_deserializer=answer.FromString)


class _Calls:
    """The calls of a baseline over one channel, and their messages."""

    def __init__(self, channel: Any) -> None:  # noqa: ANN401 - of grpc's two stacks
        self.txn = _method(channel.unary_unary, "KV/Txn", rpc.TxnResponse)
        self.delete = _method(channel.unary_unary, "KV/DeleteRange", rpc.DeleteRangeResponse)
        self.grant = _method(channel.unary_unary, "Lease/LeaseGrant", rpc.LeaseGrantResponse)
        self.watch = _method(channel.stream_stream, "Watch/Watch", rpc.WatchResponse)

    @staticmethod
    def entry(key: bytes, lease: int) -> rpc.TxnRequest:
        """Create the key if it is not there."""
        entry = rpc.TxnRequest()
        entry.compare.add(target=rpc.Compare.CREATE, key=key, create_revision=0)
        entry.success.add(request_put=rpc.PutRequest(key=key, value=b"bench", lease=lease))
        entry.failure.add(request_range=rpc.RangeRequest(key=key))
        return entry

    @staticmethod
    def watching(key: bytes, revision: int, range_end: bytes = b"") -> rpc.WatchRequest:
        """Hear of its deletion, or with `range_end` of that of any key from `key` up to there."""
        create = rpc.WatchCreateRequest(
            key=key, range_end=range_end, start_revision=revision, filters=[rpc.WatchCreateRequest.NOPUT]
        )
        return rpc.WatchRequest(create_request=create)


class RawEtcd(BlockingAdapter):
    """One transaction to lock, one delete to unlock; who finds the key there watches it. One lease for all."""

    async def open(self) -> None:
        self._channel = grpc.insecure_channel("{}:{}".format(*_address(self.url)))
        self._calls = _Calls(self._channel)
        # Nobody keeps it alive: a run is shorter.
        self._lease = self._calls.grant(rpc.LeaseGrantRequest(TTL=600)).ID

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return _RawLock(self._calls, f"bench/{name}".encode(), self._lease)

    def primitive(self, kind: Kind, name: str, count: int = 1) -> AbstractContextManager[Any]:
        """See `BlockingAdapter.primitive`. A leader is who has the lock."""
        if kind in {"read", "write"}:
            return _RawSide(self._calls, f"bench/{name}", self._lease, writes=kind == "write")
        if kind == "permit":
            return _RawPermit(self._calls, f"bench/{name}", self._lease, count)
        return super().primitive("lock" if kind == "election" else kind, name, count)

    async def close(self) -> None:
        self._channel.close()


class _RawLock:
    """Handles no lost answer and no lost lease."""

    def __init__(self, calls: _Calls, key: bytes, lease: int) -> None:
        self._calls = calls
        self._key = key
        self._entry = calls.entry(key, lease)

    def __enter__(self) -> Self:
        while True:
            answer = self._calls.txn(self._entry, timeout=_LIMIT)
            if answer.succeeded:
                return self
            _wait_for_deletion(self._calls, self._key, answer.header.revision + 1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.delete(rpc.DeleteRangeRequest(key=self._key), timeout=_LIMIT)


class _RawSide:
    """
    One side of a read/write lock: a key of its own, written by the same transaction that lists the keys before it.

    A writer waits for all that are there, a reader for the writers. The order of the keys is that of their revisions,
    as in the recipe of etcd's Go client (``client/v3/experimental/recipes``, ``RWMutex``).
    """

    def __init__(self, calls: _Calls, name: str, lease: int, *, writes: bool) -> None:
        self._calls = calls
        self._key = f"{name}/{'w' if writes else 'r'}{secrets.token_hex(8)}".encode()
        first = f"{name}/" if writes else f"{name}/w"
        # Up to the next byte: all keys that begin so.
        end = first[:-1] + chr(ord(first[-1]) + 1)
        self._entry = rpc.TxnRequest()
        self._entry.success.add(
            request_range=rpc.RangeRequest(key=first.encode(), range_end=end.encode(), keys_only=True)
        )
        self._entry.success.add(request_put=rpc.PutRequest(key=self._key, value=b"bench", lease=lease))

    def __enter__(self) -> Self:
        answer = self._calls.txn(self._entry, timeout=_LIMIT)
        for ahead in answer.responses[0].response_range.kvs:
            _wait_for_deletion(self._calls, ahead.key, answer.header.revision + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.delete(rpc.DeleteRangeRequest(key=self._key), timeout=_LIMIT)


class _RawPermit:
    """
    A permit: a key of its own, written by the same transaction that lists those before it.

    Who finds as many before it as there are permits waits until any of them goes, and looks again.
    """

    def __init__(self, calls: _Calls, name: str, lease: int, permits: int) -> None:
        self._calls = calls
        self._permits = permits
        self._key = f"{name}/p{secrets.token_hex(8)}".encode()
        first = f"{name}/p".encode()
        end = first[:-1] + bytes([first[-1] + 1])
        self._list = rpc.RangeRequest(
            key=first, range_end=end, keys_only=True,
            sort_target=rpc.RangeRequest.CREATE, sort_order=rpc.RangeRequest.ASCEND,
        )  # fmt: skip
        self._entry = rpc.TxnRequest()
        self._entry.success.add(request_put=rpc.PutRequest(key=self._key, value=b"bench", lease=lease))
        self._entry.success.add(request_range=self._list)

    def __enter__(self) -> Self:
        answer = self._calls.txn(self._entry, timeout=_LIMIT)
        while True:
            keys = [kv.key for kv in answer.responses[-1].response_range.kvs]
            if keys.index(self._key) < self._permits:
                return self
            _wait_for_deletion(self._calls, self._list.key, answer.header.revision + 1, self._list.range_end)
            look = rpc.TxnRequest()
            look.success.add(request_range=self._list)
            answer = self._calls.txn(look, timeout=_LIMIT)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.delete(rpc.DeleteRangeRequest(key=self._key), timeout=_LIMIT)


def _wait_for_deletion(calls: _Calls, key: bytes, revision: int, range_end: bytes = b"") -> None:
    """Watch a key, or a range, from a revision on, until one is deleted."""
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    requests.put(calls.watching(key, revision, range_end))
    watch = calls.watch(iter(requests.get, None))
    for heard in watch:
        if heard.events or heard.canceled:
            break
    requests.put(None)
    watch.cancel()


class RawEtcdAsyncio(AsyncAdapter):
    """The same through ``grpc.aio``."""

    async def open(self) -> None:
        self._channel = grpc.aio.insecure_channel("{}:{}".format(*_address(self.url)))
        self._calls = _Calls(self._channel)
        self._lease = (await self._calls.grant(rpc.LeaseGrantRequest(TTL=600))).ID

    def lock(self, name: str, *, renew: bool = False) -> AbstractAsyncContextManager[Any]:
        del renew
        return _RawAsyncLock(self._calls, f"bench/{name}".encode(), self._lease)

    async def close(self) -> None:
        await self._channel.close()


class _RawAsyncLock:
    """See `_RawLock`."""

    def __init__(self, calls: _Calls, key: bytes, lease: int) -> None:
        self._calls = calls
        self._key = key
        self._entry = calls.entry(key, lease)

    async def __aenter__(self) -> Self:
        while True:
            answer = await self._calls.txn(self._entry, timeout=_LIMIT)
            if answer.succeeded:
                return self
            watch = self._calls.watch()
            await watch.write(self._calls.watching(self._key, answer.header.revision + 1))
            async for heard in watch:
                if heard.events or heard.canceled:
                    break
            watch.cancel()
            await asyncio.sleep(0)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._calls.delete(rpc.DeleteRangeRequest(key=self._key), timeout=_LIMIT)


class PyEtcd(BlockingAdapter):
    """pyetcd, the maintained descendant of python-etcd3."""

    async def open(self) -> None:
        host, port = _address(self.url)
        self._client: Any = import_module("pyetcd").client(host=host, port=port)

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return _Insisting(self._client.lock(name, ttl=int(self.ttl)), {"timeout": None})

    async def close(self) -> None:
        self._client.close()


class Etcd3Gw(BlockingAdapter):
    """etcd3gw, which speaks HTTP."""

    async def open(self) -> None:
        host, port = _address(self.url)
        self._client: Any = import_module("etcd3gw").client(host=host, port=port, api_path="/v3/")

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return _Insisting(self._client.lock(name, ttl=int(self.ttl)), {})


class _Insisting:
    """Their own ``with`` also enters without the lock: here it is asked for until it is had."""

    def __init__(self, lock: Any, arguments: dict[str, Any]) -> None:  # noqa: ANN401 - of either library
        self._lock = lock
        self._arguments = arguments

    def __enter__(self) -> Self:
        while not self._lock.acquire(**self._arguments):
            time.sleep(POLL_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
