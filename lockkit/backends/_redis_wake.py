"""
Hearing from a Redis node that it is one's turn: one subscription per client and node, whatever the number of waiters.

A waiter stands in the lock's queue with the channel of its client (``PREFIX:wake:<random>``).
Who frees the lock publishes the waiter's owner id there, and nobody else is told.

The order that keeps a wake-up from being missed: the subscription is confirmed by the server before any waiter takes a
place in a queue; and when the subscription ends, all waiters look again, which subscribes anew.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from lockkit.backends._redis_io import DRIVER_ERRORS, AsyncioWire, BlockingWire, pack, translate

if TYPE_CHECKING:
    from lockkit.backend import Request
    from lockkit.backends._redis_io import PoolNode, Reply, Wire, WireNode
    from lockkit.runtime import Event, Runtime

__all__ = ["Ears"]

log = logging.getLogger("lockkit")

LINGER = 60.0
"""Seconds that a listening thread stays when nobody waits. Shorter subscribes more often, longer keeps the thread."""


class Ears:
    """
    The subscription of one client at one node.

    Attributes:
        channel: Where the client is told, while it listens; None otherwise.
    """

    def __init__(self, runtime: Runtime, node: WireNode | PoolNode, prefix: str) -> None:
        """Listen to nothing yet."""
        self.channel: str | None = None
        self._runtime = runtime
        self._node = node
        self._prefix = prefix
        self._mutex = runtime.mutex()
        self._waiting: dict[str, Event] = {}
        self._wire: Wire | None = None
        self._opening: Event | None = None

    def expect(self, request: Request) -> None:
        """Wake this request from now on. Before the server can know of it: its turn may come at once."""
        self._waiting[request.owner] = request.wake

    def forget(self, request: Request) -> None:
        """Wake it no more."""
        self._waiting.pop(request.owner, None)

    async def open(self) -> None:
        """
        Subscribe, if that has not been done; at most one caller does, the others wait for it.

        Raises:
            LockError: The server could not be asked, or denies it.
        """
        with self._mutex:
            if self.channel is not None:
                return
            opening = self._opening
            mine = opening is None
            if opening is None:
                opening = self._opening = self._runtime.event()
        if not mine:
            await opening.wait(None)
            return
        try:
            await self._subscribe()
        except DRIVER_ERRORS as error:
            raise translate(error, self._node.label) from error
        finally:
            with self._mutex:
                self._opening = None
            opening.set()

    async def _subscribe(self) -> None:
        # A name of its own for every subscription: what was meant for a former one must not be taken for this one's.
        channel = f"{self._prefix}:wake:{self._runtime.owner()}"
        wire = await self._node.connect()
        try:
            wire.on_push = self._heard
            if isinstance(wire, AsyncioWire):
                await self._subscribe_asyncio(wire, channel)
            else:
                self._subscribe_blocking(cast("BlockingWire", wire), channel)
        except BaseException:
            # Also Ctrl-C between any two lines: nobody may believe that somebody listens.
            with self._mutex:
                self._forget_wire(wire)
            wire.close()
            raise

    async def _subscribe_asyncio(self, wire: AsyncioWire, channel: str) -> None:
        confirmed = self._runtime.event()

        def first(message: list[Reply]) -> None:
            del message  # the confirmation; an error would have failed the wire
            wire.on_push = self._heard
            confirmed.set()

        def lost(error: BaseException) -> None:
            self._deaf(wire, error)
            confirmed.set()

        wire.on_push, wire.on_lost = first, lost
        wire.write(pack("SUBSCRIBE", channel))
        if not await confirmed.wait(wire.timeout) or wire.error is not None:
            raise wire.error or TimeoutError("the subscription was not confirmed in time")
        self._listening(wire, channel)

    def _subscribe_blocking(self, wire: BlockingWire, channel: str) -> None:
        wire.send(pack("SUBSCRIBE", channel))
        wire.receive_push()
        wire.set_timeout(LINGER)
        self._listening(wire, channel)

        async def listen() -> None:
            self._listen(wire)

        self._runtime.spawn("lockkit-redis-wake", listen)

    def _listening(self, wire: Wire, channel: str) -> None:
        with self._mutex:
            self._wire = wire
            self.channel = channel

    def _listen(self, wire: BlockingWire) -> None:
        """Read messages until the connection ends, or nobody has waited for a while. In a thread of its own."""
        while True:
            try:
                self._heard(wire.receive_push())
            except TimeoutError as error:
                with self._mutex:
                    if self._waiting:
                        continue
                    # Under the mutex: whoever comes from here on finds no channel, and subscribes anew.
                    self._forget_wire(wire)
                log.debug("nobody waits at %s any more: %s", self._node.label, error)
                wire.close()
                return
            except DRIVER_ERRORS as error:
                wire.close()
                self._deaf(wire, error)
                return

    def _heard(self, message: list[Reply]) -> None:
        # What kind of message, on which channel, for which owner.
        if len(message) == 3 and message[0] == b"message" and isinstance(message[2], bytes):  # noqa: PLR2004
            event = self._waiting.get(message[2].decode())
            if event is not None:
                event.set()

    def _deaf(self, wire: Wire, error: BaseException) -> None:
        """Let everybody look again: they may have been told while nobody listened."""
        with self._mutex:
            if not self._forget_wire(wire):
                return
            events = list(self._waiting.values())
        log.debug("no longer listening at %s: %s", self._node.label, error)
        for event in events:
            event.set()

    def _forget_wire(self, wire: Wire) -> bool:
        if self._wire is not wire:
            return False
        self._wire = self.channel = None
        return True

    def close(self) -> None:
        """Stop listening. Who still waits looks again: the node may have been replaced by another."""
        with self._mutex:
            wire, self._wire = self._wire, None
            self.channel = None
            events = list(self._waiting.values())
        if wire is not None:
            wire.close()
        for event in events:
            event.set()
