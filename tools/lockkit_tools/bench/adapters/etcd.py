"""etcd: a transaction and a delete through gRPC by hand as baselines, and the Python libraries."""

from __future__ import annotations

import asyncio
import queue
import secrets
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import grpc
import grpc.aio

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit_tools.bench.adapters.base import Adapter, AsyncAdapter, Bracket, Library
from lockkit_tools.bench.addresses import addresses

POLL_SECONDS = 0.05
"""How often etcd3gw is asked again: it does not wait by itself."""

_LIMIT = 60.0

_LEASE = rpc.LeaseGrantRequest(TTL=600)
"""One for all locks of a client. Nobody keeps it alive: a run is shorter."""


def _serialize(message: Library) -> bytes:
    data: bytes = message.SerializeToString()
    return data


class _Calls:
    """The calls of a baseline over one channel of either of gRPC's two stacks, and their messages."""

    def __init__(self, channel: Library) -> None:
        def method(kind: Library, path: str, answer: Library) -> Library:
            return kind(f"/etcdserverpb.{path}", request_serializer=_serialize, response_deserializer=answer.FromString)

        self.txn = method(channel.unary_unary, "KV/Txn", rpc.TxnResponse)
        self.delete = method(channel.unary_unary, "KV/DeleteRange", rpc.DeleteRangeResponse)
        self.grant = method(channel.unary_unary, "Lease/LeaseGrant", rpc.LeaseGrantResponse)
        self.watch = method(channel.stream_stream, "Watch/Watch", rpc.WatchResponse)


def _entry(key: bytes, lease: int) -> rpc.TxnRequest:
    """Create the key if it is not there."""
    entry = rpc.TxnRequest()
    entry.compare.add(target=rpc.Compare.CREATE, key=key, create_revision=0)
    entry.success.add(request_put=rpc.PutRequest(key=key, value=b"bench", lease=lease))
    entry.failure.add(request_range=rpc.RangeRequest(key=key))
    return entry


def _watching(key: bytes, revision: int, range_end: bytes = b"") -> rpc.WatchRequest:
    """Hear of its deletion, or with `range_end` of that of any key from `key` up to there."""
    create = rpc.WatchCreateRequest(
        key=key, range_end=range_end, start_revision=revision, filters=[rpc.WatchCreateRequest.NOPUT]
    )
    return rpc.WatchRequest(create_request=create)


def _after(prefix: bytes) -> bytes:
    """Give the end of the range of all keys that begin so."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


class RawEtcd(Adapter):
    """
    One transaction to lock, one delete to unlock; who finds the key there watches it.

    Handles no lost answer and no lost lease.
    """

    async def open(self) -> None:
        self._channel = grpc.insecure_channel("{}:{}".format(*addresses(self.url)[0]))
        self._calls = _Calls(self._channel)
        self._lease = self._calls.grant(_LEASE).ID

    async def close(self) -> None:
        self._channel.close()

    def lock(self, name: str) -> Library:
        key = f"bench/{name}".encode()
        entry = _entry(key, self._lease)

        def enter() -> None:
            while not (answer := self._txn(entry)).succeeded:
                self._wait_for_deletion(key, answer)

        return self._bracket(enter, key)

    def read(self, name: str) -> Library:
        return self._side(name, "r", ahead="w")

    def write(self, name: str) -> Library:
        return self._side(name, "w", ahead="")

    def _side(self, name: str, side: str, *, ahead: str) -> Bracket:
        """
        One side of a read/write lock: a key of its own, written by the same transaction that lists the keys before it.

        A writer waits for all that are there, a reader for the writers. The order of the keys is that of their
        revisions, as in the recipe of etcd's Go client (``client/v3/experimental/recipes``, ``RWMutex``).
        """
        first = f"bench/{name}/{ahead}".encode()
        key = f"bench/{name}/{side}{secrets.token_hex(8)}".encode()
        entry = rpc.TxnRequest()
        entry.success.add(request_range=rpc.RangeRequest(key=first, range_end=_after(first), keys_only=True))
        entry.success.add(request_put=rpc.PutRequest(key=key, value=b"bench", lease=self._lease))

        def enter() -> None:
            answer = self._txn(entry)
            for before in answer.responses[0].response_range.kvs:
                self._wait_for_deletion(before.key, answer)

        return self._bracket(enter, key)

    def permit(self, name: str, count: int) -> Library:
        """
        A key of its own, written by the same transaction that lists those before it.

        Who finds as many before it as there are permits waits until any of them goes, and looks again.
        """
        first = f"bench/{name}/p".encode()
        key = first + secrets.token_hex(8).encode()
        line = rpc.RangeRequest(
            key=first, range_end=_after(first), keys_only=True,
            sort_target=rpc.RangeRequest.CREATE, sort_order=rpc.RangeRequest.ASCEND,
        )  # fmt: skip
        entry, look = rpc.TxnRequest(), rpc.TxnRequest()
        entry.success.add(request_put=rpc.PutRequest(key=key, value=b"bench", lease=self._lease))
        for request in (entry, look):
            request.success.add(request_range=line)

        def enter() -> None:
            answer = self._txn(entry)
            while [kv.key for kv in answer.responses[-1].response_range.kvs].index(key) >= count:
                self._wait_for_deletion(first, answer, _after(first))
                answer = self._txn(look)

        return self._bracket(enter, key)

    def _txn(self, request: rpc.TxnRequest) -> Library:
        return self._calls.txn(request, timeout=_LIMIT)

    def _bracket(self, enter: Callable[[], None], key: bytes) -> Bracket:
        return Bracket(enter, lambda: self._calls.delete(rpc.DeleteRangeRequest(key=key), timeout=_LIMIT))

    def _wait_for_deletion(self, key: bytes, since: Library, range_end: bytes = b"") -> None:
        """Watch a key, or a range, from the revision after an answer on, until one is deleted."""
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(_watching(key, since.header.revision + 1, range_end))
        watch = self._calls.watch(iter(requests.get, None))
        for heard in watch:
            if heard.events or heard.canceled:
                break
        requests.put(None)
        watch.cancel()


class RawEtcdAsyncio(AsyncAdapter):
    """The same through ``grpc.aio``."""

    async def open(self) -> None:
        self._channel = grpc.aio.insecure_channel("{}:{}".format(*addresses(self.url)[0]))
        self._calls = _Calls(self._channel)
        self._lease = (await self._calls.grant(_LEASE)).ID

    async def close(self) -> None:
        await self._channel.close()

    def lock(self, name: str) -> Library:
        calls, key = self._calls, f"bench/{name}".encode()
        entry = _entry(key, self._lease)

        async def enter() -> None:
            while not (answer := await calls.txn(entry, timeout=_LIMIT)).succeeded:
                watch = calls.watch()
                await watch.write(_watching(key, answer.header.revision + 1))
                async for heard in watch:
                    if heard.events or heard.canceled:
                        break
                watch.cancel()
                await asyncio.sleep(0)

        return Bracket(enter, lambda: calls.delete(rpc.DeleteRangeRequest(key=key), timeout=_LIMIT))


class PyEtcd(Adapter):
    """pyetcd, the maintained descendant of python-etcd3."""

    async def open(self) -> None:
        host, port = addresses(self.url)[0]
        self._client: Library = import_module("pyetcd").client(host=host, port=port)

    def lock(self, name: str) -> Library:
        return _insisting(self._client.lock(name, ttl=int(self.ttl)), timeout=None)

    async def close(self) -> None:
        self._client.close()


class Etcd3Gw(Adapter):
    """etcd3gw, which speaks HTTP."""

    async def open(self) -> None:
        host, port = addresses(self.url)[0]
        self._client: Library = import_module("etcd3gw").client(host=host, port=port, api_path="/v3/")

    def lock(self, name: str) -> Library:
        return _insisting(self._client.lock(name, ttl=int(self.ttl)))


def _insisting(lock: Library, **arguments: object) -> Bracket:
    """Ask until it is had: the libraries' own ``with`` also enters without the lock."""

    def enter() -> None:
        while not lock.acquire(**arguments):
            time.sleep(POLL_SECONDS)

    return Bracket(enter, lock.release)
