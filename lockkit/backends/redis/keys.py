"""Names of the keys of a lock, and the times in Redis's unit."""

from __future__ import annotations

import math

from lockkit.backend import SPACES, split_space
from lockkit.backends.redis.resp import bulk
from lockkit.validation import escape

__all__ = [
    "FENCE_MS_MIN",
    "SESSION_SPACE",
    "LockKeys",
    "fence_milliseconds",
    "lock_key",
    "side_key",
    "ttl_milliseconds",
]

FENCE_MS_MIN = 86_400_000
"""Shortest time for which the counter of an idle lock is kept: a day. Shorter relies more on the server's clock, which
must then not be set back by more; longer keeps more small keys."""


SESSION_SPACE = "session"
"""The keys of sessions begin with the prefix followed by ``+`` and this, so no lock has such a key."""

_APART = tuple(f"+{space}:" for space in (*SPACES, SESSION_SPACE))


def lock_key(prefix: str, name: str) -> str:
    """
    Name the key of a lock, as redis-py's ``Lock`` and others know it: ``PREFIX:NAME``, braces percent-encoded.

    With an empty prefix it is the name alone; the lock ``+sem:x`` then has the key ``%2Bsem:x``, because ``+sem:x`` is
    that of the semaphore ``x``.
    """
    key = escape(name, "{}")
    if prefix:
        return f"{prefix}:{key}"
    return f"%2B{key[1:]}" if key.startswith(_APART) else key


def side_key(key: str, what: str) -> str:
    """Name a key beside a lock's, in the same Cluster slot: ``{PREFIX:NAME}:fence``."""
    return f"{{{key}}}:{what}"


def ttl_milliseconds(ttl: float) -> int:
    """Round a ttl (seconds) up to whole milliseconds."""
    # 0.1 * 3 is a little above 0.3: without the margin that would be a millisecond more.
    ttl_ms = math.ceil(ttl * 1000 - 1e-6)
    assert ttl_ms > 0, "a key that never expires"
    return ttl_ms


def fence_milliseconds(ttl_ms: int) -> int:
    """Return how long the counter is kept after the last grant or renewal with that ttl."""
    fence_ms = max(FENCE_MS_MIN, 10 * ttl_ms)
    assert fence_ms > ttl_ms, "a counter that does not outlive its lease"
    return fence_ms


class LockKeys:
    """
    The keys of one lock, packed as the scripts expect them.

    Attributes:
        lock: The lock's own key, not packed.
        acquire: For ``acquire.lua``.
        release: For ``release.lua`` and those with the same keys.
    """

    __slots__ = ("_parts", "acquire", "lock", "release")

    def __init__(self, prefix: str, name: str) -> None:
        """Name and pack them."""
        space, name = split_space(name)
        self.lock = lock_key(f"{prefix}+{space}" if space else prefix, name)
        lock = bulk(self.lock)
        sides = ("fence", "queue", "broken", "shares", "leases")
        fence, queue, broken, shares, leases = (bulk(side_key(self.lock, what)) for what in sides)
        self._parts = lock, fence, queue, broken, shares, leases
        self.acquire = self.release = lock + fence + queue + shares + leases

    @property
    def renew(self) -> bytes:
        """For ``renew.lua``."""
        lock, fence, _, broken, shares, leases = self._parts
        return lock + fence + broken + shares + leases

    @property
    def update(self) -> bytes:
        """For ``update.lua``."""
        lock, fence, _, _, shares, leases = self._parts
        return lock + fence + shares + leases

    @property
    def note(self) -> bytes:
        """For ``read_note.lua``."""
        return bulk(side_key(self.lock, "note"))

    @property
    def write_note(self) -> bytes:
        """For ``write_note.lua``."""
        lock, fence, _, _, shares, leases = self._parts
        return lock + self.note + fence + shares + leases

    @property
    def breaking(self) -> bytes:
        """For ``break.lua``."""
        lock, fence, queue, broken, shares, leases = self._parts
        return lock + fence + broken + queue + shares + leases
