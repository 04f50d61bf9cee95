"""Watches: what wakes a waiter, what does not, and which watches stay."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.backend import EtcdBackend
from lockkit.backends.etcd.connection import TXN
from lockkit.backends.etcd.contender import Contender
from lockkit.backends.etcd.wakeup import IDLE_MAX, WakeupListener
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

    def until_confirmed(self, contender: Contender) -> None:
        """Wait until the member has confirmed a watch."""
        watch = contender.watch
        assert watch is not None
        wait_until(lambda: None if watch.since else "not confirmed yet", timeout=PATIENCE)

    def until_woken(self, contender: Contender) -> None:
        """Wait until a contender has been woken."""
        assert contender.wake is not None
        assert drive(contender.wake.wait(PATIENCE))

    def watched(self, key: bytes) -> Contender:
        """Put a key, and give a contender that waits for it and is sure to be woken."""
        contender = self.contender(key, self.put(key))
        assert self.listener.watch(contender)
        self.until_confirmed(contender)
        assert contender.wake is not None
        assert not contender.wake.is_set()
        return contender


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
        """The waiter is woken then, and not before."""
        contender = keys.watched(b"after")

        keys.delete(b"after")

        keys.until_woken(contender)

    def test_between_the_look_and_the_watch(self, keys: Keys) -> None:
        """The member confirms the watch with a later revision, so the waiter looks again."""
        contender = keys.contender(b"between", keys.put(b"between"))
        keys.delete(b"between")

        assert keys.listener.watch(contender)

        keys.until_woken(contender)

    def test_of_a_watch_that_stayed(self, keys: Keys) -> None:
        """The next waiter for a key of that name is woken by it, and not by what was before."""
        keys.listener.unwatch(keys.watched(b"stayed"))
        (watch,) = keys.listener._idle.values()
        contender = keys.contender(b"stayed", keys.put(b"stayed"))

        assert keys.listener.watch(contender)

        assert contender.watch is watch
        assert contender.wake is not None
        assert not contender.wake.is_set()
        keys.delete(b"stayed")
        keys.until_woken(contender)

    def test_before_a_watch_that_stayed(self, keys: Keys) -> None:
        """A watch that began after the look may have missed the deletion, so there is another one."""
        seen_at = keys.put(b"late")
        keys.delete(b"late")
        keys.listener.unwatch(keys.watched(b"late"))
        (watch,) = keys.listener._idle.values()
        contender = keys.contender(b"late", seen_at)

        assert keys.listener.watch(contender)

        assert contender.watch is not watch
        keys.until_woken(contender)


class TestWatchesThatStay:
    """They end when they are of no use."""

    def test_there_are_only_a_few(self, keys: Keys) -> None:
        """The oldest end."""
        for number in range(IDLE_MAX + 2):
            keys.listener.unwatch(keys.watched(b"few-%d" % number))

        assert [*keys.listener._idle] == [b"few-%d" % number for number in range(2, IDLE_MAX + 2)]
        assert len(keys.listener._watches) == IDLE_MAX


@pytest.mark.parametrize("runtime", [BlockingRuntime, AsyncioRuntime])
def test_stream_ends_with_its_listener(server: EtcdServer, runtime: type[BlockingRuntime | AsyncioRuntime]) -> None:
    """A client that was dropped without `close()` leaves neither thread nor task, nor the connection."""

    async def begin() -> tuple[weakref.ref[WakeupListener], weakref.ref[Any]]:
        host, url = StubHost(runtime()), parse(server.url)
        backend = EtcdBackend.open(url, split_options(EtcdBackend, url, {})[1], host)
        contender = Contender("x", "owner", b"x/", b"value", host.runtime.event())
        contender.waits_for(1, b"dropped")
        assert backend._listener.watch(contender)
        watch = contender.watch
        assert watch is not None
        for _ in range(int(PATIENCE / 0.01)):
            if watch.since:
                break
            await host.runtime.sleep(0.01)
        assert watch.since
        return weakref.ref(backend._listener), weakref.ref(backend.cluster.connection()[0]._channel)

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
