"""
The waiting calls of one client: a first-come-first-served queue per lock name.

Only the head of a queue contends at the backend; the others wait here.
So 1,000 threads or tasks waiting for one lock cost the backend one contender.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from weakref import ref

from lockkit.runtime import Event, Runtime
from lockkit.units import Instant

LOOK_SECONDS = 2.0
"""How often a waiter makes sure that the head in front of it still exists, seconds. If an interrupt tears a head out of
its call at the wrong instruction, it leaves without waking the next. Shorter costs each waiter more wake-ups."""


class Ticket:
    """
    The place of one acquisition in its queue. The queue refers to it weakly: one that is gone has left.

    Attributes:
        turn: Set when it is worth looking whether this is the head now; None if it became the head at once.
    """

    turn: Event | None = None  # in the class: mostly it stays so, and every acquisition makes a ticket


class LocalQueues:
    """All queues of one client. Nothing is awaited while the mutex is held."""

    def __init__(self, runtime: Runtime) -> None:
        """Start without queues."""
        self._runtime = runtime
        self._closed = False
        self.forked()

    def forked(self) -> None:
        """Forget the waiters: they are threads of the parent, one of which may hold the mutex for ever."""
        self._mutex = self._runtime.mutex()
        self._queues: dict[str, list[ref[Ticket]]] = {}
        self._drained: Event | None = None

    def enter(self, name: str, ticket: Ticket, wait: bool) -> bool:  # noqa: FBT001 - faster than by its name
        """Join the queue."""
        with self._mutex:
            queue = self._queues.get(name)
            if (queue is None or _head(queue) is None) and not self._closed:
                self._queues[name] = [ref(ticket)]
                return True
            if wait:
                assert ticket.turn is None, "a ticket is used once"
                ticket.turn = self._runtime.event()
                if queue is not None:
                    queue.append(ref(ticket))
            return False

    async def wait_for_turn(
        self, name: str, ticket: Ticket, until: Instant, warn_at: Instant, warn: Callable[[], None]
    ) -> bool:
        """Wait to become the head."""
        turn = ticket.turn
        assert turn is not None, "only a ticket behind another waits"
        while not self._closed:
            turn.clear()
            with self._mutex:
                if _head(self._queues[name]) is ticket:
                    return True
            now = self._runtime.now()
            if now >= until:
                return False
            if now >= warn_at:
                warn()
                warn_at = inf
            await turn.wait(min(until, warn_at, now + LOOK_SECONDS) - now)
        return False

    def leave(self, name: str, ticket: Ticket) -> None:
        """Leave the queue, which may be gone already; the next becomes the head."""
        with self._mutex:
            queue = self._queues.get(name)
            if queue is None:
                return
            place = ref(ticket)
            if len(queue) == 1 and queue[0] is place:  # mostly: nobody waits behind it
                queue = []
            elif place in queue:
                queue.remove(place)
            head = _head(queue) if queue else None
            if head is None:
                del self._queues[name]
                if self._drained is not None and not self._queues:
                    self._drained.set()
        if head is not None:
            assert head is not ticket, "a ticket has one place"
            if head.turn is not None:
                head.turn.set()

    def behind(self, name: str) -> int:
        """How many wait behind the head."""
        return max(0, len(self._queues.get(name, ())) - 1)

    async def close(self, seconds: float) -> None:
        """Turn all waiters away, and wait until the heads have left too, at most `seconds`."""
        with self._mutex:
            self._closed = True
            turns = [_turn(other) for queue in self._queues.values() for other in queue]
            if self._queues and self._drained is None:
                self._drained = self._runtime.event()
        for turn in turns:
            if turn is not None:
                turn.set()
        if self._drained is not None and self._queues:
            await self._drained.wait(max(0.0, seconds))


def _turn(other: ref[Ticket]) -> Event | None:
    ticket = other()
    return None if ticket is None else ticket.turn


def _head(queue: list[ref[Ticket]]) -> Ticket | None:
    """Return the ticket in front, past those that are gone without having left."""
    while queue:
        ticket = queue[0]()
        if ticket is not None:
            return ticket
        del queue[0]
    return None
