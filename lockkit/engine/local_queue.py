"""
The waiting lines of one client: a first-come-first-served line per lock name.

Only the head of a line contends at the backend; the others wait here.
So 1,000 threads or tasks waiting for one lock cost the backend one contender.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockkit.runtime import Event, Runtime

__all__ = ["Lines", "Place"]

LOOK_SECONDS = 2.0
"""How often a waiter makes sure that the head in front of it still exists, seconds. A head that an interrupt tore out
of its call at the wrong instruction tells nobody that it left. Shorter costs each waiter more wake-ups."""


class Place:
    """
    Where one acquisition stands. The line refers to it weakly: one that is gone has left.

    Attributes:
        turn: Set when it is worth looking whether this is the head now; None for who became the head at once.
    """

    __slots__ = ("__weakref__", "turn")

    def __init__(self) -> None:
        """Stand nowhere yet."""
        self.turn: Event | None = None


class Lines:
    """All lines of one client. Nothing is awaited while the mutex is held."""

    __slots__ = ("_closed", "_drained", "_lines", "_mutex", "_runtime")

    def __init__(self, runtime: Runtime) -> None:
        """Start without lines."""
        self._runtime = runtime
        self._closed = False
        self.forked()

    def forked(self) -> None:
        """Forget the waiters: they are threads of the parent, one of which may hold the mutex for ever."""
        self._mutex = self._runtime.mutex()
        self._lines: dict[str, list[ref[Place]]] = {}
        self._drained: Event | None = None

    def enter(self, name: str, place: Place, *, wait: bool) -> bool:
        """
        Stand in line.

        Args:
            name: The lock.
            place: Of the caller, who keeps it until `leave`.
            wait: If there is somebody in front, stay.

        Returns:
            Whether this is the head.
        """
        with self._mutex:
            line = self._lines.get(name)
            if line is None or _head(line) is None:
                self._lines[name] = [ref(place)]
                return True
            if wait:
                place.turn = self._runtime.event()
                line.append(ref(place))
            return False

    async def turn(
        self, name: str, place: Place, deadline: float | None, warn_at: float, warn: Callable[[], None]
    ) -> bool:
        """
        Wait to become the head; tell whether it came to that before `deadline`.

        Args:
            name: The lock.
            place: As for `enter`, which had somebody in front.
            deadline: Client monotonic clock, or None without limit.
            warn_at: Client monotonic clock: call `warn` if it takes longer.
            warn: Called at most once.
        """
        turn, until = place.turn, inf if deadline is None else deadline
        assert turn is not None, "only who waits in line has a turn"
        while not self._closed:
            turn.clear()
            with self._mutex:
                if _head(self._lines[name]) is place:
                    return True
            now = self._runtime.now()
            if now >= until:
                return False
            if now >= warn_at:
                warn()
                warn_at = inf
            await turn.wait(min(until, warn_at, now + LOOK_SECONDS) - now)
        return False

    def leave(self, name: str, place: Place) -> None:
        """
        Leave the line, which may be over already; the next becomes the head. Allowed to be called again.

        An interrupt strikes between any two instructions: call it again then, or the next learns of its turn late.
        """
        with self._mutex:
            line = self._lines.get(name)
            if line is None:
                return
            for index, other in enumerate(line):
                if other() is place:
                    del line[index]
                    break
            head = _head(line)
            if head is None:
                del self._lines[name]
                if self._drained is not None and not self._lines:
                    self._drained.set()
        if head is not None and head.turn is not None:
            head.turn.set()

    def behind(self, name: str) -> int:
        """How many stand behind the head."""
        return max(0, len(self._lines.get(name, ())) - 1)

    async def close(self, seconds: float) -> None:
        """Send everybody away, and wait until the heads have left too, at most `seconds`."""
        with self._mutex:
            self._closed = True
            turns = [_turn(other) for line in self._lines.values() for other in line]
            if self._lines and self._drained is None:
                self._drained = self._runtime.event()
        for turn in turns:
            if turn is not None:
                turn.set()
        if self._drained is not None and self._lines:
            await self._drained.wait(max(0.0, seconds))


def _turn(other: ref[Place]) -> Event | None:
    place = other()
    return None if place is None else place.turn


def _head(line: list[ref[Place]]) -> Place | None:
    """Who stands in front, past those that are gone without having left."""
    while line:
        place = line[0]()
        if place is not None:
            return place
        del line[0]
    return None
