"""
How often a client tries a lock that others take, too, where nothing wakes those that wait.

The client that releases a lock is the first that can take it again, before any other looks; so without more, one client
takes it many times in a row. Here a client that has just released a lock which others took lately waits for a random
time before it tries again, and those that wait look after times of the same kind as long as the lock changes hands. So
each look has the same chance, whichever client looks.

The mean time between the looks of a client is adjusted to how many others there are, which it cannot see: a look that
finds the lock in other hands than the last one makes its looks rarer by a factor, a grant makes them more frequent by a
fixed amount. That draws all clients to the same rate (additive increase, multiplicative decrease: Chiu and Jain,
"Analysis of the Increase and Decrease Algorithms for Congestion Avoidance in Computer Networks", 1989), and the rate of
all looks together grows with the square root of the number of clients only.
"""

from __future__ import annotations

from collections.abc import Callable

from lockkit.units import Instant, Seconds

CONTENDED_SECONDS = 1.0
"""For how long a client takes a lock for contended that it has found in other hands, seconds. Longer goes on waiting
before it locks when the others have gone; shorter forgets others that lock rarely."""

NAMES_MAX = 1000
"""Names for which a client remembers that; then it forgets all. More takes memory; fewer forgets others sooner."""

HELD_SECONDS = 0.1
"""A lock that was in the same hands for so long does not change hands, seconds: those that wait for it look as rarely
as for any other. Longer looks in vain more often; shorter has clients wait for longer after a holder that was slow."""

RATE_FIRST, RATE_MIN, RATE_MAX = 100.0, 8.0, 200.0
"""Looks per second: to begin with; as rarely as those that wait for a lock that stays in the same hands; and at most:
more would use up the server for looks, fewer leave the lock free for longer."""

RATE_STEP, RATE_FACTOR = 4.0, 0.99
"""Looks per second that a grant adds, and what a look in vain leaves of the rate."""

ENGINE_SECONDS = 0.0055
"""What the engine adds to the pause on average, see `lockkit.engine.acquisition`."""


class Pace:
    """How often a client looks for one lock."""

    __slots__ = ("_changed_at", "_token", "rate", "released_at", "seen_at")

    def __init__(self) -> None:
        """Know nothing yet."""
        self.seen_at = float("-inf")  # when the client last found it in other hands
        self.released_at = float("-inf")  # when the client released it, if it has not taken it since
        self._changed_at = float("-inf")
        self.rate = RATE_FIRST  # looks per second
        self._token = 0

    def found(self, token: int, now: Instant) -> bool:
        """Take note that the lock is in other hands, under that token; return whether it changes hands."""
        before, self._token, self.seen_at = self._token, token, now
        if before not in {0, token}:
            self._changed_at = now
            self.rate = max(RATE_MIN, self.rate * RATE_FACTOR)
        return now < self._changed_at + HELD_SECONDS

    def granted(self, token: int, now: Instant) -> None:
        """This client has it."""
        self._token, self._changed_at = token, now
        self.released_at = float("-inf")
        self.rate = min(RATE_MAX, self.rate + RATE_STEP)

    def just_released(self, now: Instant) -> bool:
        """Whether this client released it so lately that others had hardly a chance."""
        return now < self.released_at + 1 / self.rate

    def pause(self, uniform: Callable[[float, float], float]) -> Seconds:
        """Return after how long to look again: random, so that no order repeats itself."""
        return max(0.0, uniform(0.5, 1.5) / self.rate - ENGINE_SECONDS)


class Paces(dict[str, Pace]):
    """The locks that a client has found in other hands lately."""

    def find(self, name: str, now: Instant) -> Pace | None:
        """Return the pace for a lock that others take, too."""
        pace = self.get(name)
        if pace is None or now < pace.seen_at + CONTENDED_SECONDS:
            return pace
        self.pop(name, None)
        return None

    def begin(self, name: str) -> Pace:
        """Return a pace for a lock that was not contended so far."""
        if len(self) >= NAMES_MAX:
            self.clear()
        pace = self[name] = Pace()
        return pace
