"""
Asking several Redis nodes at the same time, on one thread.

A question is sent to all nodes that are up before any answer is read, and all answers share one deadline.

Which node is up is known before anybody asks: connections are opened in the background (`Voter`), with a back-off,
and a node that fails or does not answer in time is down until a new connection has been opened *and* has answered. So
a node that is stopped (it takes connections, and answers nothing) costs its time limit once, and then nothing.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from lockkit.backend import CALL_SECONDS
from lockkit.backends.redis.connection import NO_ANSWER, AsyncioWire
from lockkit.backends.redis.node import DRIVER_ERRORS, ServerSaid, bulk, pack, translate
from lockkit.backends.redis.wakeup import Ears
from lockkit.backends.redlock.nodes import Absent, Panel
from lockkit.background import SingleRun
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

if TYPE_CHECKING:
    from lockkit.backend import Host, Request
    from lockkit.backends.redis.node import BlockingWire, Reply, Wire, WireNode
    from lockkit.backends.redlock.addresses import Source
    from lockkit.backends.redlock.nodes import Answer, Argument, LockKeys, Op
    from lockkit.runtime import Event, Runtime

__all__ = ["Voter", "WirePanel", "open_panel"]

log = logging.getLogger("lockkit")

TRUSTED_SECONDS = 0.005
"""A connection that was used so long ago is looked at before it is used again: the server may have closed it. Longer
finds fewer closed ones, shorter looks (a system call) more often."""

FIRST_PATIENCE = 2.0
"""Seconds for the first connection to a node. Longer holds up the first call when a node cannot be reached, shorter
leaves nodes out of it when the machine is busy starting."""

RECONNECT_PAUSE_MIN = 0.05
"""First pause after a connection that failed, seconds. Shorter asks a dead port more often."""

RECONNECT_PAUSE_MAX = 2.0
"""Longest pause, seconds. Longer finds a node that is back later."""

RECONNECT_LINGER = 60.0
"""A client that asks nothing for so long stops looking for its lost nodes. Longer keeps a dropped client's threads."""

CONNECTIONS_KEPT = 16
"""Idle connections that are kept for each node. More holds sockets after a burst of threads."""

DEBTS_MAX = 1000
"""Commands kept for a node that is down, to be sent when it is back. Fewer leaves keys to their ttl; more is memory."""

CLOSE_SECONDS = 0.2
"""How long closing waits for connections that are being opened. Longer delays the end when a node hangs; shorter leaves
sockets to be closed with their event loop."""

BATCH = 256
"""Commands sent before their replies are read. Many more could fill both directions' buffers: nobody would read."""

Answers: TypeAlias = "list[Reply] | LockError"
"""Of one node to a batch."""


class Line:
    """
    A connection to a node, greeted.

    Attributes:
        wire: The connection.
        run: The server's run id as it was told on this very connection, packed; it cannot change without ending it.
        used: When it was used last, client monotonic clock.
    """

    __slots__ = ("run", "used", "wire")

    def __init__(self, wire: Wire, run: bytes, used: float) -> None:
        """Keep them."""
        self.wire = wire
        self.run = run
        self.used = used


class Voter:
    """
    One node, as one client knows it.

    Attributes:
        index: Its number.
        up: Connected, and answering when last asked.
        error: Why not, otherwise.
        absent: The same, as the answer to a question that was not even sent.
        run: The packed run id that its last connection was told.
        ears: The subscription there.
        settled: Down, and nothing is known that is worth waiting for: the last try to connect has failed.
        patient_until: Wait for a connection until then at least: longer at first, when nothing is known of the node.
    """

    def __init__(self, panel: WirePanel, index: int, source: Source) -> None:
        """Connect to nothing yet."""
        self.index = index
        self.up = False
        self.label = source.label
        self.error: LockError
        self.absent: Absent
        self._note(BackendUnavailable(f"{source.label} has not been reached yet"))
        self.run = b""
        # A subscription needs no more of a node than a label and a way to connect.
        self.ears = Ears(panel.runtime, cast("WireNode", source), panel.prefix)
        self.settled = panel.runtime.event()
        self._hurry = panel.runtime.event()
        self.lines: deque[Line] = deque()
        self.patient_until = 0.0
        self._panel = panel
        self._source = source
        self._runtime = panel.runtime
        self._mutex = panel.runtime.mutex()
        self._debts: dict[bytes, float] = {}
        self._connecting = SingleRun(panel.runtime, "lockkit-redlock-connect", self._reconnect)
        self._listening = SingleRun(panel.runtime, "lockkit-redlock-listen", self._listen)
        self._paying = SingleRun(panel.runtime, "lockkit-redlock-pay", self._pay_beside)

    def _note(self, error: LockError) -> None:
        self.error = error
        self.absent = Absent(error)

    @property
    def opening(self) -> bool:
        """Whether a connection is being opened."""
        return any(work.under_way for work in (self._connecting, self._listening, self._paying))

    def connect_soon(self) -> None:
        """Connect in the background, unless that is under way."""
        if self.up or self._panel.closed or self._panel.ending:
            return
        if not self.patient_until:
            self.patient_until = self._runtime.now() + FIRST_PATIENCE
        self._connecting.start()

    async def _reconnect(self) -> None:
        panel, pause = self._panel, RECONNECT_PAUSE_MIN
        try:
            while not panel.closed:
                if await self._connected():
                    return
                self.settled.set()
                now = self._runtime.now()
                if now - panel.used > RECONNECT_LINGER and not self._due(now):
                    return
                await self._hurry.wait(pause * self._runtime.random.uniform(0.5, 1.0))
                self._hurry.clear()
                pause = min(2 * pause, RECONNECT_PAUSE_MAX)
        finally:
            self.settled.set()

    def connect_now(self) -> None:
        """Connect in the background without the rest of a pause; `settled` is down until that has been tried."""
        if self._panel.closed or self._panel.ending:
            return
        self.settled.clear()
        self._hurry.set()
        self.connect_soon()
        if self.up:
            self.settled.set()  # connected in the meantime, so that nobody else raises it

    async def _connected(self) -> bool:
        """Try to connect, once; pay what is owed before anybody else asks."""
        try:
            line = await self._open_line()
        except LockError as error:
            self._note(error)
            return False
        try:
            await self._pay(line)
            self._keep(line)
        except DRIVER_ERRORS as error:
            line.wire.close()
            self._note(translate(error, self.label))
            return False
        except BaseException:
            line.wire.close()
            raise
        return True

    def extend_soon(self) -> Event:
        """Open one more connection in the background; the event is set when that has been done, or has failed."""

        async def extend() -> None:
            try:
                line = await self._open_line()
            except LockError as error:
                self.lost(error)
            else:
                self._keep(line)

        return SingleRun(self._runtime, "lockkit-redlock-connect", extend).start()

    def _keep(self, line: Line) -> None:
        """
        Take a connection into use.

        Raises:
            Exception: One of `DRIVER_ERRORS`: it has ended already.
        """
        with self._mutex:
            closed = self._panel.closed
            if not closed:
                assert not self.lines or self._runtime.kind != "asyncio", "tasks share one connection"
                if isinstance(line.wire, AsyncioWire):
                    if line.wire.error is not None:
                        raise line.wire.error
                    # At once, whether or not anybody asks again: something may be owed.
                    line.wire.on_lost = partial(self._ended, line)
                self.lines.append(line)
                self.up = True
        if closed:
            line.wire.close()
        elif self._due(self._runtime.now()):
            self._paying.start()

    def _ended(self, line: Line, error: BaseException) -> None:
        if line in self.lines:
            self.lost(error, line=line)

    async def _open_line(self) -> Line:
        """
        Open a connection and have the server introduce itself.

        Raises:
            LockError: It cannot be reached, refuses us, or is another node of ours under another address.
        """
        try:
            wire = await self._source.connect()
            try:
                run = await self._greet(wire)
            except BaseException:
                wire.close()
                raise
        except DRIVER_ERRORS as error:
            raise translate(error, self.label) from error
        restarted, self.run = self.run not in (b"", run), run
        if restarted:
            # What is held may have lost a vote with that server's data: tell its holders now, not at the next renewal.
            self._panel.host.confirm_soon()
        return Line(wire, run, self._runtime.now())

    async def _greet(self, wire: Wire) -> bytes:
        """
        Ask for the run id of the server, and look that no other node of ours has it.

        Raises:
            ServerSaid: The server cannot be asked now.
            ConfigurationError: It does not tell, or votes already.
        """
        reply = await self._runtime.io(wire.call(pack("INFO", "server")))
        if isinstance(reply, ServerSaid) and reply.code not in {"NOPERM", "ERR"}:
            raise reply
        told = reply.decode("utf-8", "replace").splitlines() if isinstance(reply, bytes) else []
        run = next((line.partition(":")[2] for line in told if line.startswith("run_id:")), "")
        if not run and not self._panel.durable:
            said = reply if isinstance(reply, ServerSaid) else "no run_id"
            message = (
                f"{self.label} does not tell in which run of the server it is (INFO: {said}), so a restart, which may "
                "have brought back old data, could not be noticed, and it must not vote. Grant the right to its user "
                "(redis-cli ACL SETUSER NAME +info); or set durable=1 if no node loses anything (appendonly yes, "
                "appendfsync always)"
            )
            raise ConfigurationError(message)
        for other in self._panel.voters:
            if run and other is not self and other.up and other.run == bulk(run):
                message = (
                    f"{self.label} is the same server as {other.label}: it must not vote twice. "
                    "Give the addresses of independent servers"
                )
                raise ConfigurationError(message)
        return bulk(run)

    def listen_soon(self) -> Event:
        """Subscribe in the background; the event is set when that has been done, or has failed."""
        if self.ears.channel is None:
            return self._listening.start()
        done = self._runtime.event()
        done.set()
        return done

    async def _listen(self) -> None:
        try:
            await self.ears.open()
        except LockError as error:
            log.debug("cannot listen at %s: %s", self.label, error)
        finally:
            if self._panel.closed:
                self.ears.close()

    def owe(self, seconds: float, packed: bytes) -> None:
        """
        Send a command when the node is reached next, if that is within so many seconds.

        It is owed until the node has confirmed it: an error reply does not.
        """
        until = self._runtime.now() + seconds
        with self._mutex:
            self._debts.pop(packed, None)  # to the end
            self._debts[packed] = until
            if len(self._debts) > DEBTS_MAX:
                del self._debts[next(iter(self._debts))]
            up = self.up
        if up and not self._panel.closed:
            # It came back before we knew what it owes.
            self._paying.start()

    def _due(self, now: float) -> bool:
        return any(until > now for until in tuple(self._debts.values()))

    async def _pay(self, line: Line) -> bool:
        """
        Send what is owed, oldest first, and forget what the node confirms; tell whether that is all of it.

        Raises:
            Exception: One of `DRIVER_ERRORS`: nothing is known of those that were sent last, so they stay owed.
        """
        tried: set[bytes] = set()
        confirmed = True
        while True:
            now = self._runtime.now()
            with self._mutex:
                self._debts = {packed: until for packed, until in self._debts.items() if until > now}
                assert len(self._debts) <= DEBTS_MAX
                batch = list(islice((one for one in self._debts.items() if one[0] not in tried), BATCH))
            if not batch:
                return confirmed
            tried.update(packed for packed, _ in batch)
            replies = await self._runtime.io(line.wire.call_many(b"".join(packed for packed, _ in batch), len(batch)))
            with self._mutex:
                for (packed, until), reply in zip(batch, replies, strict=True):
                    if isinstance(reply, ServerSaid):
                        confirmed = False  # it is loading its data, has no memory, denies a right
                    elif self._debts.get(packed) == until:
                        del self._debts[packed]

    async def _pay_beside(self) -> None:
        """Pay over connections of its own, while others use the node, until all is confirmed or it is down."""
        pause = RECONNECT_PAUSE_MIN
        while self.up:
            try:
                line = await self._open_line()
            except LockError as error:
                self.lost(error)
                return
            try:
                if await self._pay(line):
                    return
            except DRIVER_ERRORS as error:
                self.lost(error)
                return
            finally:
                line.wire.close()
            await self._panel.closing.wait(pause * self._runtime.random.uniform(0.5, 1.0))
            pause = min(2 * pause, RECONNECT_PAUSE_MAX)

    def lost(self, error: BaseException, *, line: Line | None = None) -> None:
        """
        Take the node for down and connect anew in the background.

        Args:
            error: What happened.
            line: Where; None if a connection could not be opened.
        """
        with self._mutex:
            lines, self.lines = self.lines, deque()
            self.up = False
            self._note(error if isinstance(error, LockError) else translate(error, self.label))
            # A server that ended its connections may be back already, and connecting tells at once: the next question
            # waits for that. One that did not answer is not waited for again.
            if line is not None and isinstance(error, ConnectionError):
                self.settled.clear()
            else:
                self.settled.set()
        # Not under the mutex: a connection of an event loop tells us at once that it has ended.
        for ended in {*lines, line} - {None}:
            cast("Line", ended).wire.close()
        log.debug("lost %s: %s", self.label, self.error)
        self.connect_soon()

    def close(self) -> None:
        """Close all connections."""
        self._hurry.set()
        self.ears.close()
        with self._mutex:
            lines, self.lines = self.lines, deque()
            self.up = False
        for line in lines:
            line.wire.close()


class WirePanel(Panel):
    """
    Nodes on the network.

    Attributes:
        host: The engine's side.
        runtime: Of the face.
        prefix: Of the channels on which we are woken.
        timeout: Seconds for an answer, and for a connection.
        voters: The nodes.
        used: When anybody asked last, client monotonic clock.
        durable: The nodes lose nothing, so that it does not matter whether one was restarted.
        ending: The last question was one for a client that is being closed, perhaps because its event loop ends: begin
            nothing that outlives it, until somebody asks another one.
        closed: Ask nobody any more.
        closing: Set with `closed`.
    """

    def __init__(
        self, host: Host, sources: Sequence[Source], prefix: str, timeout: float, *, durable: bool = False
    ) -> None:
        """Connect to nothing yet."""
        self.host = host
        self.runtime: Runtime = host.runtime
        self.prefix = prefix
        self.timeout = timeout
        self.durable = durable
        self.used = self.runtime.now()
        self.ending = False
        self.closed = False
        self._has_listened = False
        self.closing = self.runtime.event()
        self.labels = [source.label for source in sources]
        self.voters = [Voter(self, index, source) for index, source in enumerate(sources)]

    async def ask(
        self,
        op: Op,
        keys: LockKeys,
        arguments: Sequence[Argument],
        *,
        tails: Sequence[Argument] | None = None,
        only: Collection[int] | None = None,
        owed: float = 0.0,
        until: float = inf,
    ) -> list[Answer]:
        """See `Panel.ask`."""
        self.ending = False
        assert tails is None or len(tails) == len(self.voters)
        until = min(until, self.runtime.now() + CALL_SECONDS)
        body = keys.packed(op) + b"".join(map(bulk, arguments))
        voters = self.voters if only is None else [self.voters[index] for index in only]
        bodies = [body] * len(voters) if tails is None else [body + bulk(tails[voter.index]) for voter in voters]
        command = op.script.command
        found = await self._ask_each(voters, [(command(text), 1) for text in bodies], until, greeted=op.greeted)
        answers: list[Answer] = [None] * len(self.voters)
        unknown = []
        for position, (voter, replies) in enumerate(zip(voters, found, strict=True)):
            answer = replies if isinstance(replies, LockError) else replies[0]
            if isinstance(answer, ServerSaid):
                if answer.code == "NOSCRIPT":
                    unknown.append(position)
                answer = translate(answer, voter.label)
            answers[voter.index] = answer
        if unknown:
            await self._teach(op, [(voters[position], bodies[position]) for position in unknown], answers, until)
        if owed and any(isinstance(answer, LockError) for answer in answers):
            for voter, text in zip(voters, bodies, strict=True):
                if isinstance(answers[voter.index], LockError):
                    voter.owe(owed, op.script.loading_command(text))
        return answers

    async def _teach(self, op: Op, asked: Sequence[tuple[Voter, bytes]], answers: list[Answer], until: float) -> None:
        """Ask nodes again that did not know the script, with its text."""
        messages = [(op.script.loading_command(body), 1) for _, body in asked]
        found = await self._ask_each([voter for voter, _ in asked], messages, until, greeted=op.greeted)
        for (voter, _), replies in zip(asked, found, strict=True):
            answer = replies if isinstance(replies, LockError) else replies[0]
            answers[voter.index] = translate(answer, voter.label) if isinstance(answer, ServerSaid) else answer

    async def ask_many(
        self,
        op: Op,
        calls: Sequence[tuple[LockKeys, Sequence[Argument]]],
        *,
        until: float = inf,
        last: bool = False,
    ) -> list[list[Answer]]:
        """See `Panel.ask_many`."""
        # A thread that connects outlives nothing, and a connection that was idle for long must be replaced.
        self.ending = last and self.runtime.kind == "asyncio"
        now = self.runtime.now
        until = min(until, now() + CALL_SECONDS)
        answers: list[list[Answer]] = [[] for _ in self.voters]
        for start in range(0, len(calls), BATCH):
            if now() >= until:
                late = BackendUnavailable(f"not asked: {len(calls) - start} of {len(calls)} locks, the time was over")
                return [[*replies, *[late] * (len(calls) - start)] for replies in answers]
            # A node that stops answering in the middle leaves the others half of the time.
            by = now() + (until - now()) / 2
            bodies = [keys.packed(op) + b"".join(map(bulk, values)) for keys, values in calls[start : start + BATCH]]
            packed = b"".join(map(op.script.command, bodies))
            found = await self._ask_each(self.voters, [(packed, len(bodies))] * len(self.voters), by, greeted=False)
            taught = await self._teach_many(op, bodies, found, until)
            for voter, answered in zip(self.voters, taught, strict=True):
                if isinstance(answered, LockError):
                    answers[voter.index] += [answered] * len(bodies)
                else:
                    answers[voter.index] += [
                        translate(reply, voter.label) if isinstance(reply, ServerSaid) else reply for reply in answered
                    ]
        assert all(len(replies) == len(calls) for replies in answers)
        return answers

    async def _teach_many(self, op: Op, bodies: Sequence[bytes], found: list[Answers], until: float) -> list[Answers]:
        """Ask nodes again that did not know the script; a server knows it for all commands or for none."""
        unknown = [
            voter
            for voter, replies in zip(self.voters, found, strict=True)
            if not isinstance(replies, LockError)
            and any(isinstance(reply, ServerSaid) and reply.code == "NOSCRIPT" for reply in replies)
        ]
        if not unknown:
            return found
        packed = op.script.loading_command(bodies[0]) + b"".join(map(op.script.command, bodies[1:]))
        again = await self._ask_each(unknown, [(packed, len(bodies))] * len(unknown), until, greeted=False)
        for voter, replies in zip(unknown, again, strict=True):
            found[voter.index] = replies
        return found

    @abstractmethod
    async def _ask_each(
        self, voters: Sequence[Voter], messages: Sequence[tuple[bytes, int]], until: float, *, greeted: bool
    ) -> list[Answers]:
        """
        Send each voter its commands, all before any answer is read; for each its replies, or why there are none.

        Args:
            voters: Whom to ask.
            messages: For each the packed commands, and their number.
            until: Answers that come later are of no use, client monotonic time. What can be sent is sent all the same.
            greeted: Append the run id of the connection as the last argument.
        """

    async def _reach(self, voters: Sequence[Voter], until: float) -> None:
        """
        Let nodes be connected, all at the same time and not in this thread, for at most half of the time until then.

        Nodes that are known to be down are not waited for. In the background also for the sake of Ctrl-C: within
        redis-py's connecting it would leave a socket open.
        """
        self.used = now = self.runtime.now()
        until = now + (until - now) / 2
        waits = []
        for voter in voters:
            if voter.up:
                waits.append((voter, voter.extend_soon(), now + self.timeout))
            else:
                voter.connect_soon()
                if not (voter.settled.is_set() or self.ending):
                    waits.append((voter, voter.settled, max(now + self.timeout, voter.patient_until)))
        for voter, event, limit in waits:
            if not await event.wait(max(0.0, min(limit, until) - self.runtime.now())) and self.runtime.now() >= limit:
                voter.settled.set()

    async def retry(self) -> None:
        """See `Panel.retry`."""
        down = [voter for voter in self.voters if not voter.up]
        for voter in down:
            voter.connect_now()
        await self._reach([voter for voter in down if not voter.up], self.runtime.now() + CALL_SECONDS)

    def places(self, request: Request) -> list[str]:
        """See `Panel.places`."""
        found = []
        for voter in self.voters:
            channel = voter.ears.channel
            if channel is not None:
                voter.ears.expect(request)
            elif voter.up and self._has_listened:
                voter.listen_soon()  # back after a restart: the next look takes a place there
            found.append("" if channel is None else f"{request.owner} 0 {channel}")
        return found

    async def listen(self, until: float) -> bool:
        """See `Panel.listen`. At all nodes at the same time; one that hangs is not waited for longer than an answer."""
        until = min(until, self.runtime.now() + self.timeout)
        opened = [voter.listen_soon() for voter in self.voters if voter.up]
        for event in opened:
            await event.wait(max(0.0, until - self.runtime.now()))
        self._has_listened = any(voter.ears.channel is not None for voter in self.voters)
        return self._has_listened

    def forget(self, request: Request) -> None:
        """See `Panel.forget`."""
        for voter in self.voters:
            voter.ears.forget(request)

    async def close(self) -> None:
        """See `Panel.close`."""
        self.closed = True
        self.closing.set()
        for voter in self.voters:
            voter.close()
        if self.runtime.kind == "asyncio":
            # Tasks that are connecting close what they open; an event loop that ended before would leave it open.
            until = self.runtime.now() + CLOSE_SECONDS
            while any(voter.opening for voter in self.voters) and self.runtime.now() < until:
                await self.runtime.sleep(0.001)
        # An event loop closes sockets in its next round: without it they would be open until the program ends.
        await self.runtime.sleep(0)


class BlockingPanel(WirePanel):
    """Each question has one connection to every node for itself."""

    async def _ask_each(
        self, voters: Sequence[Voter], messages: Sequence[tuple[bytes, int]], until: float, *, greeted: bool
    ) -> list[Answers]:
        lines: list[Line | None] = []
        try:
            lines += map(self._take, voters)  # not at once: what was taken before an interrupt is in the list
            if None in lines:
                await self._reach([voter for voter, line in zip(voters, lines, strict=True) if line is None], until)
                for index, voter in enumerate(voters):
                    if lines[index] is None:
                        lines[index] = self._take(voter)
            return await self._exchange(voters, lines, messages, until, greeted=greeted)
        except BaseException:
            # Ctrl-C, anywhere: half an answer must not wait there for who takes the connection next.
            for line in lines:
                if line is not None:
                    line.wire.close()
            raise

    def _take(self, voter: Voter) -> Line | None:
        """Take a kept connection that is still open, as far as is known."""
        while True:
            try:
                line = voter.lines.pop()
            except IndexError:
                return None
            now = self.runtime.now()
            if now <= line.used + TRUSTED_SECONDS or not line.wire.stale:
                line.used = now
                return line
            voter.lost(ConnectionResetError("the server closed the connection"), line=line)

    async def _exchange(
        self,
        voters: Sequence[Voter],
        lines: list[Line | None],
        messages: Sequence[tuple[bytes, int]],
        until: float,
        *,
        greeted: bool,
    ) -> list[Answers]:
        """Send, then receive. Lines that are done with are taken out of `lines`."""
        answers: list[Answers] = []
        for index, (packed, count) in enumerate(messages):
            line, voter = lines[index], voters[index]
            answers.append(voter.absent)
            if line is not None:
                try:
                    line.wire.send(packed + line.run if greeted else packed, count, until)
                except DRIVER_ERRORS as error:
                    voter.lost(error, line=line)
                    lines[index] = None
                    answers[index] = voter.error
        now = self.runtime.now
        until = min(until, now() + self.timeout)
        late = until - 0.9 * self.timeout
        for index, (_, count) in enumerate(messages):
            line, voter = lines[index], voters[index]
            if line is None:
                continue
            wire = cast("BlockingWire", line.wire)
            try:
                # The kernel limits each read to the node's timeout. Only when there is less, or others have used up
                # some of it, is there need to look first: two slow nodes must not take twice the time.
                if now() > late:
                    await self._check_time(wire, until)
                answers[index] = [wire.receive()] if count == 1 else [wire.receive() for _ in range(count)]
            except DRIVER_ERRORS as error:
                voter.lost(error, line=line)
                answers[index] = voter.error
            else:
                if voter.up and len(voter.lines) < CONNECTIONS_KEPT:
                    voter.lines.append(line)
                else:
                    line.wire.close()
            lines[index] = None
        assert not any(lines), "a connection that is neither kept nor closed"
        return answers

    async def _check_time(self, wire: BlockingWire, until: float) -> None:
        """
        Wait until a node answers, no longer than until the deadline of all.

        Raises:
            TimeoutError: It does not.
        """
        if not await self.runtime.readable(wire.fileno(), max(0.0, until - self.runtime.now())):
            raise TimeoutError(NO_ANSWER)


class AsyncioPanel(WirePanel):
    """All tasks share one connection to each node; replies come in the order of the commands."""

    async def _ask_each(
        self, voters: Sequence[Voter], messages: Sequence[tuple[bytes, int]], until: float, *, greeted: bool
    ) -> list[Answers]:
        if missing := [voter for voter in voters if not voter.up]:
            await self._reach(missing, until)
        answers: list[Answers] = []
        sent: list[asyncio.Future[list[Reply]] | None] = []
        for voter, (packed, count) in zip(voters, messages, strict=True):
            answers.append(voter.absent)
            sent.append(None)
            if voter.up:
                line = voter.lines[0]
                try:
                    future = line.wire.call_many(packed + line.run if greeted else packed, count)
                except DRIVER_ERRORS as error:
                    answers[-1] = translate(error, voter.label)
                else:
                    sent[-1] = cast("asyncio.Future[list[Reply]]", future)
        await self._collect(voters, sent, answers, until)
        return answers

    async def _collect(
        self,
        voters: Sequence[Voter],
        sent: Sequence[asyncio.Future[list[Reply]] | None],
        answers: list[Answers],
        until: float,
    ) -> None:
        """Wait for what was sent, into `answers`."""
        # Each wire watches over its own answers: the same limit from the same instant, so one deadline for all. Only
        # a caller with less time looks at the clock; the wire then goes on waiting, for the sake of the others on it.
        left = until - self.runtime.now()
        if left < self.timeout and (pending := [future for future in sent if future is not None]):
            await asyncio.wait(pending, timeout=max(0.0, left))
        for index, (voter, future) in enumerate(zip(voters, sent, strict=True)):
            if future is not None:
                try:
                    if left < self.timeout and not future.done():
                        raise TimeoutError(NO_ANSWER)
                    answers[index] = await future
                except DRIVER_ERRORS as error:
                    answers[index] = translate(error, voter.label)


def open_panel(host: Host, sources: Sequence[Source], options: Mapping[str, Any]) -> WirePanel:
    """Make the panel of a face; `options` are the backend's. No I/O."""
    panel = AsyncioPanel if host.runtime.kind == "asyncio" else BlockingPanel
    return panel(host, sources, options["prefix"], options["node_timeout"], durable=options["durable"])
