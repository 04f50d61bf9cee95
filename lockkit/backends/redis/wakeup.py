"""
Hearing from a Redis node that it is one's turn: one subscription per client and node, whatever the number of waiters.

A waiter stands in the lock's queue with the channel of its client (``PREFIX:wake:<random>``).
The script that frees the lock publishes there:

- ``OWNER``: it is offered to that waiter.
- ``OWNER MILLISECONDS``: it is offered to the waiter before that one, who may be stopped: look again after that time.

A script that finds that a lock has vanished (FLUSHALL), and its queue perhaps too, publishes the lock's key on a
channel that every client hears, ``PREFIX:wake:gone``.

The order that keeps a wake-up from being missed: the subscription is confirmed by the server before any waiter takes a
place in a queue; and when the subscription ends, all waiters look again, which subscribes anew.
A connection that was dropped on the way (a NAT, a firewall) ends without a word, so it is asked for an answer now and
then while anybody waits.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from math import inf
from typing import TYPE_CHECKING, cast

from lockkit.backend import seconds_left
from lockkit.backends.redis.connection import NO_ANSWER
from lockkit.backends.redis.node import DRIVER_ERRORS, AsyncioWire, BlockingWire, pack, translate
from lockkit.errors import BackendUnavailable

if TYPE_CHECKING:
    from lockkit.backend import Request
    from lockkit.backends.redis.node import Reply, Wire, WireNode
    from lockkit.runtime import Event, Runtime

__all__ = ["Ears", "gone_channel"]

log = logging.getLogger("lockkit")

LINGER = 60.0
"""Seconds that a listening thread stays when nobody waits. Shorter subscribes more often, longer keeps the thread."""

HEARTBEAT = 3.0
"""Seconds without a message after which the connection is asked for an answer, while anybody waits. Longer hands locks
over later when it was dropped on the way; shorter sends more."""

PONG_SECONDS = 2.0
"""Seconds for that answer. Longer hands over later; shorter takes a busy server for gone."""

LOOK_MARGIN = 0.005
"""Seconds after the end of an offer until the next waiter looks: the server must have seen it end."""


def gone_channel(prefix: str) -> str:
    """Name the channel that all clients hear."""
    return f"{prefix}:wake:gone"


class Ears:
    """
    The subscription of one client at one node.

    Attributes:
        channel: Where the client is told, while it listens; None otherwise.
    """

    def __init__(self, runtime: Runtime, node: WireNode, prefix: str) -> None:
        """Listen to nothing yet."""
        self.channel: str | None = None
        self._runtime = runtime
        self._node = node
        self._prefix = prefix
        self._gone = gone_channel(prefix).encode()
        self._mutex = runtime.mutex()
        self._waiting: dict[bytes, tuple[Event, bytes]] = {}
        self._wire: Wire | None = None
        self._ended: Event | None = None
        self._opening: Event | None = None
        self._looks: list[tuple[float, bytes]] = []

    def expect(self, request: Request, key: str = "") -> None:
        """
        Wake this request from now on. Before the server can know of it: its turn may come at once.

        Args:
            request: Who waits.
            key: For which lock, so that it is told when that has vanished.
        """
        self._waiting[request.owner.encode()] = request.wake, key.encode()

    def forget(self, request: Request) -> None:
        """Wake it no more."""
        self._waiting.pop(request.owner.encode(), None)

    async def open(self, answer_by: float = inf) -> None:
        """
        Subscribe, if that has not been done; at most one caller does, the others wait for it.

        Args:
            answer_by: Client monotonic time by which this has returned or raised.

        Raises:
            LockError: The server could not be asked, or denies it.
        """
        now = self._runtime.now()
        with self._mutex:
            if self.channel is not None:
                return
            opening = self._opening
            mine = opening is None
            if opening is None:
                opening = self._opening = self._runtime.event()
        if not mine:
            await opening.wait(seconds_left(answer_by, now))
            return
        try:
            await self._subscribe(answer_by)
        except DRIVER_ERRORS as error:
            raise translate(error, self._node.label) from error
        except RuntimeError as error:  # no thread to be had
            message = f"cannot listen at {self._node.label}: {error}"
            raise BackendUnavailable(message) from error
        finally:
            with self._mutex:
                self._opening = None
            opening.set()

    async def _subscribe(self, answer_by: float) -> None:
        # A name of its own for every subscription: what was meant for a former one must not be taken for this one's.
        channel = f"{self._prefix}:wake:{self._runtime.owner()}"
        command = pack("SUBSCRIBE", channel, self._gone)
        connect = self._node.connect
        wire = await (connect() if answer_by == inf else connect(answer_by))
        now = self._runtime.now()
        until = min(now + wire.timeout, now + seconds_left(answer_by, now))
        try:
            if isinstance(wire, AsyncioWire):
                await self._subscribe_asyncio(wire, channel, command, until)
            else:
                self._subscribe_blocking(cast("BlockingWire", wire), channel, command, until)
        except BaseException as error:
            # Also Ctrl-C between any two lines: nobody may believe that somebody listens.
            self._deaf(wire, error)
            wire.close()
            raise

    def _listening(self, wire: Wire, channel: str) -> Event:
        ended = self._runtime.event()
        with self._mutex:
            self._wire = wire
            self._ended = ended
            self.channel = channel
        return ended

    # -- asyncio -----------------------------------------------------------------------------------------------------

    async def _subscribe_asyncio(self, wire: AsyncioWire, channel: str, command: bytes, until: float) -> None:
        confirmed, heard = self._runtime.event(), self._runtime.event()
        confirmations = 0

        def pushed(message: list[Reply]) -> None:
            nonlocal confirmations
            heard.set()
            if message[0] == b"subscribe":  # an error would have failed the wire
                confirmations += 1
                if confirmations == 2:  # noqa: PLR2004 - channels
                    confirmed.set()
            else:
                self._heard(message)

        def lost(error: BaseException) -> None:
            self._deaf(wire, error)
            confirmed.set()

        wire.on_push, wire.on_lost = pushed, lost
        wire.write(command)
        if not await confirmed.wait(max(0.0, until - self._runtime.now())) or wire.error is not None:
            raise wire.error or TimeoutError("the subscription was not confirmed in time")
        ended = self._listening(wire, channel)
        self._runtime.spawn("lockkit-redis-wake", lambda: self._beat(wire, ended, heard))

    async def _beat(self, wire: AsyncioWire, ended: Event, heard: Event) -> None:
        """Ask the connection for an answer now and then, until the subscription has ended. In a task of its own."""
        error: BaseException = ConnectionAbortedError("nobody watches over the subscription any more")
        try:
            while not await ended.wait(HEARTBEAT):
                if not self._waiting:
                    continue
                heard.clear()
                wire.write(pack("PING"))
                if not await heard.wait(PONG_SECONDS):
                    error = TimeoutError(NO_ANSWER)
                    return
        except DRIVER_ERRORS as failure:
            error = failure
        finally:
            # Also when the task was cancelled: all look again, and the next one subscribes.
            self._deaf(wire, error)
            wire.close()

    # -- blocking ----------------------------------------------------------------------------------------------------

    def _subscribe_blocking(self, wire: BlockingWire, channel: str, command: bytes, until: float) -> None:
        wire.on_push = self._heard
        wire.send(command)
        for _ in range(2):
            wire.receive_push(until)
        self._listening(wire, channel)

        async def listen() -> None:
            error: BaseException = ConnectionAbortedError("nobody listens any more")
            try:
                self._listen(wire)
            except DRIVER_ERRORS as failure:
                error = failure
            except Exception as failure:
                error = failure
                log.exception("the subscription at %s failed; the waiters subscribe anew", self._node.label)
            finally:
                wire.close()
                self._deaf(wire, error)

        self._runtime.spawn("lockkit-redis-wake", listen)

    def _listen(self, wire: BlockingWire) -> None:
        """
        Read messages until the subscription ends, or nobody has waited for a while. In a thread of its own.

        Raises:
            Exception: One of `DRIVER_ERRORS`: the connection ended, or does not answer.
        """
        now = heard_at = idle_since = self._runtime.now()
        asked = False
        while self._wire is wire:
            if self._waiting:
                idle_since = now
            until = min(heard_at + (PONG_SECONDS if asked else HEARTBEAT), idle_since + LINGER, self._wake_due(now))
            try:
                message = wire.receive_push(until)
            except TimeoutError as error:
                now = self._runtime.now()
                if self._over(wire, now - idle_since):
                    log.debug("nobody waits at %s any more: %s", self._node.label, error)
                    return
                if asked and now >= heard_at + PONG_SECONDS:
                    raise
                if not asked and now >= heard_at + HEARTBEAT:
                    heard_at = now
                    if self._waiting:
                        wire.send(pack("PING"))
                        asked = True
            else:
                now = heard_at = self._runtime.now()
                asked = False
                if isinstance(message, list):
                    self._heard(message)

    def _over(self, wire: Wire, idle_seconds: float) -> bool:
        """End the subscription if nobody has waited for a while."""
        with self._mutex:
            # Under the mutex: a waiter that comes from here on finds no channel, and subscribes anew.
            return idle_seconds >= LINGER and not self._waiting and self._forget_wire(wire)

    def _wake_due(self, now: float) -> float:
        """Wake those whose time to look has come; give the next such time."""
        looks = self._looks
        while looks and looks[0][0] <= now:
            _, owner = heapq.heappop(looks)
            waiter = self._waiting.get(owner)
            if waiter is not None:
                waiter[0].set()
        return looks[0][0] if looks else inf

    # -- both --------------------------------------------------------------------------------------------------------

    def _heard(self, message: list[Reply]) -> None:
        # What kind of message, on which channel, and its text: anybody may have published it.
        if len(message) != 3 or message[0] != b"message" or not isinstance(message[2], bytes):  # noqa: PLR2004
            return
        text = message[2]
        if message[1] == self._gone:
            for event, key in list(self._waiting.values()):
                if key == text:
                    event.set()
            return
        owner, _, grace_ms = text.partition(b" ")
        waiter = self._waiting.get(owner)
        if waiter is None:
            return
        if not grace_ms.isdigit():
            waiter[0].set()
            return
        seconds = int(grace_ms[:9]) / 1000 + LOOK_MARGIN
        if self._runtime.kind == "asyncio":
            asyncio.get_running_loop().call_later(seconds, waiter[0].set)
        else:
            heapq.heappush(self._looks, (self._runtime.now() + seconds, owner))

    def _deaf(self, wire: Wire, error: BaseException) -> None:
        """Let everybody look again: they may have been told while nobody listened."""
        with self._mutex:
            if not self._forget_wire(wire):
                return
            waiters = list(self._waiting.values())
        log.debug("no longer listening at %s: %s", self._node.label, error)
        for event, _ in waiters:
            event.set()

    def _forget_wire(self, wire: Wire) -> bool:
        if self._wire is not wire:
            return False
        self._wire = self.channel = None
        self._looks = []
        if self._ended is not None:
            self._ended.set()
        return True

    def close(self) -> None:
        """Stop listening. All waiters look again: the node may have been replaced by another."""
        with self._mutex:
            wire = self._wire
            if wire is not None:
                self._forget_wire(wire)
            waiters = list(self._waiting.values())
        if wire is not None:
            wire.close()
        for event, _ in waiters:
            event.set()
