"""
A TCP proxy that does to connections what networks do.

::

    with FaultProxy(server.host, server.port) as proxy:
        client = lockkit.connect(f"redis://{proxy.address}/0")
        proxy.delay(0.2)  # slow
        proxy.blackhole()  # a partition: open connections, no bytes
        proxy.heal()
        dropped = proxy.drop_next_reply(match=b"EVALSHA")
        ...  # a request: applied at the server, its answer lost
        assert dropped.wait(5)
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Self, TypeVar

from lockkit.units import Seconds
from lockkit_tools.servers._link import Counts, Match, Network, Trap
from lockkit_tools.servers._ports import HOST, Ports

T = TypeVar("T")

# For steps of the proxy itself, which take microseconds: only a defect takes this long.
STEP_TIMEOUT = 30.0


class FaultProxy:
    """
    A proxy on 127.0.0.1 in a thread of its own.

    A context manager.  Its port stays the same also while it refuses connections.  All
    methods may be called from any thread, and what they say is in force when they return.

    Args:
        target_host: Where the real server is.
        precise: Make delays exact to some 0.1 ms, for at most 500 connections.  Else they are
            rounded up to milliseconds, as epoll does.
    """

    host = HOST

    def __init__(self, target_host: str, target_port: int, *, precise: bool = False) -> None:
        self._ports = Ports()
        self._port: int | None = None
        self._network = Network((target_host, target_port))
        self._precise = precise
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """Port for clients; the same until `close`."""
        if self._port is None:
            self._port = self._ports.reserve()
        return self._port

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return f"{self.host}:{self.port}"

    def start(self) -> Self:
        """Begins to accept connections; nothing happens if it does already."""
        if self._loop is None:
            # select() takes microseconds, and file descriptors below 1024.
            self._loop = (
                asyncio.SelectorEventLoop(selectors.SelectSelector()) if self._precise else asyncio.new_event_loop()
            )
            self._thread = threading.Thread(target=self._loop.run_forever, name=f"fault-proxy-{self.port}", daemon=True)
            self._thread.start()
            self.accept()
        return self

    def close(self) -> None:
        """Closes all connections and ends the thread; may be called twice."""
        if self._loop is None or self._thread is None:
            return
        self._wait(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None
        self._ports.close()
        self._port = None

    def delay(self, to_server: Seconds = 0.0, to_client: Seconds = 0.0) -> None:
        """Delays what arrives from now on, on every connection."""

        def step() -> None:
            self._network.to_server.delay = to_server
            self._network.to_client.delay = to_client

        self._do(step)

    def cut(self) -> int:
        """Closes all connections; new ones are accepted."""
        return self._do(self._network.cut)

    def refuse(self) -> None:
        """Refuses new connections (ECONNREFUSED) until `accept` or `heal`; open ones stay."""
        self._do(self._stop_listening)

    def accept(self) -> None:
        """Accepts connections again."""
        self._do(self._listen)

    def blackhole(self, *, to_server: bool = True) -> None:
        """
        Keeps connections open but forwards nothing until `heal`, which forwards the rest.

        New connections are accepted, since a user program cannot leave a SYN unanswered,
        and get no answer.  That a side closes is not forwarded either.
        """

        def step() -> None:
            if to_server:
                self._network.to_server.gate.clear()
            self._network.to_client.gate.clear()

        self._do(step)

    def forget(self) -> int:
        """
        Has the connections that are open now carry nothing any more, as when a NAT has forgotten them; for good.

        Neither side hears of it, and new connections work.
        """
        return self._do(self._network.forget)

    def cut_idle(self, seconds: Seconds) -> None:
        """Closes connections on which nothing was forwarded for so long, as load balancers do, until `heal`."""
        self._do(lambda: self._network.cut_idle(seconds))

    def drop_next_reply(self, *, match: Match = b"", until: Match = b"") -> threading.Event:
        """
        Forwards one request, swallows its answer, then cuts that connection.

        The server did it, and the client cannot know.  Happens once for each call.

        until: What the swallowed bytes must contain before the connection is cut, or a
        function of them; empty: any answer.  A protocol whose servers send more
        than answers needs it: for gRPC (etcd) see `http2_call_ended`.
        """
        trap = Trap(match, until)
        self._do(lambda: self._network.traps.append(trap))
        return trap.sprung

    def heal(self) -> None:
        """Ends every fault: delay, blackhole, `cut_idle`, waiting `drop_next_reply`, refusal."""
        self._do(self._network.heal)
        self.accept()

    @property
    def counts(self) -> Counts:
        """How many connections there were so far, and how many there are."""
        return self._do(self._network.counts)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, step: Callable[[], T]) -> T:
        async def stepping() -> T:
            return step()

        return self._wait(stepping())

    def _wait(self, steps: Coroutine[object, object, T]) -> T:
        """Runs a coroutine in the proxy's thread and waits for it."""
        if self._loop is None:
            steps.close()
            raise RuntimeError("the proxy does not run: call start(), or use it as a context manager")
        return asyncio.run_coroutine_threadsafe(steps, self._loop).result(STEP_TIMEOUT)

    # A listening socket of our own and not asyncio.start_server(): closing that one while
    # it accepts a connection leaves the connection open for ever (CPython 3.11).

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.create_server((self.host, self.port), backlog=128)
            self._listener.settimeout(0)
            asyncio.get_running_loop().add_reader(self._listener, self._accept_one, self._listener)

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client has gone already
        # asyncio does it only for sockets that were made with IPPROTO_TCP, which accepted ones are not (CPython 3.11).
        # Without it the second of two answers waits up to 40 ms, for the client's delayed acknowledgement of the first.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._network.connected(connection)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _shut_down(self) -> None:
        self._stop_listening()
        self._network.cut_idle(None)
        # Not all at once: a link that is just being opened is cut when it is open.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            self._network.cut()
            await asyncio.wait(tasks)
        # Aborted transports close their sockets in the loop's next turn.
        await asyncio.sleep(0)


def http2_call_ended(data: bytes) -> bool:
    """
    Whether HTTP/2 frames hold the end of an answer (RFC 9113, sections 4.1 and 6.2).

    For `FaultProxy.drop_next_reply` and gRPC: the answer to a call ends with a HEADERS
    frame that has END_STREAM set.  Settings, pings, and the messages of streams that go on
    (watches, keep-alives) are not taken for it.
    """
    headers_frame, end_stream = 0x1, 0x1
    while len(data) >= 9:
        length, kind, flags = int.from_bytes(data[:3]), data[3], data[4]
        if kind == headers_frame and flags & end_stream:
            return True
        data = data[9 + length :]
    return False
