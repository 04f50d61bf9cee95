"""Watches: what wakes a waiter, and what does not."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from lockkit.backends.etcd.backend import EtcdBackend
from lockkit.backends.etcd.keys import Contender
from lockkit.backends.etcd.wakeup import WakeupListener, _WatchStream
from lockkit.configuration.registry import split_options
from lockkit.runtime import AsyncioRuntime, BlockingRuntime
from lockkit.testing.timing import PATIENCE
from lockkit.url import parse
from lockkit_tools.servers import EtcdServer
from tests.backends.support import StubHost

NAME = "lockkit-etcd-watch"


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
