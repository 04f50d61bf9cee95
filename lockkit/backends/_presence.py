"""
The sign of life of one client: that its client file is there, and stays there.

A new client also tidies up after those that died.
"""

from __future__ import annotations

import logging
import os
import threading
from itertools import islice
from typing import TYPE_CHECKING

from lockkit.backends._clients import Client, is_dead
from lockkit.backends._recordfile import reap_file
from lockkit.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockkit.backends._directory import Directory
    from lockkit.backends._record import FileClaim
    from lockkit.runtime import Runtime

__all__ = ["Presence"]

log = logging.getLogger("lockkit")

IDENTITY_SECONDS = 1.0
"""How often a client looks whether its own file is still there. Until it does, the others take it for dead."""

REAP_MAX = 16
REAP_SKIP_MAX = 4096
"""Entries that a new client looks at, and those that it may skip before, so that all get their turn."""


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
                self._identify(now)
        return now

    def suspect(self) -> None:
        """Look after the file at the next `enter`: somebody else's hand was in the directory."""
        self.check_at = 0.0

    def _identify(self, now: float) -> None:
        if self._left:
            message = "this client is closed: connect again"
            raise BackendUnavailable(message)
        former = self.client
        if former is None or former.removed():
            self._directory.prepare()
            client = Client(self._directory, self._runtime.owner()[:16], now)
            if former is not None:
                # Its file was the sign of life. What we hold is given up to whoever looks, unless we renew it first.
                log.warning("%s was removed by somebody; locks that were held may be lost", former.path)
                client.allow(former.ttl_max)
                self._superseded()
                former.forget()
            self.client = client
            self._reap()
        self.check_at = now + IDENTITY_SECONDS

    def _reap(self) -> None:
        """Remove some of what is left of dead clients and of locks that nobody uses. Bounded work, once per client."""
        for path in (self._directory.clients, self._directory.path):
            # Small numbers are likelier, so that small directories are not skipped.
            skip = int(REAP_SKIP_MAX ** self._runtime.random.random()) - 1
            with os.scandir(path) as entries:
                for entry in islice(entries, skip, skip + REAP_MAX):
                    try:
                        if entry.name.startswith(".") or path == self._directory.path:
                            reap_file(entry)
                        else:
                            is_dead(self._directory, entry.name)
                    except OSError as error:
                        # Somebody else was faster, or it is not ours in a sticky directory.
                        log.debug("tidying %s: %s", entry.path, error)

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
