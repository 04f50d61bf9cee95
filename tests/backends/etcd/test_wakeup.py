"""Watches: what wakes a waiter, and what does not."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.backend import EtcdBackend
from lockkit.backends.etcd.cluster import TXN
from lockkit.backends.etcd.keys import Contender
from lockkit.backends.etcd.wakeup import WakeupListener, _WatchStream
from lockkit.configuration.registry import split_options
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive
from lockkit.testing.timing import PATIENCE
from lockkit.url import parse
from lockkit_tools.servers import EtcdServer, wait_until
from tests.backends.etcd.support import Connect
from tests.backends.support import StubHost

NAME = "lockkit-etcd-watch"


class Keys:
    """Writes keys that contenders wait for, through a client's backend, and has its listener watch them."""

    def __init__(self, backend: EtcdBackend) -> None:
        """Use a backend."""
        self._backend = backend
        self.listener: WakeupListener = backend._listener

    def _write(self, operation: rpc.RequestOp) -> int:
        request = rpc.TxnRequest(success=[operation])
        answer = drive(self._backend.cluster.call(TXN, request, resend=True))
        return int(answer.header.revision)

    def put(self, key: bytes) -> int:
        """Give the revision."""
        return self._write(rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=b"x")))

    def delete(self, key: bytes) -> int:
        """Give the revision."""
        return self._write(rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key)))

    def contender(self, key: bytes, seen_at: int) -> Contender:
        """Make one that waits for a key that was there at a revision."""
        made = Contender("x", "owner", b"x/", b"value", self._backend._runtime.event())
        made.waits_for(seen_at, key)
        return made

    def until_woken(self, contender: Contender) -> None:
        """Wait until a contender has been woken."""
        assert contender.wake is not None
        assert drive(contender.wake.wait(PATIENCE))


@pytest.fixture
def keys(connect: Connect) -> Keys:
    """Keys at the server."""
    client = connect()
    client.ping()
    backend = client._engine.client.backend
    assert isinstance(backend, EtcdBackend)
    return Keys(backend)


class TestNoDeletionIsMissed:
    """Each order of the look at the queue, the beginning of the watch, and the deletion."""

    def test_after_the_watch(self, keys: Keys) -> None:
        """The waiter is woken then, and not when the member confirms the watch."""
        contender = keys.contender(b"after", keys.put(b"after"))
        assert keys.listener.watch(contender)
        wait_until(lambda: None if stream_of(keys.listener).has_reported else "not confirmed yet", timeout=PATIENCE)
        assert contender.wake is not None
        assert not contender.wake.is_set()

        keys.delete(b"after")

        keys.until_woken(contender)

    def test_between_the_look_and_the_watch(self, keys: Keys) -> None:
        """The member confirms the watch with a later revision, so the waiter looks again."""
        contender = keys.contender(b"between", keys.put(b"between"))
        keys.delete(b"between")

        assert keys.listener.watch(contender)

        keys.until_woken(contender)


def stream_of(listener: WakeupListener) -> _WatchStream:
    """Return its stream."""
    assert listener._stream is not None
    return listener._stream


@pytest.mark.parametrize("runtime", [BlockingRuntime, AsyncioRuntime])
def test_stream_ends_with_its_listener(server: EtcdServer, runtime: type[BlockingRuntime | AsyncioRuntime]) -> None:
    """A client that was dropped without `close()` leaves neither thread nor task, nor the connection."""

    async def begin() -> tuple[weakref.ref[WakeupListener], weakref.ref[Any]]:
        host, url = StubHost(runtime()), parse(server.url)
        backend = EtcdBackend.open(url, split_options(EtcdBackend, url, {})[1], host)
        contender = Contender("x", "owner", b"x/", b"value", host.runtime.event())
        contender.waits_for(1, b"dropped")
        assert backend._listener.watch(contender)
        stream = stream_of(backend._listener)
        for _ in range(int(PATIENCE / 0.01)):
            if stream.has_reported:
                break
            await host.runtime.sleep(0.01)
        assert stream.has_reported
        return weakref.ref(backend._listener), weakref.ref(backend.cluster.connection()._channel)

    async def scenario() -> None:
        before = len(streams())
        listener, channel = await begin()
        gc.collect()
        assert listener() is None
        for _ in range(int(PATIENCE / 0.01)):
            gc.collect()
            if len(streams()) <= before and channel() is None:
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"the stream goes on, or the connection stays: {streams()}, {channel()}")

    def streams() -> list[threading.Thread | asyncio.Task[Any]]:
        running = asyncio.all_tasks() if runtime is AsyncioRuntime else threading.enumerate()
        return [one for one in running if (one.get_name() if isinstance(one, asyncio.Task) else one.name) == NAME]

    asyncio.run(scenario())
