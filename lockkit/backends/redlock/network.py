"""
Calls to several Redis nodes at the same time, on one thread.

A command is sent to all nodes that are up before any answer is read, and all answers have one deadline.
Which nodes are up is known before the call (`lockkit.backends.redlock.node`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice, repeat
from math import inf
from typing import Any, TypeAlias, cast

from lockkit.backend import CALL_SECONDS, Host, Request
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.connection import Connection, Sent
from lockkit.backends.redis.errors import DRIVER_ERRORS, translate
from lockkit.backends.redis.keys import Pack
from lockkit.backends.redis.listing import Scan
from lockkit.backends.redis.node import BATCH, delete_keys
from lockkit.backends.redis.resp import Reply, ServerSaid, bulk
from lockkit.backends.redis.wakeup import warn_of_polling
from lockkit.backends.redlock.addresses import counted
from lockkit.backends.redlock.node import ClientState, RedlockNode
from lockkit.backends.redlock.nodes import Answer, Argument, LockKeys, Nodes, Op
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import Event
from lockkit.units import Instant, Seconds

CONNECT_SHARE = 0.75
"""Share of a call's time for connecting, which takes several round trips, while the call itself takes one. More leaves
too little time for the call; less gives up on nodes that are far away."""

CLOSE_SECONDS = 0.2
"""How long closing waits for connections that are being opened. Longer delays the end when a node hangs; shorter leaves
sockets to be closed with their event loop."""

_EMPTY = bulk("")

Answers: TypeAlias = "list[Reply] | LockError"
"""Of one node to a batch."""


class NetworkNodes(Nodes):
    """
    Nodes on the network. Each call has one connection to every node to itself; tasks share one to each.

    Attributes:
        all: The nodes.
        client: What they share.
        timeout: Seconds for an answer, and for a connection.
    """

    def __init__(self, host: Host, targets: Sequence[Target], options: Mapping[str, Any]) -> None:
        """Connect to nothing yet; `options` are the backend's."""
        self.client = ClientState(host, durable=options["durable"])
        self.timeout: Seconds = options["node_timeout"]
        self.labels = [target.label for target in targets]
        self.all = [RedlockNode(self.client, index, target, options["prefix"]) for index, target in enumerate(targets)]
        self.client.nodes = self.all
        self._runtime = host.runtime
        self._subscribed_before = False
        self._warned_of_polling = False
        self._turns: deque[Event] = deque()  # of threads that wait for connections, in their order

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
        self.client.ending = False
        assert last_arguments is None or len(last_arguments) == len(self.all)
        assert only is None or len(set(only)) == len(only), "a node asked twice"
        until = min(until, self._runtime.now() + CALL_SECONDS)
        body = keys.body(op, *arguments)
        asked = self.all if only is None else [self.all[index] for index in only]
        if last_arguments is None or not any(last_arguments):
            # The same for all: packed once.
            bodies = [[body if last_arguments is None else body + _EMPTY]] * len(asked)
        else:
            bodies = [[body + bulk(last_arguments[node.index])] for node in asked]
        found = await self._run(op, asked, bodies, until)
        answers: list[Answer] = [None] * len(self.all)
        for node, (answer,) in zip(asked, found, strict=True):
            answers[node.index] = answer
        if send_later_seconds:
            for node, (own,) in zip(asked, bodies, strict=True):
                if isinstance(answers[node.index], LockError):
                    node.send_later(send_later_seconds, op.loading_command(own))
        return answers

    async def ask_many(
        self,
        op: Op,
        calls: Sequence[tuple[LockKeys, Sequence[Argument]]],
        *,
        until: Instant = inf,
        last: bool = False,
    ) -> list[list[Answer]]:
        # Threads that connect need no event loop, and a connection that was idle for long must be replaced.
        self.client.ending = last and self._runtime.kind == "asyncio"
        now = self._runtime.now
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
            for node, more in zip(self.all, found, strict=True):
                answers[node.index] += more
        assert all(len(replies) == len(calls) for replies in answers)
        return answers

    async def _run(
        self, op: Op, asked: Sequence[RedlockNode], bodies: Sequence[Sequence[bytes]], until: Instant
    ) -> list[list[Answer]]:
        """Run an operation at some nodes, perhaps several times, and load its script where it is missing."""
        found = await self._ask_each(asked, _messages(op.command, op, bodies), until, with_run_id=op.with_run_id)
        if all(map(_is_clean, found)):
            return cast("list[list[Answer]]", found)
        unknown = [index for index, replies in enumerate(found) if _lacks_script(replies)]
        if unknown:
            messages = _messages(op.loading_command, op, [bodies[index] for index in unknown])
            nodes = [asked[index] for index in unknown]
            again = await self._ask_each(nodes, messages, until, with_run_id=op.with_run_id)
            for index, replies in zip(unknown, again, strict=True):
                found[index] = replies
        return [
            [replies] * len(own)
            if isinstance(replies, LockError)
            else [translate(reply, node.label) if isinstance(reply, ServerSaid) else reply for reply in replies]
            for node, own, replies in zip(asked, bodies, found, strict=True)
        ]

    async def _ask_each(
        self, asked: Sequence[RedlockNode], messages: Sequence[tuple[bytes, int]], until: Instant, *, with_run_id: bool
    ) -> list[Answers]:
        """Send each node its commands, all before any answer is read; return its replies, or why there are none."""
        taken: list[Connection | None] = []
        try:
            # Element by element: what was taken before an interrupt is in the list. Threads that wait come first.
            now = self._runtime.now()
            taken += repeat(None, len(asked)) if self._turns else (node.take(now) for node in asked)
            if None in taken:
                await self._take_new(asked, taken, self._connect_by(until))
            return await self._exchange(asked, taken, messages, until, with_run_id=with_run_id)
        except BaseException:
            # On Ctrl-C, anywhere: half an answer must not remain for the next caller.
            for connection in taken:
                if connection is not None and not connection.shared:
                    connection.close()
            raise

    async def _take_new(self, asked: Sequence[RedlockNode], taken: list[Connection | None], until: Instant) -> None:
        """
        Take from each node the next connection that is opened, or given back by another thread.

        Threads take turns: if each kept some connections while it waits for the rest, few would get all.
        """
        for index, node in enumerate(asked):
            connection, taken[index] = taken[index], None
            if connection is not None:
                node.give_back(connection)
        await self._connect([node for node in asked if not node.up], until)
        until = min(until, self._runtime.now() + self.timeout)
        turn = self._runtime.event()
        try:
            self._turns.append(turn)
            if self._turns[0] is not turn:
                await turn.wait(max(0.0, until - self._runtime.now()))
            for node in asked:
                if node.up and not node.server.idle and node.server.shared is None:
                    node.extend_soon()  # at all nodes at the same time
            for index, node in enumerate(asked):
                taken[index] = await node.take_next(until)
        finally:
            with suppress(ValueError):
                self._turns.remove(turn)
            for following in islice(tuple(self._turns), 1):
                following.set()

    async def _exchange(
        self,
        asked: Sequence[RedlockNode],
        taken: list[Connection | None],
        messages: Sequence[tuple[bytes, int]],
        until: Instant,
        *,
        with_run_id: bool,
    ) -> list[Answers]:
        """Send, then receive. Connections that are kept or closed again are removed from `taken`."""
        answers: list[Answers] = [node.not_asked for node in asked]
        sent: list[Sent | None] = [None] * len(asked)
        for index, connection in enumerate(taken):
            if connection is not None:
                packed, count = messages[index]
                try:
                    sent[index] = connection.send(packed + connection.run_id if with_run_id else packed, count, until)
                except DRIVER_ERRORS as error:
                    asked[index].lost(error, connection=connection)
                    taken[index] = None
                    answers[index] = asked[index].error
        by = self._runtime.now() + self.timeout
        patient = until >= by  # not by a difference, which a rounded sum would make too small
        until = min(until, by)
        for index, (node, connection) in enumerate(zip(asked, taken, strict=True)):
            one = sent[index]
            if connection is None or one is None:
                continue
            try:
                # One deadline for all: two slow nodes must not take twice the time. A shared connection has its own.
                answers[index] = await connection.answer(one, inf if patient and connection.shared else until)
            except TimeoutError as error:
                answers[index] = self._too_slow(node, connection, error, patient=patient)
            except DRIVER_ERRORS as error:
                node.lost(error, connection=connection)
                answers[index] = node.error
            else:
                node.give_back(connection)
            taken[index] = None
        assert not any(taken), "a connection that is neither kept nor closed"
        assert len(answers) == len(asked)
        return answers

    def _too_slow(self, node: RedlockNode, connection: Connection, error: TimeoutError, *, patient: bool) -> LockError:
        """Close the connection. A node is down only if it has had its time, and not if this caller had less."""
        if patient:
            node.lost(error, connection=connection)
            return node.error
        if not connection.shared:
            connection.close()
            node.extend_soon()  # which finds out whether it answers
        return translate(error, node.label)

    def _connect_by(self, until: Instant) -> Instant:
        """Return when connecting must end, so that the call itself has some time left."""
        now = self._runtime.now()
        return now + (until - now) * CONNECT_SHARE

    async def _connect(self, missing: Sequence[RedlockNode], until: Instant) -> None:
        """
        Have nodes connected in the background, all at the same time, and wait until they are.

        It does not wait for nodes that are known to be down.
        """
        self.client.used = now = self._runtime.now()
        waits = []
        for node in missing:
            node.connect_soon()
            if not (node.up or node.settled.is_set() or self.client.ending):
                waits.append((node, max(now + self.timeout, node.wait_until)))
        await self._runtime.sleep(0)  # a task that tries again and again must let the event loop connect
        for node, limit in waits:
            left_seconds = max(0.0, min(limit, until) - self._runtime.now())
            if not await node.settled.wait(left_seconds) and self._runtime.now() >= limit:
                node.settled.set()

    def queue_entries(self, request: Request) -> list[str]:
        found = []
        for node in self.all:
            channel = node.listener.channel
            if channel is not None:
                node.listener.expect(request)
            elif node.up and self._subscribed_before:
                node.subscribe_soon()  # back after a restart: the next attempt enters the queue there
            found.append("" if channel is None else f"{request.owner} 0 {channel}")
        assert len(found) == len(self.all)
        return found

    async def listen(self, until: Instant) -> bool:
        """See `Nodes.listen`. At all nodes at the same time; one that hangs is given the time for an answer."""
        until = min(until, self._runtime.now() + self.timeout)
        opened = [node.subscribe_soon() for node in self.all if node.up]
        for event in opened:
            await event.wait(max(0.0, until - self._runtime.now()))
        self._subscribed_before = any(node.listener.channel is not None for node in self.all)
        denied = next((node.listener.denied for node in self.all if node.listener.denied is not None), None)
        if denied is not None and not self._warned_of_polling:
            self._warned_of_polling = True
            warn_of_polling(counted(len(self.all)), denied)
        return self._subscribed_before

    def forget(self, request: Request) -> None:
        for node in self.all:
            node.listener.forget(request)

    def scan(self, index: int, prefix: str, name_prefix: str) -> Scan:
        return Scan(prefix, name_prefix, [self.all[index].server])

    async def erase(self, prefix: str) -> None:
        for node in self.all:
            await delete_keys(node.server, prefix)

    async def close(self) -> None:
        self.client.closed = True
        for node in self.all:
            node.close()
        if self._runtime.kind == "asyncio":
            # Tasks that are connecting close what they open; if the event loop ended before, that would stay open.
            until = self._runtime.now() + CLOSE_SECONDS
            while any(node.opening for node in self.all) and self._runtime.now() < until:
                await self._runtime.sleep(0.001)
        for node in self.all:
            await node.server.close()
        # An event loop closes sockets in its next round: without this they would stay open until the program ends.
        await self._runtime.sleep(0)


def _messages(pack_first: Pack, op: Op, bodies: Sequence[Sequence[bytes]]) -> list[tuple[bytes, int]]:
    """Pack the calls of each node, once for nodes that have the same; `pack_first` packs the first of them."""
    messages: list[tuple[bytes, int]] = []
    before: Sequence[bytes] | None = None
    for own in bodies:
        if own is before:
            messages.append(messages[-1])
        else:
            messages.append((b"".join([pack_first(own[0]), *map(op.command, own[1:])]), len(own)))
        before = own
    return messages


def _is_clean(replies: Answers) -> bool:
    return type(replies) is list and ServerSaid not in map(type, replies)


def _lacks_script(replies: Answers) -> bool:
    return not isinstance(replies, LockError) and any(
        isinstance(reply, ServerSaid) and reply.code == "NOSCRIPT" for reply in replies
    )
