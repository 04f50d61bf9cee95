"""The connection to a member: when its name moves, and when its client is dropped."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import threading
import weakref
from typing import Any, Self

import grpc
import grpc.aio
import pytest

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.backend import EtcdBackend
from lockkit.backends.etcd.cluster import RANGE, open_connection
from lockkit.backends.etcd.errors import details_of
from lockkit.backends.etcd.keys import Contender
from lockkit.backends.etcd.wakeup import WakeupListener
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive
from lockkit_tools.servers import EtcdServer, wait_until
from tests.backends.support import StubHost, open_backend
from tests.tries import until_async

ASK = rpc.RangeRequest(key=b"lockkit/")


def test_name_that_moves_is_looked_up_again(server: EtcdServer) -> None:
    """Within seconds, not after gRPC's thirty, in which leases of thirty seconds are lost."""
    with NameServer("127.0.0.3") as names:
        label = f"dns://127.0.0.1:{names.port}/moved.example:{server.port}"
        connection = open_connection(BlockingRuntime(), label, None)

        def problem() -> str | None:
            try:
                drive(connection.call(RANGE, ASK, 1.0, None))
            except grpc.RpcError as error:
                return details_of(error)
            return None

        assert "127.0.0.3" in (problem() or ""), "nothing listens there"
        names.address = "127.0.0.1"
        wait_until(problem, timeout=15)
        drive(connection.close())


@pytest.mark.parametrize("runtime", [BlockingRuntime, AsyncioRuntime])
def test_stream_ends_with_its_listener(server: EtcdServer, runtime: type[BlockingRuntime | AsyncioRuntime]) -> None:
    """A client that was dropped without `close()` leaves neither thread nor task, nor the connection."""

    async def begin() -> tuple[weakref.ref[WakeupListener], weakref.ref[Any]]:
        host = StubHost(runtime())
        backend = open_backend(server.url, host)
        assert isinstance(backend, EtcdBackend)
        contender = Contender("x", "owner", b"x/", b"value", host.runtime.event())
        contender.waits_for(1, b"dropped")
        assert backend._listener.watch(contender)
        stream = backend._listener._stream
        assert stream is not None
        await until_async(lambda: stream.has_reported)
        return weakref.ref(backend._listener), weakref.ref(backend.cluster.connection()._channel)

    async def scenario() -> None:
        before = len(streams())
        listener, channel = await begin()
        gc.collect()
        assert listener() is None
        await until_async(lambda: gc.collect() >= 0 and len(streams()) <= before and channel() is None)

    def streams() -> list[threading.Thread | asyncio.Task[Any]]:
        running = asyncio.all_tasks() if runtime is AsyncioRuntime else threading.enumerate()
        return [one for one in running if "lockkit-etcd-watch" in repr(one)]

    asyncio.run(scenario())


class NameServer(threading.Thread):
    """A DNS server that gives one address for every name."""

    def __init__(self, address: str) -> None:
        """Give that address."""
        super().__init__(daemon=True)
        self.address = address
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.sendto(b"", ("127.0.0.1", self.port))
        self.join()
        self._socket.close()

    def run(self) -> None:
        """Answer until an empty packet comes."""
        while True:
            query, client = self._socket.recvfrom(512)
            if not query:
                return
            end = query.index(b"\0", 12) + 5  # of the question: a name, its type and class
            is_address = query[end - 4 : end - 2] == b"\0\1"
            head = query[:2] + b"\x81\x80" + struct.pack(">4H", 1, is_address, 0, 0)
            record = b"\xc0\x0c" + struct.pack(">2HIH", 1, 1, 0, 4) + socket.inet_aton(self.address)
            self._socket.sendto(head + query[12:end] + (record if is_address else b""), client)
