"""
One proxied connection, and the faults that all connections of a proxy share.

What flows through a `Link`::

    client ── read ──> queue of (due time, bytes) ── gate ──> server
    client <── gate ── queue of (due time, bytes) <── read ── server

The queue keeps bytes until their delay is over, so that a delay is latency and does not
lower the throughput.  The gate is closed in a blackhole: bytes wait, as TCP would resend
them after a partition; nothing is lost from the middle of a stream.

Everything here runs in the proxy's event loop.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

Match: TypeAlias = bytes | Callable[[bytes], bool]
"""What a piece of a stream must contain, or a function that decides."""

CHUNK_BYTES = 65_536

# Chunks of one direction that a blackhole or a delay keeps before reading stops.  As with a
# real network, the sender is held up when the buffers on the way are full.
KEPT_CHUNKS_MAX = 64


class Counts(NamedTuple):
    """Connections that clients opened so far, and those that are open now."""

    connections: int
    open: int


class Trap:
    """
    Waits for a request whose answer is to be lost.

    Args:
        until: What the swallowed bytes must contain before the connection is cut.
    """

    def __init__(self, match: Match, until: Match) -> None:
        self._match = match
        self._until = until
        self._swallowed = b""
        self.sprung = threading.Event()

    def takes(self, request: bytes) -> bool:
        """Whether the answer to this chunk of requests is the one to lose."""
        return matches(self._match, request)

    def swallow(self, answer: bytes) -> bool:
        """Takes bytes of the answer; True when it is complete."""
        self._swallowed += answer
        return matches(self._until, self._swallowed)


def matches(match: Match, data: bytes) -> bool:
    """Whether `data` is what `match` asks for."""
    return match(data) if callable(match) else match in data


class Way:
    """The state of one direction, shared by all connections of a proxy."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.gate = asyncio.Event()
        self.gate.set()


class Network:
    """What all connections of a proxy share: their faults and counters."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.to_server = Way()
        self.to_client = Way()
        self.traps: list[Trap] = []
        self.links: set[Link] = set()
        self._idle_cutter: asyncio.Task[None] | None = None
        self._connections = 0

    def connected(self, connection: socket.socket) -> None:
        """Takes a new client."""
        self._connections += 1
        link = Link(self, connection)
        self.links.add(link)
        link.task.add_done_callback(lambda _: self.links.discard(link))

    def cut(self) -> int:
        """Closes all connections and tells how many there were."""
        links = list(self.links)
        for link in links:
            link.cut()
        return len(links)

    def forget(self) -> int:
        """Has the open connections carry nothing any more, and tells how many there are."""
        for link in self.links:
            link.known.clear()
        return len(self.links)

    def cut_idle(self, seconds: float | None) -> None:
        """From now on closes connections on which nothing was forwarded for so long; None: no longer."""
        if self._idle_cutter is not None:
            self._idle_cutter.cancel()
            self._idle_cutter = None
        if seconds is not None:
            self._idle_cutter = asyncio.get_running_loop().create_task(self._cut_idle(seconds))

    async def _cut_idle(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(seconds / 10)
            for link in list(self.links):
                if clock() >= link.active_at + seconds:
                    link.cut()

    def trap_for(self, request: bytes) -> Trap | None:
        """Takes the trap that waits for this request out of the list."""
        for trap in self.traps:
            if trap.takes(request):
                self.traps.remove(trap)
                return trap
        return None

    def heal(self) -> None:
        """Ends delays, blackholes, traps and the closing of idle connections."""
        self.cut_idle(None)
        for way in (self.to_server, self.to_client):
            way.delay = 0.0
            way.gate.set()
        self.traps.clear()

    def counts(self) -> Counts:
        """What the counters are now."""
        return Counts(self._connections, len(self.links))


class Link:
    """One client's connection, and ours to the server on its behalf."""

    def __init__(self, network: Network, connection: socket.socket) -> None:
        self._network = network
        self._connection = connection
        self._writers: list[asyncio.StreamWriter] = []
        self._cut_when_open: Callable[[], None] | None = None
        self._trap: Trap | None = None
        self.known = asyncio.Event()  # not set: nothing is forwarded any more
        self.known.set()
        self._clock = asyncio.get_running_loop().time
        self.active_at = self._clock()  # when something was forwarded last, by the loop's clock
        self.task = asyncio.get_running_loop().create_task(self._run())

    def cut(self, *, reset: bool = False) -> None:
        """Closes both sides at once, throwing away what waits."""
        self._network.links.discard(self)
        if not self._writers:
            # Accepted in this very turn of the loop; there is nothing to close yet.
            self._cut_when_open = lambda: self.cut(reset=reset)
            return
        for writer in self._writers:
            connection: socket.socket = writer.get_extra_info("socket")
            if reset and connection.fileno() >= 0:
                # Closing sends RST instead of FIN (SO_LINGER with time zero, socket(7)).
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # Not close(): that would first send what a delay or a blackhole keeps back.
            writer.transport.abort()
        self.task.cancel()

    async def _run(self) -> None:
        network = self._network
        requests, client = await self._open(sock=self._connection)
        if self._cut_when_open is not None:
            self._cut_when_open()
        # In a partition the server does not learn of a new client either.
        await network.to_server.gate.wait()
        host, port = network.target
        try:
            answers, server = await self._open(host=host, port=port)
            async with asyncio.TaskGroup() as group:
                for way, source, target in (
                    (network.to_server, requests, server),
                    (network.to_client, answers, client),
                ):
                    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(KEPT_CHUNKS_MAX)
                    group.create_task(self._fill(way, source, queue))
                    group.create_task(self._empty(way, queue, target))
        except* OSError:
            # No server, or one side is gone: what the host of a dead server would say.
            self.cut(reset=True)
        finally:
            for writer in self._writers:
                writer.close()

    async def _open(self, **where: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(**where)
        self._writers.append(writer)
        return reader, writer

    async def _fill(self, way: Way, source: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
        """Reads one direction until the other side closes; its closing is queued as an empty chunk."""
        while data := await source.read(CHUNK_BYTES):
            if way is self._network.to_server or not self._swallows(data):
                await queue.put((self._clock() + way.delay, data))
        await queue.put((self._clock() + way.delay, b""))

    async def _empty(self, way: Way, queue: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter) -> None:
        """Writes what is due while the gate is open."""
        while True:
            due, data = await queue.get()
            if (wait := due - self._clock()) > 0:
                await asyncio.sleep(wait)
            await way.gate.wait()
            await self.known.wait()
            if not data:
                break
            self.active_at = self._clock()
            if way is self._network.to_server and self._trap is None:
                self._trap = self._network.trap_for(data)
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()

    def _swallows(self, answer: bytes) -> bool:
        """Whether an answer is the one to be lost, and so does not go on to the client."""
        if self._trap is None:
            return False
        if self._trap.swallow(answer):
            self.cut()
            self._trap.sprung.set()
        return True
