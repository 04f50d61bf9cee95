"""
The nodes of a Redlock on the network: calls to several of them at the same time, on one thread.

`lockkit.backends.redlock.backend` decides by counting answers, and contains no I/O. So the same code runs on these
nodes and on simulated ones (`lockkit_tools.simulation.redlock`).

A command is sent to all nodes that are up before any answer is read, and all answers have one deadline.

Which nodes are up is known before the call. Connections to the others are opened in the background, with a back-off. A
node that fails or does not answer in time is down until a new connection has been opened *and* has answered. So a node
that is stopped (it accepts connections and does not answer) costs its time limit once, and then nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, TypeAlias, cast

from lockkit.backend import CALL_SECONDS, Host, Request
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.connection import Connection, Sent
from lockkit.backends.redis.errors import DRIVER_ERRORS, lacks_script, translate
from lockkit.backends.redis.handshake import Handshake
from lockkit.backends.redis.keys import Pack
from lockkit.backends.redis.node import BATCH, RedisNode, delete_keys
from lockkit.backends.redis.resp import Reply, ServerSaid, bulk
from lockkit.backends.redis.wakeup import warn_of_polling
from lockkit.backends.redlock.nodes import (
    TOLD_THE_RUN,
    Answer,
    Argument,
    LockKeys,
    NodeConnecting,
    NodeDown,
    Op,
)
from lockkit.background import SingleRun
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import Event
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

CONNECT_SHARE = 0.75
"""Share of a call's time for connecting, which takes several round trips, while the call itself takes one. More leaves
too little time for the call; less gives up on nodes that are far away."""

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
"""Time for connecting and logging in, in node timeouts: each message has one. More delays the next attempt; fewer gives
up on a node that came back and is slow."""

UNSENT_MAX = 1000
"""Commands kept for a node that is down. Fewer leaves keys to their ttl; more takes memory."""

CLOSE_SECONDS = 0.2
"""How long closing waits for connections that are being opened. Longer delays the end when a node hangs; shorter leaves
sockets to be closed with their event loop."""

_UNKNOWN_RUN = bulk("")
_ERRORS: tuple[type[BaseException], ...] = (LockError, *DRIVER_ERRORS)

Answers: TypeAlias = "list[Reply] | LockError"
"""Of one node to a batch."""


class Nodes:
    """All nodes. Each call has one connection to every node to itself; tasks share one to each."""

    def __init__(self, host: Host, targets: Sequence[Target], options: Mapping[str, Any]) -> None:
        """Connect to nothing yet; `options` are the backend's."""
        self.host = host  # the engine's side
        self._runtime = host.runtime
        self._now = host.runtime.now
        self.timeout: Seconds = options["node_timeout"]  # for an answer, and for a connection
        self.durable: bool = options["durable"]  # the nodes lose no data, so their restarts do not matter
        self.used = self._now()  # client monotonic time of the last call that found a node down
        # The last call was made to close the client, perhaps because its event loop ends: start nothing that outlives
        # it, until there is another call.
        self.ending = False
        self.closed = False
        self.keeping = host.runtime.mutex()  # held while a connection is taken into use
        self.labels = [target.label for target in targets]  # for messages
        self.all = [RedlockNode(self, index, target, options["prefix"]) for index, target in enumerate(targets)]
        self._subscribed_before = False
        self._warned_of_polling = False

    async def ask(
        self,
        op: Op,
        keys: LockKeys,
        arguments: Sequence[Argument],
        *,
        last_arguments: Sequence[Argument] | None = None,
        only: Collection[int] | None = None,
        send_later_seconds: float = 0.0,
        until: Instant = inf,
    ) -> list[Answer]:
        """
        Run an operation on several nodes at the same time, with one deadline for all answers.

        It does not wait for nodes that are known to be down. With `send_later_seconds`, a node that does not answer
        gets it when it is reached again within that time.
        """
        self.ending = False
        assert last_arguments is None or len(last_arguments) == len(self.all)
        assert only is None or len(set(only)) == len(only), "a node asked twice"
        until = min(until, self._now() + CALL_SECONDS)
        asked = self.all if only is None else [self.all[index] for index in only]
        body = keys.body(op, *arguments)
        if last_arguments is None:
            bodies = [[body]] * len(asked)
        else:
            own = {last: [body + bulk(last)] for last in set(last_arguments)}
            bodies = [own[last_arguments[node.index]] for node in asked]
        found = await self._run(op, asked, bodies, until)
        answers: list[Answer] = [None] * len(self.all)
        for node, (answer,), (sent,) in zip(asked, found, bodies, strict=True):
            answers[node.index] = answer
            if send_later_seconds and isinstance(answer, LockError):
                node.send_later(send_later_seconds, op.loading_command(sent))
        return answers

    async def ask_many(
        self,
        op: Op,
        calls: Sequence[tuple[LockKeys, Sequence[Argument]]],
        *,
        until: Instant = inf,
        last: bool = False,
    ) -> list[list[Answer]]:
        """Run an operation for many locks on all nodes, pipelined, as long as there is time; `last` before the end."""
        # Threads that connect need no event loop, and a connection that was idle for long must be replaced.
        self.ending = last and self._runtime.kind == "asyncio"
        now = self._now
        until = min(until, now() + CALL_SECONDS)
        answers: list[list[Answer]] = [[] for _ in self.all]
        for start in range(0, len(calls), BATCH):
            if now() >= until:
                late = BackendUnavailable(f"{len(calls) - start} of {len(calls)} locks were not reached in time")
                return [[*replies, *[late] * (len(calls) - start)] for replies in answers]
            # A node that stops answering in the middle leaves the others half of the time.
            by = now() + (until - now()) / 2
            bodies = [keys.body(op, *values) for keys, values in calls[start : start + BATCH]]
            found = await self._run(op, self.all, [bodies] * len(self.all), by)
            answers = [[*replies, *more] for replies, more in zip(answers, found, strict=True)]
        return answers

    async def _run(
        self, op: Op, asked: Sequence[RedlockNode], bodies: Sequence[Sequence[bytes]], until: Instant
    ) -> list[list[Answer]]:
        """Run an operation at some nodes, perhaps several times, and load its script where it is missing."""
        tell_run = op in TOLD_THE_RUN
        found = await self._ask_each(asked, _messages(op.command, op, bodies), until, tell_run=tell_run)
        if all(type(replies) is list and ServerSaid not in map(type, replies) for replies in found):
            return cast("list[list[Answer]]", found)
        unknown = [index for index, said in enumerate(found) if type(said) is list and any(map(lacks_script, said))]
        if unknown:
            messages = _messages(op.loading_command, op, [bodies[index] for index in unknown])
            again = await self._ask_each([asked[index] for index in unknown], messages, until, tell_run=tell_run)
            for index, replies in zip(unknown, again, strict=True):
                found[index] = replies
        return [
            [replies] * len(own)
            if isinstance(replies, LockError)
            else [translate(reply, node.label) if isinstance(reply, ServerSaid) else reply for reply in replies]
            for node, own, replies in zip(asked, bodies, found, strict=True)
        ]

    async def _ask_each(
        self, asked: Sequence[RedlockNode], messages: Sequence[tuple[bytes, int]], until: Instant, *, tell_run: bool
    ) -> list[Answers]:
        """Send each node its commands, all before any answer is read; return its replies, or why there are none."""
        taken: list[Connection | None] = []
        try:
            now = self._now()
            # Element by element: what was taken before an interrupt is in the list.
            taken += (node.take(now) for node in asked)
            if None in taken:
                await self._open_missing(asked, taken, now + (until - now) * CONNECT_SHARE)
            return await self._exchange(asked, taken, messages, until, tell_run=tell_run)
        except BaseException:
            # On Ctrl-C, anywhere: half an answer must not remain for the next caller.
            for connection in taken:
                if connection is not None and not connection.shared:
                    connection.close()
            raise

    async def _open_missing(self, asked: Sequence[RedlockNode], taken: list[Connection | None], until: Instant) -> None:
        """
        Wait for nodes that may be up soon, and open the connections of this call.

        Those that are not up are connected in the background, all at the same time; the others answer at once.
        """
        self.used = self._now()
        for node in asked:
            node.connect_soon()
        await self._runtime.sleep(0)  # a task that tries again and again must let the event loop connect
        for node in asked:
            if not (node.up or self.ending):
                await node.settled.wait(max(0.0, min(node.wait_until, until) - self._now()))
        until = min(until, self._now() + self.timeout)
        for index, node in enumerate(asked):
            if taken[index] is None:
                taken[index] = await node.take_or_open(until)

    async def _exchange(
        self,
        asked: Sequence[RedlockNode],
        taken: list[Connection | None],
        messages: Sequence[tuple[bytes, int]],
        until: Instant,
        *,
        tell_run: bool,
    ) -> list[Answers]:
        """Send, then receive. Connections that are kept or closed again are removed from `taken`."""
        answers: list[Answers] = [
            node.not_asked if connection is None else [] for node, connection in zip(asked, taken, strict=True)
        ]
        sent: list[Sent | None] = [None] * len(asked)
        for index, connection in enumerate(taken):
            if connection is not None:
                packed, count = messages[index]
                try:
                    sent[index] = connection.send(packed + connection.run_id if tell_run else packed, count, until)
                except DRIVER_ERRORS as error:
                    answers[index], taken[index] = asked[index].lost(error, connection), None
        by = self._now() + self.timeout
        patient = until >= by  # not by a difference, which a rounded sum would make too small
        until = min(until, by)
        for index, (node, connection, one) in enumerate(zip(asked, taken, sent, strict=True)):
            if connection is None or one is None:
                continue
            try:
                # One deadline for all: two slow nodes must not take twice the time. A shared connection has its own.
                answers[index] = await connection.answer(one, inf if patient and connection.shared else until)
            except DRIVER_ERRORS as error:
                answers[index] = node.failed(error, connection, patient=patient)
            else:
                node.give_back(connection)
            taken[index] = None
        assert not any(taken), "a connection that is neither kept nor closed"
        return answers

    def queue_entries(self, request: Request) -> list[str]:
        """
        Return the entries for the queues of the nodes, and wake the request from now on.

        An entry is "" where there is no subscription; all are before `listen`.
        """
        found = []
        for node in self.all:
            channel = node.listener.channel
            if channel is not None:
                node.listener.expect(request)
            elif node.up and self._subscribed_before:
                node.subscribe_soon()  # back after a restart: the next attempt enters the queue there
            found.append("" if channel is None else f"{request.owner} 0 {channel}")
        return found

    async def listen(self, until: Instant) -> bool:
        """Subscribe at all nodes that are up, for `queue_entries`. Return whether there is any subscription."""
        until = min(until, self._now() + self.timeout)
        opened = [node.subscribe_soon() for node in self.all if node.up and node.listener.channel is None]
        for event in opened:
            await event.wait(max(0.0, until - self._now()))
        self._subscribed_before = any(node.listener.channel is not None for node in self.all)
        denied = next((node.listener.denied for node in self.all if node.listener.denied is not None), None)
        if denied is not None and not self._warned_of_polling:
            self._warned_of_polling = True
            warn_of_polling(", ".join(self.labels), denied)
        return self._subscribed_before

    def forget(self, request: Request) -> None:
        """Stop waking a request."""
        for node in self.all:
            node.listener.forget(request)

    async def erase(self, prefix: str) -> None:
        """Delete the keys of all locks with a prefix at every node."""
        for node in self.all:
            await delete_keys(node.server, prefix)

    async def close(self) -> None:
        """Close the connections."""
        self.closed = True
        for node in self.all:
            node.close()
        if self._runtime.kind == "asyncio":
            # Tasks that are connecting close what they open; if the event loop ended before, that would stay open.
            until = self._now() + CLOSE_SECONDS
            while any(node.opening for node in self.all) and self._now() < until:
                await self._runtime.sleep(0.001)
        for node in self.all:
            await node.server.close()


class RedlockNode:
    """One node, as one client knows it: whether it is up, its connections, and what it still has to be sent."""

    def __init__(self, nodes: Nodes, index: int, target: Target, prefix: str) -> None:
        self._nodes = nodes
        self._runtime = runtime = nodes.host.runtime
        self.index = index
        self.label = target.label  # ``host:port``, for messages
        self.up = False  # connected, and has answered the last call
        self.error: LockError = BackendUnavailable(f"{target.label} has not been reached yet")  # why it is down
        self.run_id = b""  # packed, of the server, as told on the last connection
        self.server = RedisNode(runtime, target, prefix, Handshake(nodes.host, votes=True, durable=nodes.durable))
        self.listener = self.server.listener  # the subscription there
        self.settled = runtime.event()  # set when an attempt to connect has succeeded or failed
        self.wait_until = inf  # an attempt to connect is worth waiting for until then; infinite before the first one
        self._closing = runtime.event()
        self._mutex = runtime.mutex()
        self._unsent: dict[bytes, Instant] = {}  # and until when it is of use
        self._has_new_unsent = False
        self._connecting = SingleRun(runtime, "lockkit-redlock-connect", self._reconnect)
        self._subscribing = SingleRun(runtime, "lockkit-redlock-listen", self._subscribe)

    # -- connecting ------------------------------------------------------------------------------------------------

    @property
    def not_asked(self) -> NodeDown:
        """The answer to a call that was not sent."""
        if self.up or self._runtime.now() < self.wait_until:
            return NodeConnecting(BackendUnavailable(f"no connection to {self.label} was opened in time"))
        return NodeDown(self.error)

    @property
    def opening(self) -> bool:
        """Whether a connection is being opened in the background."""
        return self._connecting.under_way or self._subscribing.under_way

    def connect_soon(self) -> None:
        """Connect in the background, unless the node is up or that is in progress."""
        if self.up or self._nodes.closed or self._nodes.ending:
            return
        if self.wait_until == inf:
            self.wait_until = self._runtime.now() + max(FIRST_CONNECT_SECONDS, self._nodes.timeout)
        self._connecting.start()

    async def _reconnect(self) -> None:
        """Open one connection, the first or one more, however often that takes; send what is unsent."""
        nodes, pause_seconds = self._nodes, RECONNECT_SECONDS_MIN
        try:
            while not nodes.closed:
                self._has_new_unsent = False
                try:
                    await self._open(inf)
                except _ERRORS as error:
                    self.lost(error)
                else:
                    if self._has_new_unsent:
                        continue
                    return
                now = self._runtime.now()
                unsent = any(until > now for until in list(self._unsent.values()))
                if now - nodes.used > RECONNECT_IDLE_SECONDS and not unsent:
                    return
                await self._closing.wait(pause_seconds * self._runtime.random.uniform(0.5, 1.0))
                pause_seconds = min(2 * pause_seconds, RECONNECT_SECONDS_MAX)
        finally:
            self.settled.set()

    async def _open(self, until: Instant) -> None:
        """Open a connection to a server that tells its run id, send what is unsent, and take it into use for calls."""
        opening = OPENING_TIMEOUTS * self.server.target.timeout
        connection = await self.server.connect(min(until, self._runtime.now() + opening))
        try:
            connection.used = self._runtime.now()
            await self._flush(connection)
            self._keep(connection)
        except BaseException:
            connection.close()
            raise

    def _keep(self, connection: Connection) -> None:
        """Take a connection into use."""
        # All nodes share one mutex for this: of two that come up at the same moment, the second finds the first.
        with self._nodes.keeping, self._mutex:
            self._refuse_same_server(connection)
            if self._nodes.closed or (connection.shared and self.up):
                connection.close()  # the shared one stays: this one was opened to send what was unsent
                return
            if connection.shared:
                if connection.error is not None:
                    raise connection.error
                # At once, whether or not there is another call: something may be unsent.
                connection.on_lost = partial(self._ended, connection)
            self.run_id = connection.run_id
            self.up = True
            self.server.keep_new(connection)
        self.settled.set()

    def _refuse_same_server(self, connection: Connection) -> None:
        for other in self._nodes.all:
            if other is not self and other.up and other.run_id == connection.run_id != _UNKNOWN_RUN:
                message = (
                    f"{self.label} is the same server as {other.label}: it must not vote twice. "
                    "Give the addresses of independent servers"
                )
                raise ConfigurationError(message)

    # -- connections -----------------------------------------------------------------------------------------------

    def take(self, now: Instant) -> Connection | None:
        """Take an idle connection that is still open, as far as is known; tasks share the only one."""
        return self.server.kept(now) if self.up else None

    async def take_or_open(self, until: Instant) -> Connection | None:
        """Take an idle connection, or open one more; None if the node is down, or does not answer in time."""
        while self.up:
            now = self._runtime.now()
            connection = self.take(now)
            if connection is not None or now >= until:
                return connection
            try:
                await self._open(until)  # which another thread may take first
            except _ERRORS as error:
                self.failed(error, None, patient=False)
        return None

    def give_back(self, connection: Connection) -> None:
        """Keep a connection that has no call in progress for the next caller."""
        if connection.shared:
            return
        if self.up:
            self.server.give_back(connection)
        else:
            connection.close()

    def failed(self, error: BaseException, connection: Connection | None, *, patient: bool) -> LockError:
        """
        Judge the node after a call that failed, and return the error.

        It is down only if it has had its time, and not if this caller had less. A connection that tasks share ends by
        itself when the node has had its time, and goes on if only this caller gives up.
        """
        if connection is not None and connection.shared:
            return translate(error, self.label)
        if patient or not isinstance(error, TimeoutError):
            return self.lost(error, connection)
        if connection is not None:
            connection.close()
        self._connecting.start()  # which finds out whether it answers
        return translate(error, self.label)

    def _ended(self, connection: Connection, error: BaseException) -> None:
        if self.up and connection is self.server.shared:
            self.lost(error, connection)

    def lost(self, error: BaseException, connection: Connection | None = None) -> LockError:
        """Mark the node as down, and reconnect in the background; return why it is down."""
        # A server that ended its connections may be back already, and connecting shows that at once: the next call
        # waits for that. It does not wait again for a server that did not answer.
        hopeful = connection is not None and isinstance(error, ConnectionError)
        said = error if isinstance(error, LockError) else translate(error, self.label)
        said.__cause__ = error.__cause__ if said is error else error
        # It is kept: a traceback refers to the frames of all callers, and so to the leases that they hold.
        kept: BaseException | None = said
        while kept is not None:
            kept = kept.with_traceback(None).__cause__
        with self._mutex:
            self.up, self.error = False, said
            self.wait_until = self._runtime.now() + OPENING_TIMEOUTS * self._nodes.timeout if hopeful else 0.0
            (self.settled.clear if hopeful else self.settled.set)()
        # Not under the mutex: closing an async connection calls `_ended` at once.
        if connection is not None:
            connection.close()
        self.server.close_idle(self.server.shared)
        log.debug("lost %s: %s", self.label, said)
        self.connect_soon()
        return said

    # -- subscribing -----------------------------------------------------------------------------------------------

    def subscribe_soon(self) -> Event:
        """Subscribe in the background; the event is set when that has succeeded or failed."""
        return self._subscribing.start()

    async def _subscribe(self) -> None:
        try:
            await self.listener.open()
        except LockError as error:
            log.debug("cannot subscribe at %s: %s", self.label, error)

    # -- sending later ---------------------------------------------------------------------------------------------

    def send_later(self, seconds: Seconds, packed: bytes) -> None:
        """
        Send a command when the node is reached next, if that is within so many seconds.

        An error reply does not confirm it: then it is sent again with the next connection.
        """
        assert seconds > 0, "a command that would never be sent"
        with self._mutex:
            self._unsent.pop(packed, None)  # to the end
            self._unsent[packed] = self._runtime.now() + seconds
            if len(self._unsent) > UNSENT_MAX:
                del self._unsent[next(iter(self._unsent))]
            self._has_new_unsent = True
            up = self.up
        if up and not self._nodes.closed:
            self._connecting.start()  # the node came back before this was noted

    async def _flush(self, connection: Connection) -> None:
        """Send what is unsent, oldest first, and forget what the node confirms."""
        now = self._runtime.now()
        with self._mutex:
            self._unsent = {packed: until for packed, until in self._unsent.items() if until > now}
            unsent = list(self._unsent.items())
        for start in range(0, len(unsent), BATCH):
            batch = unsent[start : start + BATCH]
            replies = await connection.call_many(b"".join(packed for packed, _ in batch), len(batch))
            with self._mutex:
                for (packed, until), reply in zip(batch, replies, strict=True):
                    # Else the server is loading its data, is out of memory, or denies a right.
                    if not isinstance(reply, ServerSaid) and self._unsent.get(packed) == until:
                        del self._unsent[packed]

    def close(self) -> None:
        """End the background work, and the subscription."""
        assert self._nodes.closed, "connections that are being opened would be kept"
        self._closing.set()
        self.listener.close()
        with self._mutex:
            self.up, self.wait_until = False, 0.0


def _messages(pack_first: Pack, op: Op, bodies: Sequence[Sequence[bytes]]) -> list[tuple[bytes, int]]:
    """Pack the calls of each node, once for nodes that have the same; `pack_first` packs the first of them."""
    different = {id(own): own for own in bodies}
    packed = {key: b"".join([pack_first(own[0]), *map(op.command, own[1:])]) for key, own in different.items()}
    return [(packed[id(own)], len(own)) for own in bodies]
