"""What the processes of pytest-xdist make once and share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lockkit.sync import connect
from lockkit.units import Seconds

if TYPE_CHECKING:
    import pytest


__all__ = ["OncePerRun"]

T = TypeVar("T")

TTL_SECONDS: Seconds = 30.0
"""Until another worker makes what one that was killed has begun, seconds. Shorter could take a worker that
stalls for a dead one."""

KEEP_SECONDS: Seconds = 7 * 24 * 3600.0
"""Longer than any run, seconds."""


class OncePerRun:
    """
    Makes something once in a run of pytest, whatever the number of its workers: the fixture ``lockkit_once``.

    Its records are files in the temporary directory of the run, so the workers must be on one machine.
    """

    def __init__(self, factory: pytest.TempPathFactory, run: str | None) -> None:
        """
        Find the directory that all workers of this run share.

        Args:
            factory: Of this process.
            run: Id of the run if this is one of its workers.
        """
        folder = factory.getbasetemp()
        if run is None:
            folder /= "lockkit-once"
        else:
            # Each worker has a directory of its own in that of the run. But on another machine the one above is that of
            # all runs: the id keeps this run from finding what an earlier one has made.
            folder = folder.parent / f"lockkit-once-{run}"
        self._client = connect(folder.as_uri(), ttl=TTL_SECONDS, scope="machine")

    def __call__(self, key: str, make: Callable[[], T]) -> T:
        """
        Return what `make` returns: of the first worker that asks; the others wait for it.

        Args:
            key: What it is, by the rules of lock names.
            make: Makes it. What it returns must be JSON: a URL, a path as text, a dictionary. If it raises an error,
                the next worker tries.

        Raises:
            ConfigurationError: The key is no valid name, or the result cannot be stored.
        """
        with self._client.once(key, keep=KEEP_SECONDS) as attempt:
            if attempt.first:
                attempt.done(make())
            result: T = attempt.result
        return result

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
