"""
One node of a Redlock, as one client knows it: whether it is up, its connections, and what it still has to be sent.

Before anything is sent, the client knows which nodes are up: connections are opened in the background, with a back-off.
A node that fails or does not answer in time is down until a new connection has been opened *and* has answered. So a
node that is stopped (it accepts connections and does not answer) costs its time limit once, and then nothing.
"""

from __future__ import annotations

import logging
from functools import partial
from itertools import islice

from lockkit.backend import Host
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.connection import Connection
from lockkit.backends.redis.errors import DRIVER_ERRORS, translate
from lockkit.backends.redis.handshake import Handshake
from lockkit.backends.redis.node import BATCH, RedisNode
from lockkit.backends.redis.resp import ServerSaid, bulk
from lockkit.backends.redlock.nodes import NodeConnecting, NodeDown
from lockkit.background import SingleRun
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import Event
from lockkit.units import Instant

log = logging.getLogger("lockkit")

FIRST_CONNECT_SECONDS = 2.0
"""Wait for the first connection to a node. Longer delays the first call when a node cannot be reached; shorter leaves
nodes out of it when the machine is busy starting."""

RECONNECT_SECONDS_MIN = 0.05
"""First pause after a connection that failed. Shorter tries a dead port more often."""

RECONNECT_SECONDS_MAX = 2.0
"""Longest pause. Longer finds a node that is back later."""

RECONNECT_IDLE_SECONDS = 60.0
"""A client without calls for so long stops reconnecting to lost nodes. Longer keeps a dropped client's threads."""

OPENING_TIMEOUTS = 3
"""Time for connecting and logging in, in node timeouts: each message has one. More delays the next attempt."""

UNSENT_MAX = 1000
"""Commands kept for a node that is down. Fewer leaves keys to their ttl; more takes memory."""

_UNKNOWN_RUN = bulk("")
_ERRORS: tuple[type[BaseException], ...] = (LockError, *DRIVER_ERRORS)


class ClientState:
    """
    What the nodes of one client share.

    Attributes:
        host: The engine's side.
        runtime: Of the sync or the async API.
        durable: The nodes lose no data, so their restarts do not matter.
        nodes: All nodes.
        used: Client monotonic time of the last call.
        ending: The last call was made to close the client, perhaps because its event loop ends: start nothing that
            outlives it, until there is another call.
        closed: The client is closed.
        keeping: Held while a connection is taken into use.
    """

    def __init__(self, host: Host, *, durable: bool) -> None:
        self.host = host
        self.runtime = host.runtime
        self.durable = durable
        self.nodes: list[RedlockNode] = []
        self.used = self.runtime.now()
        self.ending = False
        self.closed = False
        self.keeping = self.runtime.mutex()


class RedlockNode:
    """
    One node.

    Attributes:
        index: Its number.
        label: ``host:port``, for messages.
        up: Connected, and has answered the last call.
        error: Why it is down, if it is.
        run_id: The packed run id of the server, as told on the last connection.
        server: Its connections.
        listener: The subscription there.
        settled: Set unless an attempt to connect is worth waiting for.
        added: Set when there is one more idle connection, or the node is down.
        wait_until: Wait for the first connection at least until then, because nothing is known of the node yet.
    """

    def __init__(self, client: ClientState, index: int, target: Target, prefix: str) -> None:
        self.index = index
        self.up = False
        self.label = target.label
        self.error: LockError
        self._down: NodeDown
        self._note(BackendUnavailable(f"{target.label} has not been reached yet"))
        self._unconnected = NodeConnecting(BackendUnavailable(f"no connection to {target.label} was opened in time"))
        self.run_id = b""
        self.settled = client.runtime.event()
        self.added = client.runtime.event()
        self.wait_until = 0.0
        self._client = client
        self._runtime = client.runtime
        look = Handshake(client.host, votes=True, durable=client.durable)
        self.server = RedisNode(client.runtime, target, prefix, look)
        self.listener = self.server.listener
        self._closing = client.runtime.event()
        self._mutex = client.runtime.mutex()
        self._unsent: dict[bytes, float] = {}
        self._connecting = SingleRun(client.runtime, "lockkit-redlock-connect", self._reconnect)
        self._subscribing = SingleRun(client.runtime, "lockkit-redlock-listen", self._subscribe)
        self._flushing = SingleRun(client.runtime, "lockkit-redlock-flush", self._flush_separately)

    def _note(self, error: LockError) -> None:
        assert not self.up, "a node that is up has no error"
        self.error = error
        self._down = NodeDown(error)
        # They are kept: a traceback refers to the frames of all callers, and so to the leases that they hold.
        kept: BaseException | None = error
        while kept is not None:
            kept = kept.with_traceback(None).__cause__

    # -- connecting ------------------------------------------------------------------------------------------------

    @property
    def not_asked(self) -> NodeDown:
        """The answer to a call that was not sent."""
        return self._unconnected if self.up or not self.settled.is_set() else self._down

    @property
    def opening(self) -> bool:
        """Whether a connection is being opened."""
        return any(work.under_way for work in (self._connecting, self._subscribing, self._flushing))

    def connect_soon(self) -> None:
        """Connect in the background, unless the node is up or that is in progress."""
        if self.up or self._client.closed or self._client.ending:
            return
        if not self.wait_until:
            self.wait_until = self._runtime.now() + FIRST_CONNECT_SECONDS
        self._connecting.start()

    async def _reconnect(self) -> None:
        """Open one connection, the first or one more, however often that takes."""
        client, pause_seconds = self._client, RECONNECT_SECONDS_MIN
        try:
            while not client.closed:
                try:
                    await self._open()
                except _ERRORS as error:
                    self.lost(error)
                else:
                    return
                now = self._runtime.now()
                if now - client.used > RECONNECT_IDLE_SECONDS and not self._has_unsent(now):
                    return
                await self._closing.wait(pause_seconds * self._runtime.random.uniform(0.5, 1.0))
                pause_seconds = min(2 * pause_seconds, RECONNECT_SECONDS_MAX)
        finally:
            self.settled.set()

    async def _open(self) -> None:
        """Open a connection, send what is unsent, and then take it into use for calls."""
        connection = await self._connect()
        try:
            await self._flush(connection)
            self._keep(connection)
        except BaseException:
            connection.close()
            raise

    # -- connections -------------------------------------------------------------------------------------------------

    def take(self, now: Instant) -> Connection | None:
        """Take an idle connection that is still open, as far as is known; tasks share the only one."""
        return self.server.kept(now) if self.up else None

    async def take_next(self, until: Instant) -> Connection | None:
        """Wait until there is an idle connection, and take it; None if the node is down or there is none in time."""
        while True:
            self.added.clear()
            now = self._runtime.now()
            connection = self.take(now)
            if connection is not None or now >= until or not self.up:
                return connection
            self.extend_soon()
            await self.added.wait(until - now)

    def extend_soon(self) -> None:
        """Open one more connection in the background, unless that is in progress; `added` is set then."""
        self._connecting.start()

    def _keep(self, connection: Connection) -> None:
        """Take a connection into use."""
        # All nodes share one mutex for this: of two that come up at the same moment, the second finds the first.
        with self._client.keeping, self._mutex:
            closed = self._client.closed
            self._refuse_same_server(connection)
            if not closed:
                if connection.shared:
                    if connection.error is not None:
                        raise connection.error
                    # At once, whether or not there is another call: something may be unsent.
                    connection.on_lost = partial(self._ended, connection)
                self.up = True
                self.server.keep_new(connection)
                self.added.set()
        if closed:
            connection.close()
        elif self._has_unsent(self._runtime.now()):
            self._flushing.start()

    def _refuse_same_server(self, connection: Connection) -> None:
        for other in self._client.nodes:
            if other is not self and other.up and other.run_id == connection.run_id != _UNKNOWN_RUN:
                message = (
                    f"{self.label} is the same server as {other.label}: it must not vote twice. "
                    "Give the addresses of independent servers"
                )
                raise ConfigurationError(message)

    def _ended(self, connection: Connection, error: BaseException) -> None:
        if self.up and connection is self.server.shared:
            self.lost(error, connection=connection)

    async def _connect(self) -> Connection:
        """Open a connection to a server that has told its run id."""
        try:
            connection = await self.server.connect(self._runtime.now() + OPENING_TIMEOUTS * self.server.target.timeout)
        except DRIVER_ERRORS as error:
            raise translate(error, self.label) from error
        connection.used = self._runtime.now()
        self.run_id = connection.run_id
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection that has no call in progress for the next caller."""
        if self.up or connection.shared:
            self.server.give_back(connection)
            self.added.set()
        else:
            connection.close()

    def lost(self, error: BaseException, *, connection: Connection | None = None) -> None:
        """Mark the node as down and reconnect in the background."""
        with self._mutex:
            self.up = False
            self._note(error if isinstance(error, LockError) else translate(error, self.label))
            # A server that ended its connections may be back already, and connecting shows that at once: the next call
            # waits for that. It does not wait again for a server that did not answer.
            if connection is not None and isinstance(error, ConnectionError):
                self.settled.clear()
            else:
                self.settled.set()
        self.added.set()
        # Not under the mutex: closing an async connection calls `_ended` at once.
        if connection is not None:
            connection.close()
        self.server.close_idle(self.server.shared)
        log.debug("lost %s: %s", self.label, self.error)
        self.connect_soon()

    # -- subscribing -----------------------------------------------------------------------------------------------

    def subscribe_soon(self) -> Event:
        """Subscribe in the background; the event is set when that has succeeded or failed."""
        if self.listener.channel is None:
            return self._subscribing.start()
        done = self._runtime.event()
        done.set()
        return done

    async def _subscribe(self) -> None:
        try:
            await self.listener.open()
        except LockError as error:
            log.debug("cannot subscribe at %s: %s", self.label, error)

    # -- sending later ---------------------------------------------------------------------------------------------

    def send_later(self, seconds: float, packed: bytes) -> None:
        """
        Send a command when the node is reached next, if that is within so many seconds.

        An error reply does not confirm it: then it is sent again with the next connection.
        """
        assert seconds > 0, "a command that would never be sent"
        until = self._runtime.now() + seconds
        with self._mutex:
            self._unsent.pop(packed, None)  # to the end
            self._unsent[packed] = until
            if len(self._unsent) > UNSENT_MAX:
                del self._unsent[next(iter(self._unsent))]
            assert len(self._unsent) <= UNSENT_MAX
            up = self.up
        if up and not self._client.closed:
            # The node came back before this was noted.
            self._flushing.start()

    def _has_unsent(self, now: float) -> bool:
        return any(until > now for until in tuple(self._unsent.values()))

    async def _flush(self, connection: Connection) -> None:
        """Send what is unsent, oldest first, and forget what the node confirms."""
        tried: set[bytes] = set()
        while True:
            now = self._runtime.now()
            with self._mutex:
                self._unsent = {packed: until for packed, until in self._unsent.items() if until > now}
                batch = list(islice((one for one in self._unsent.items() if one[0] not in tried), BATCH))
            if not batch:
                return
            tried.update(packed for packed, _ in batch)
            replies = await connection.call_many(b"".join(packed for packed, _ in batch), len(batch))
            with self._mutex:
                for (packed, until), reply in zip(batch, replies, strict=True):
                    # Else the server is loading its data, is out of memory, or denies a right.
                    if not isinstance(reply, ServerSaid) and self._unsent.get(packed) == until:
                        del self._unsent[packed]

    async def _flush_separately(self) -> None:
        """Send what is unsent on a separate connection, while calls use the node."""
        try:
            connection = await self._connect()
            try:
                await self._flush(connection)
            finally:
                connection.close()
        except _ERRORS as error:
            self.lost(error)

    def close(self) -> None:
        """Close all connections."""
        assert self._client.closed, "connections that are being opened would be kept"
        self._closing.set()
        self.listener.close()
        with self._mutex:
            self.up = False
