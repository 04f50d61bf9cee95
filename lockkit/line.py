"""
The waiting lines of one client: a first-come-first-served line per lock name.

Only the head of a line contends at the backend; the others wait here.
So 1,000 threads or tasks waiting for one lock cost the backend one contender.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from lockkit.runtime import Event, Runtime

__all__ = ["Lines", "Place"]


class Place:
    """
    Where one acquisition stands.

    Attributes:
        at_head: It is the one that may contend, and must `Lines.leave`.
    """

    __slots__ = ("at_head",)

    def __init__(self) -> None:
        """Stand nowhere yet."""
        self.at_head = False


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
        self._lines: dict[str, deque[Event] | None] = {}  # None: a head with nobody behind
        self._drained: Event | None = None

    def enter(self, name: str, place: Place, *, wait: bool) -> Event | None:
        """
        Stand in line.

        Args:
            name: The lock.
            place: Is told whether it is the head.
            wait: If there is somebody in front, stay.

        Returns:
            The event of one's turn, for `turn`; None at the head, or if somebody is in front and `wait` is False.
        """
        with self._mutex:
            if name not in self._lines:
                # First: Ctrl-C can come between any two lines, and a head that does not leave blocks its line for ever.
                place.at_head = True
                self._lines[name] = None
                return None
            if not wait:
                return None
            line = self._lines[name]
            if line is None:
                from collections import deque  # noqa: PLC0415 - only when there is a line

                line = self._lines[name] = deque()
            turn = self._runtime.event()
            line.append(turn)
            return turn

    async def turn(  # noqa: PLR0917 - the state of one wait
        self, name: str, place: Place, turn: Event, deadline: float | None, warn_at: float, warn: Callable[[], None]
    ) -> None:
        """
        Wait to become the head; ``place.at_head`` tells whether it came to that before `deadline`.

        Args:
            name: The lock.
            place: As for `enter`.
            turn: From `enter`.
            deadline: Client monotonic clock, or None without limit.
            warn_at: Client monotonic clock: call `warn` if it takes longer.
            warn: Called at most once.
        """
        try:
            came = False
            if deadline is None or warn_at < deadline:
                came = await turn.wait(max(0.0, warn_at - self._runtime.now()))
                if not came:
                    warn()
            if not came:
                came = await turn.wait(None if deadline is None else max(0.0, deadline - self._runtime.now()))
            place.at_head = came and not self._closed
        finally:
            if not place.at_head:
                self._give_up(name, turn)

    def _give_up(self, name: str, turn: Event) -> None:
        with self._mutex:
            line = self._lines.get(name)
            if line is not None and turn in line:
                line.remove(turn)
                return
        # It was made the head in the instant in which it gave up: pass that on.
        self.leave(name)

    def leave(self, name: str) -> None:
        """Make the next in line the head."""
        with self._mutex:
            line = self._lines.get(name)
            if line:
                line.popleft().set()
                return
            self._lines.pop(name, None)
            if self._drained is not None and not self._lines:
                self._drained.set()

    def behind(self, name: str) -> int:
        """How many stand behind the head."""
        return len(self._lines.get(name) or ())

    async def close(self, seconds: float) -> None:
        """Send everybody away, and wait until the heads have left too, at most `seconds`."""
        with self._mutex:
            self._closed = True
            turns = [turn for line in self._lines.values() if line for turn in line]
            if self._lines:
                self._drained = self._runtime.event()
        for turn in turns:
            turn.set()
        if self._drained is not None:
            await self._drained.wait(seconds)
