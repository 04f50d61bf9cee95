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
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Match: TypeAlias = bytes | Callable[[bytes], bool]
"""What a piece of a stream must contain, or a function that decides."""

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]

CHUNK_BYTES = 65_536

# Chunks of one direction that a blackhole or a delay keeps before reading stops.  As with a
# real network, the sender is held up when the buffers on the way are full.
KEPT_CHUNKS_MAX = 64


@dataclass(slots=True)
class Counts:
    """What went through a proxy."""

    connections: int = 0
    """Connections that clients opened."""
    open: int = 0
    """Connections that are open now."""
    bytes_to_server: int = 0
    """Bytes forwarded to the server."""
    bytes_to_client: int = 0
    """Bytes forwarded to clients; swallowed answers are not among them."""
    commands: Counter[str] = field(default_factory=Counter)
    """Redis commands by name in capitals, with `FaultProxy(count_commands=True)`."""


class Trap:
    """
    Waits for a request whose answer is to be lost.

    Args:
        skip: How many matching requests to let through first.
        until: What the swallowed bytes must contain before the connection is cut.
    """

    def __init__(self, match: Match, skip: int, until: Match) -> None:
        self._match = match
        self._skip = skip
        self._until = until
        self._swallowed = b""
        self.sprung = threading.Event()

    def takes(self, request: bytes) -> bool:
        """Whether the answer to this chunk of requests is the one to lose."""
        if not matches(self._match, request):
            return False
        self._skip -= 1
        return self._skip < 0

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
        self.bytes = 0


class Network:
    """What all connections of a proxy share: their faults and counters."""

    def __init__(self, target: tuple[str, int], *, count_commands: bool) -> None:
        self.target = target
        self.to_server = Way()
        self.to_client = Way()
        self.traps: list[Trap] = []
        self.links: set[Link] = set()
        self._idle_cutter: asyncio.Task[None] | None = None
        self._connections = 0
        self.commands: Counter[str] | None = Counter() if count_commands else None

    def connected(self, connection: socket.socket) -> None:
        """Takes a new client."""
        self._connections += 1
        link = Link(self, connection)
        self.links.add(link)
        link.task.add_done_callback(lambda _: self.links.discard(link))

    def cut(self, *, reset: bool) -> int:
        """Closes all connections and tells how many there were."""
        links = list(self.links)
        for link in links:
            link.cut(reset=reset)
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
                    link.cut(reset=False)

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
        """A copy of the counters."""
        return Counts(
            connections=self._connections,
            open=len(self.links),
            bytes_to_server=self.to_server.bytes,
            bytes_to_client=self.to_client.bytes,
            commands=Counter(self.commands or {}),
        )

    def reset_counts(self) -> None:
        """Sets the counters to zero."""
        self._connections = self.to_server.bytes = self.to_client.bytes = 0
        if self.commands is not None:
            self.commands.clear()


class Link:
    """
    One client's connection, and ours to the server on its behalf.

    Attributes:
        known: Not set: nothing is forwarded any more.
        active_at: When something was forwarded last, by the loop's clock.
    """

    def __init__(self, network: Network, connection: socket.socket) -> None:
        self._network = network
        self._connection = connection
        self._writers: list[asyncio.StreamWriter] = []
        self._cut_when_open: Callable[[], None] | None = None
        self._trap: Trap | None = None
        self._parser = CommandParser()
        self.known = asyncio.Event()
        self.known.set()
        self.active_at = asyncio.get_running_loop().time()
        self.task = asyncio.get_running_loop().create_task(self._run())

    def cut(self, *, reset: bool) -> None:
        """Closes both sides at once, throwing away what waits."""
        self._network.links.discard(self)
        if not self._writers:
            # Accepted in this very turn of the loop; there is nothing to close yet.
            self._cut_when_open = lambda: self.cut(reset=reset)
            return
        for writer in self._writers:
            if reset:
                set_reset_on_close(writer)
            # Not close(): that would first send what a delay or a blackhole keeps back.
            writer.transport.abort()
        self.task.cancel()

    async def _run(self) -> None:
        client = await self._open(sock=self._connection)
        if self._cut_when_open is not None:
            self._cut_when_open()
        # In a partition the server does not learn of a new client either.
        await self._network.to_server.gate.wait()
        host, port = self._network.target
        try:
            server = await self._open(host=host, port=port)
            async with asyncio.TaskGroup() as group:
                self._connect_pipes(group, client, server)
        except* OSError:
            # No server, or one side is gone: what the host of a dead server would say.
            self.cut(reset=True)
        finally:
            for writer in self._writers:
                writer.close()

    async def _open(self, **where: Any) -> Streams:
        reader, writer = await asyncio.open_connection(**where)
        self._writers.append(writer)
        return reader, writer

    def _connect_pipes(self, group: asyncio.TaskGroup, client: Streams, server: Streams) -> None:
        request = Pipe(self, self._network.to_server, server[1], forward=self._forward_request)
        answer = Pipe(self, self._network.to_client, client[1], keep=self._keep_answer)
        for pipe, source in ((request, client[0]), (answer, server[0])):
            group.create_task(pipe.fill(source))
            group.create_task(pipe.empty())

    def _forward_request(self, data: bytes) -> None:
        """Looks at a request just before it goes to the server."""
        network = self._network
        if network.commands is not None:
            network.commands.update(self._parser.feed(data))
        if self._trap is None:
            self._trap = network.trap_for(data)

    def _keep_answer(self, data: bytes) -> bool:
        """Whether an answer goes on to the client: not, if it is the one to be lost."""
        if self._trap is None:
            return True
        if self._trap.swallow(data):
            self.cut(reset=False)
            self._trap.sprung.set()
        return False


class Pipe:
    """
    One direction of one connection.

    Args:
        way: Delay, gate and counter of this direction.
        keep: Asked for each chunk that was read; False throws it away.
        forward: Called with each chunk just before it is written.
    """

    def __init__(
        self,
        link: Link,
        way: Way,
        target: asyncio.StreamWriter,
        *,
        keep: Callable[[bytes], bool] = lambda _: True,
        forward: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self._link = link
        self._way = way
        self._target = target
        self._keep = keep
        self._forward = forward
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(KEPT_CHUNKS_MAX)

    async def fill(self, source: asyncio.StreamReader) -> None:
        """Reads until the other side closes; its closing is queued as an empty chunk."""
        clock = asyncio.get_running_loop().time
        while data := await source.read(CHUNK_BYTES):
            if self._keep(data):
                await self._queue.put((clock() + self._way.delay, data))
        await self._queue.put((clock() + self._way.delay, b""))

    async def empty(self) -> None:
        """Writes what is due while the gate is open."""
        clock = asyncio.get_running_loop().time
        while True:
            due, data = await self._queue.get()
            if (wait := due - clock()) > 0:
                await asyncio.sleep(wait)
            await self._way.gate.wait()
            await self._link.known.wait()
            if not data:
                break
            self._link.active_at = clock()
            self._forward(data)
            self._target.write(data)
            self._way.bytes += len(data)
            await self._target.drain()
        if self._target.can_write_eof():
            self._target.write_eof()


class CommandParser:
    """Finds the names of Redis commands in the stream of one client."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[str]:
        """Takes the next bytes and gives the names of the commands that they complete."""
        self._buffer += data
        names = []
        while (found := self._first()) is not None:
            name, end = found
            names.append(name.decode(errors="replace").upper())
            self._buffer = self._buffer[end:]
        return names

    def _first(self) -> tuple[bytes, int] | None:
        """Name and end of the first command in the buffer, if it is there completely."""
        head, found, _ = self._buffer.partition(b"\r\n")
        if not found:
            return None
        end = len(head) + 2
        if not head.startswith(b"*"):
            return head.split(b" ")[0], end  # the "inline" form, as typed by hand
        words = []
        for _ in range(int(head[1:])):
            # Each word: $LENGTH \r\n BYTES \r\n
            length, found, _ = self._buffer[end:].partition(b"\r\n")
            start = end + len(length) + 2
            if not found or len(self._buffer) < (end := start + int(length[1:]) + 2):
                return None
            words.append(self._buffer[start : end - 2])
        return words[0], end


def set_reset_on_close(writer: asyncio.StreamWriter) -> None:
    """Makes closing send RST instead of FIN (SO_LINGER with time zero, socket(7))."""
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
