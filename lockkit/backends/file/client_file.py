"""
The sign of life of one client: that its client file is there, and stays there.

It also tidies up after clients that died and locks that nobody uses, a little now and then.
"""

from __future__ import annotations

import logging
import os
import threading
from itertools import islice
from typing import TYPE_CHECKING

from lockkit.backends.file.clients import Client, is_dead
from lockkit.backends.file.record_file import reap_file
from lockkit.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockkit.backends.file.directory import Directory
    from lockkit.backends.file.record import FileClaim
    from lockkit.runtime import Runtime

__all__ = ["Presence"]

log = logging.getLogger("lockkit")

IDENTITY_SECONDS = 1.0
"""How often a client looks whether its own file is still there. Until it does, the others take it for dead."""

SWEEP_NAMES_MAX = 1024
"""Names of a folder that are read at once: reading begins at the first each time, and a folder may have 100,000."""

REAP_SECONDS = 10.0
REAP_MAX = 16
"""How often a client that is in use looks at how many entries of each folder. More often, or more, delays the call that
does it (2 µs an entry, 50 µs for one that is removed); less leaves thousands of unused records for longer."""


class Presence:
    """
    Sees to it that this client has a client file while it uses a directory.

    Attributes:
        client: The file; None until the first `enter`.
        check_at: When `enter` looks after the file again, on the runtime's clock.
    """

    def __init__(self, runtime: Runtime, directory: Directory, superseded: Callable[[], None]) -> None:
        """
        Make nothing yet.

        Args:
            runtime: Of the face.
            directory: Where.
            superseded: Called when somebody removed the file, before another client takes the place of the former.
        """
        self._runtime = runtime
        self._now = runtime.now
        self._directory = directory
        self._superseded = superseded
        self._mutex = threading.Lock()  # a real one, also under asyncio: it is never held across an await
        self.client: Client | None = None
        self.check_at = 0.0
        self._reap_at = 0.0
        self._sweeps = [_Sweep(directory.clients), _Sweep(directory.path)]
        self._left = False

    def enter(self) -> float:
        """
        Look after the file if it is time to; return the time.

        Raises:
            OSError: It cannot be made.
            BackendUnavailable: After `leave`.
            ConfigurationError: The directory cannot be trusted.
        """
        now = self._now()
        if now >= self.check_at:
            with self._mutex:
                removed = self._identify(now)
                errors = self._reap(now) if now >= self._reap_at else ()
            if removed is not None:
                log.warning("%s was removed; locks that were held may be lost", removed)
            for error in errors:
                # Another client was faster, or it is not ours in a sticky directory.
                log.debug("tidying %s: %s", self._directory.path, error)
        return now

    def suspect(self) -> None:
        """Look after the file at the next `enter`: somebody else's hand was in the directory."""
        self.check_at = 0.0

    def _identify(self, now: float) -> str | None:
        """Make the client file if there is none; return the path of the former if that was removed."""
        if self._left:
            message = "this client is closed: connect again"
            raise BackendUnavailable(message)
        former, removed = self.client, None
        if former is None or former.removed():
            self._directory.prepare()
            client = Client(self._directory, self._runtime.owner()[:16], now)
            if former is not None:
                # Its file was the sign of life. What we hold is given up to whoever looks, unless we renew it first.
                removed = former.path
                client.allow(former.ttl_max)
                self._superseded()
                former.forget()
            self.client = client
            self._reap_at = 0.0
        self.check_at = now + IDENTITY_SECONDS
        return removed

    def _reap(self, now: float) -> list[OSError]:
        """Remove some of what is left of dead clients and of locks that nobody uses; return what went wrong."""
        self._reap_at = now + REAP_SECONDS
        errors = []
        for sweep in self._sweeps:
            try:
                names = sweep.take(REAP_MAX)
            except OSError as error:
                errors.append(error)
                continue
            for name in names:
                try:
                    if name.startswith(".") or sweep.folder == self._directory.path:
                        reap_file(f"{sweep.folder}/{name}", self.dead)
                    else:
                        is_dead(self._directory, name)
                except OSError as error:
                    errors.append(error)
        return errors

    def dead(self, claim: FileClaim) -> bool:
        """Tell whether the client of a claim has ended."""
        client = self.client
        if not claim.client or (client is not None and claim.client == client.id):
            return False
        return is_dead(self._directory, claim.client)

    def leave(self) -> None:
        """End this client for good: whatever it holds is free."""
        self._left = True
        if self.client is not None:
            self.client.close()
        self.forget()

    def forget(self) -> None:
        """Drop our copy of the descriptor, leaving the file; the next `enter` makes another client."""
        if self.client is not None:
            self.client.forget()
        self._mutex = threading.Lock()
        self.client = None
        self.check_at = 0.0


class _Sweep:
    """Gives the names in a folder, some at a time, round and round, so that all get their turn."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._names: list[str] = []
        self._start = 0

    def take(self, count: int) -> list[str]:
        """Give the next names, at most so many."""
        if not self._names:
            with os.scandir(self.folder) as entries:
                self._names = [entry.name for entry in islice(entries, self._start, self._start + SWEEP_NAMES_MAX)]
            self._start = self._start + len(self._names) if len(self._names) == SWEEP_NAMES_MAX else 0
        taken = self._names[:count]
        del self._names[:count]
        return taken
