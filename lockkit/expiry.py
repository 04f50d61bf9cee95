"""
Expiry that clients observe, for backends whose store shows its clients no clock.

A client takes the lock of a dead holder when it has seen the same version of its record for the holder's whole ttl, by
its own monotonic clock, on condition that the version is still the same. Each renewal must make another version.
Amazon's lock client for DynamoDB does the same (github.com/awslabs/amazon-dynamodb-lock-client).
"""

from __future__ import annotations

from typing import Generic, TypeVar

from lockkit.runtime import Runtime
from lockkit.units import Instant, Seconds

__all__ = ["NAMES_MAX", "Observations"]

V = TypeVar("V")

NAMES_MAX = 10_000
"""Most locks that are remembered. The one that was seen longest ago is forgotten, and its expiry is observed anew."""


class Observations(Generic[V]):
    """
    The version of each lock that this client saw last, and since when.

    It counts from after the answer that held the version. The write that made the version was earlier, and the holder
    counts its ttl from before that write: a lock has expired for its holder before it has for a waiter.

    Versions are compared with ``==``. Any thread may call the methods; none of them waits.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Remember nothing yet. `runtime` is the host's."""
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._seen: dict[str, tuple[V, Instant]] = {}

    def see(self, name: str, version: V) -> None:
        """Note the version in an answer that has just come."""
        with self._mutex:
            last = self._seen.pop(name, None)
            if len(self._seen) >= NAMES_MAX:
                del self._seen[next(iter(self._seen))]
            unchanged = last is not None and last[0] == version
            self._seen[name] = last if last is not None and unchanged else (version, self._runtime.now())

    def last(self, name: str) -> V | None:
        """Return the version that was seen last; None if that is forgotten."""
        with self._mutex:
            seen = self._seen.get(name)
        return None if seen is None else seen[0]

    def left(self, name: str, version: V, ttl: Seconds) -> Seconds:
        """
        Return after how long this client may take a lock if its holder does not renew it; 0 or less: now.

        Args:
            name: The lock.
            version: The one in the record with this ttl. It has just been seen if it is not the one that was seen last.
            ttl: The holder's, seconds.
        """
        with self._mutex:
            seen = self._seen.get(name)
        return ttl - (self._runtime.now() - seen[1]) if seen is not None and seen[0] == version else ttl

    def forget(self, name: str) -> None:
        """Forget a lock that has no record, or that nobody holds."""
        with self._mutex:
            self._seen.pop(name, None)
