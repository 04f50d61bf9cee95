"""
Asking several Redis nodes at the same time, on one thread.

A question is sent to all nodes that are up before any answer is read, and all answers share one deadline.

Which node is up is known before anybody asks: connections are opened in the background (`Voter`), with a back-off,
and a node that fails or does not answer in time is down until a new connection has been opened *and* has answered. So
a node that is stopped (it takes connections, and answers nothing) costs its time limit once, and then nothing.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from lockkit.backends._redis_io import DRIVER_ERRORS, ServerSaid, bulk, pack, translate
from lockkit.backends._redis_wake import Ears
from lockkit.backends._redlock_panel import Absent, Panel
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

if TYPE_CHECKING:
    from lockkit.backend import Host, Request
    from lockkit.backends._redis_io import AsyncioWire, BlockingWire, Reply, Wire, WireNode
    from lockkit.backends._redlock_panel import Answer, Argument, LockKeys, Op
    from lockkit.backends._redlock_source import Source
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
        patience: Seconds to wait at least for a connection: more at first, when nothing is known of the node.
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
        self.lines: deque[Line] = deque()
        self.connecting = False
        self.patience = FIRST_PATIENCE
        self._panel = panel
        self._source = source
        self._runtime = panel.runtime
        self._mutex = panel.runtime.mutex()
        self._debts: deque[tuple[float, bytes]] = deque(maxlen=DEBTS_MAX)

    def _note(self, error: LockError) -> None:
        self.error = error
        self.absent = Absent(error)

    def connect_soon(self) -> None:
        """Connect in the background, unless that is under way."""
        with self._mutex:
            if self.up or self.connecting or self._panel.closed:
                return
            self.connecting = True
        try:
            self._runtime.spawn("lockkit-redlock-connect", self._reconnect)
        except BaseException:
            self.connecting = False
            raise

    async def _reconnect(self) -> None:
        panel, pause = self._panel, RECONNECT_PAUSE_MIN
        try:
            while not panel.closed:
                if await self._connected():
                    return
                self.settled.set()
                if self._runtime.now() - panel.used > RECONNECT_LINGER:
                    return
                await panel.closing.wait(pause * self._runtime.random.uniform(0.5, 1.0))
                pause = min(2 * pause, RECONNECT_PAUSE_MAX)
        finally:
            with self._mutex:
                self.connecting = False
            self.settled.set()

    async def _connected(self) -> bool:
        """Try to connect, once; pay what is owed before anybody else asks."""
        try:
            line = await self._open_line()
        except LockError as error:
            self._note(error)
            return False
        try:
            while self._debts:
                await self._pay(line)
        except DRIVER_ERRORS as error:
            line.wire.close()
            self._note(translate(error, self.label))
            return False
        except BaseException:
            line.wire.close()
            raise
        self._keep(line)
        return True

    def extend_soon(self) -> Event:
        """Open one more connection in the background; the event is set when that has been done, or has failed."""
        done = self._runtime.event()

        async def extend() -> None:
            try:
                line = await self._open_line()
            except LockError as error:
                self.lost(error)
            else:
                self._keep(line)
            finally:
                done.set()

        self._runtime.spawn("lockkit-redlock-connect", extend)
        return done

    def _keep(self, line: Line) -> None:
        with self._mutex:
            if not self._panel.closed:
                self.lines.append(line)
                self.up = True
                return
        line.wire.close()

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
        reply = await self._runtime.io(wire.call(pack("INFO", "server")))
        if not isinstance(reply, bytes):
            # A user without the right to INFO: restarts without data are still noticed, by the missing mark.
            return bulk("")
        lines = reply.decode("utf-8", "replace").splitlines()
        run = bulk(next((line.partition(":")[2] for line in lines if line.startswith("run_id:")), ""))
        for other in self._panel.voters:
            if other is not self and other.up and other.run == run and run != bulk(""):
                message = (
                    f"{self.label} is the same server as {other.label}: it must not vote twice. "
                    "Give the addresses of independent servers"
                )
                raise ConfigurationError(message)
        return run

    def listen_soon(self) -> Event:
        """Subscribe in the background; the event is set when that has been done, or has failed."""
        done = self._runtime.event()
        if self.ears.channel is not None:
            done.set()
            return done

        async def listen() -> None:
            try:
                await self.ears.open()
            except LockError as error:
                log.debug("cannot listen at %s: %s", self.label, error)
            finally:
                done.set()
                if self._panel.closed:
                    self.ears.close()

        self._runtime.spawn("lockkit-redlock-listen", listen)
        return done

    def owe(self, seconds: float, packed: bytes) -> None:
        """Send a command when the node is reached next, if that is within so many seconds."""
        self._debts.append((self._runtime.now() + seconds, packed))

    async def _pay(self, line: Line) -> None:
        now = self._runtime.now()
        debts = [self._debts.popleft() for _ in range(min(len(self._debts), BATCH))]
        commands = [packed for until, packed in debts if until > now]
        if commands:
            try:
                await self._runtime.io(line.wire.call_many(b"".join(commands), len(commands)))
            except BaseException:
                self._debts.extendleft(reversed(debts))
                raise

    def lost(self, error: BaseException, *, line: Line | None = None) -> None:
        """
        Take the node for down and connect anew in the background.

        Args:
            error: What happened.
            line: Where; None if a connection could not be opened.
        """
        with self._mutex:
            if line is not None:
                line.wire.close()
            lines, self.lines = self.lines, deque()
            self.up = False
            self._note(error if isinstance(error, LockError) else translate(error, self.label))
            # A server that ended its connections may be back already, and connecting tells at once: the next question
            # waits for that. One that did not answer is not waited for again.
            if line is not None and isinstance(error, ConnectionError):
                self.settled.clear()
            else:
                self.settled.set()
        for other in lines:
            other.wire.close()
        log.debug("lost %s: %s", self.label, self.error)
        self.connect_soon()

    def close(self) -> None:
        """Close all connections."""
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
        closed: Ask nobody any more.
        closing: Set with `closed`.
    """

    def __init__(self, host: Host, sources: Sequence[Source], prefix: str, timeout: float) -> None:
        """Connect to nothing yet."""
        self.host = host
        self.runtime: Runtime = host.runtime
        self.prefix = prefix
        self.timeout = timeout
        self.used = self.runtime.now()
        self.closed = False
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
    ) -> list[Answer]:
        """See `Panel.ask`."""
        body = keys.packed(op) + b"".join(map(bulk, arguments))
        voters = self.voters if only is None else [self.voters[index] for index in only]
        bodies = [body] * len(voters) if tails is None else [body + bulk(tails[voter.index]) for voter in voters]
        command = op.script.command
        found = await self._ask_each(voters, [(command(text), 1) for text in bodies], greeted=op.greeted)
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
            await self._teach(op, [(voters[position], bodies[position]) for position in unknown], answers)
        if owed and any(isinstance(answer, LockError) for answer in answers):
            for voter, text in zip(voters, bodies, strict=True):
                if isinstance(answers[voter.index], LockError):
                    voter.owe(owed, op.script.loading_command(text))
        return answers

    async def _teach(self, op: Op, asked: Sequence[tuple[Voter, bytes]], answers: list[Answer]) -> None:
        """Ask nodes again that did not know the script, with its text."""
        messages = [(op.script.loading_command(body), 1) for _, body in asked]
        found = await self._ask_each([voter for voter, _ in asked], messages, greeted=op.greeted)
        for (voter, _), replies in zip(asked, found, strict=True):
            answer = replies if isinstance(replies, LockError) else replies[0]
            answers[voter.index] = translate(answer, voter.label) if isinstance(answer, ServerSaid) else answer

    async def ask_many(self, op: Op, calls: Sequence[tuple[LockKeys, Sequence[Argument]]]) -> list[list[Answer]]:
        """See `Panel.ask_many`."""
        answers: list[list[Answer]] = [[] for _ in self.voters]
        for start in range(0, len(calls), BATCH):
            bodies = [keys.packed(op) + b"".join(map(bulk, values)) for keys, values in calls[start : start + BATCH]]
            packed = b"".join(map(op.script.command, bodies))
            found = await self._ask_each(self.voters, [(packed, len(bodies))] * len(self.voters), greeted=False)
            taught = await self._teach_many(op, bodies, found)
            for voter, replies in zip(self.voters, taught, strict=True):
                if isinstance(replies, LockError):
                    answers[voter.index] += [replies] * len(bodies)
                else:
                    answers[voter.index] += [
                        translate(reply, voter.label) if isinstance(reply, ServerSaid) else reply for reply in replies
                    ]
        return answers

    async def _teach_many(self, op: Op, bodies: Sequence[bytes], found: list[Answers]) -> list[Answers]:
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
        again = await self._ask_each(unknown, [(packed, len(bodies))] * len(unknown), greeted=False)
        for voter, replies in zip(unknown, again, strict=True):
            found[voter.index] = replies
        return found

    @abstractmethod
    async def _ask_each(
        self, voters: Sequence[Voter], messages: Sequence[tuple[bytes, int]], *, greeted: bool
    ) -> list[Answers]:
        """
        Send each voter its commands, all before any answer is read; for each its replies, or why there are none.

        Args:
            voters: Whom to ask.
            messages: For each the packed commands, and their number.
            greeted: Append the run id of the connection as the last argument.
        """

    async def _reach(self, voters: Sequence[Voter]) -> None:
        """
        Let nodes be connected, all at the same time and not in this thread.

        Nodes that are known to be down are not waited for. In the background also for the sake of Ctrl-C: within
        redis-py's connecting it would leave a socket open.
        """
        self.used = now = self.runtime.now()
        waits = []
        for voter in voters:
            if voter.up:
                waits.append((voter, voter.extend_soon(), now + self.timeout))
            else:
                voter.connect_soon()
                if not voter.settled.is_set():
                    waits.append((voter, voter.settled, now + max(self.timeout, voter.patience)))
        for voter, event, until in waits:
            if not await event.wait(max(0.0, until - self.runtime.now())):
                voter.settled.set()
            voter.patience = 0.0

    def places(self, request: Request) -> list[str]:
        """See `Panel.places`."""
        found = []
        for voter in self.voters:
            channel = voter.ears.channel
            if channel is not None:
                voter.ears.expect(request)
            found.append("" if channel is None else f"{request.owner} 0 {channel}")
        return found

    async def listen(self) -> bool:
        """See `Panel.listen`. At all nodes at the same time; one that hangs is not waited for longer than an answer."""
        until = self.runtime.now() + self.timeout
        opened = [voter.listen_soon() for voter in self.voters if voter.up]
        for event in opened:
            await event.wait(max(0.0, until - self.runtime.now()))
        return any(voter.ears.channel is not None for voter in self.voters)

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
            until = self.runtime.now() + self.timeout
            while any(voter.connecting for voter in self.voters) and self.runtime.now() < until:
                await self.runtime.sleep(0.001)
        # An event loop closes sockets in its next round: without it they would be open until the program ends.
        await self.runtime.sleep(0)


class BlockingPanel(WirePanel):
    """Each question has one connection to every node for itself."""

    async def _ask_each(
        self, voters: Sequence[Voter], messages: Sequence[tuple[bytes, int]], *, greeted: bool
    ) -> list[Answers]:
        lines: list[Line | None] = []
        try:
            lines += map(self._take, voters)  # not at once: what was taken before an interrupt is in the list
            if None in lines:
                await self._reach([voter for voter, line in zip(voters, lines, strict=True) if line is None])
                for index, voter in enumerate(voters):
                    if lines[index] is None:
                        lines[index] = self._take(voter)
            return await self._exchange(voters, lines, messages, greeted=greeted)
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
                    line.wire.send(packed + line.run if greeted else packed, count)
                except DRIVER_ERRORS as error:
                    voter.lost(error, line=line)
                    lines[index] = None
                    answers[index] = voter.error
        now = self.runtime.now
        until = now() + self.timeout
        late = until - 0.9 * self.timeout
        for index, (_, count) in enumerate(messages):
            line, voter = lines[index], voters[index]
            if line is None:
                continue
            wire = cast("BlockingWire", line.wire)
            try:
                # The kernel limits each read to the node's timeout. Only when others have used up some of it is there
                # need to look first: two slow nodes must not take twice the time.
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
        return answers

    async def _check_time(self, wire: BlockingWire, until: float) -> None:
        """
        Wait until a node answers, no longer than until the deadline of all.

        Raises:
            TimeoutError: It does not.
        """
        if not await self.runtime.readable(wire.fileno(), max(0.0, until - self.runtime.now())):
            message = f"no answer within {self.timeout:g} s"
            raise TimeoutError(message)


class AsyncioPanel(WirePanel):
    """All tasks share one connection to each node; replies come in the order of the commands."""

    async def _ask_each(
        self, voters: Sequence[Voter], messages: Sequence[tuple[bytes, int]], *, greeted: bool
    ) -> list[Answers]:
        if missing := [voter for voter in voters if not self._is_up(voter)]:
            await self._reach(missing)
        answers: list[Answers] = []
        sent: list[tuple[Line, Awaitable[list[Reply]]] | None] = []
        for voter, (packed, count) in zip(voters, messages, strict=True):
            answers.append(voter.absent)
            sent.append(None)
            if voter.up:
                line = voter.lines[0]
                try:
                    future = cast("AsyncioWire", line.wire).call_many(packed + line.run if greeted else packed, count)
                except DRIVER_ERRORS as error:
                    answers[-1] = self._lost(voter, line, error)
                else:
                    sent[-1] = line, future
        # Each wire watches over its own answers: the same limit from the same instant, so one deadline for all.
        for index, (voter, pending) in enumerate(zip(voters, sent, strict=True)):
            if pending is not None:
                try:
                    answers[index] = await pending[1]
                except DRIVER_ERRORS as error:
                    answers[index] = self._lost(voter, pending[0], error)
        return answers

    def _is_up(self, voter: Voter) -> bool:
        if voter.up and voter.lines[0].wire.stale:
            voter.lost(ConnectionResetError("the server closed the connection"), line=voter.lines[0])
        return voter.up

    def _lost(self, voter: Voter, line: Line, error: BaseException) -> LockError:
        # Several tasks hear of the same loss; by the last of them a new connection may be there.
        if voter.lines and voter.lines[0] is line:
            voter.lost(error, line=line)
        return translate(error, voter.label)


def open_panel(host: Host, sources: Sequence[Source], prefix: str, timeout: float) -> WirePanel:
    """Make the panel of a face. No I/O."""
    panel = AsyncioPanel if host.runtime.kind == "asyncio" else BlockingPanel
    return panel(host, sources, prefix, timeout)
