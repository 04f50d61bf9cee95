"""
Notes on locks: persistent nodes beside the locks' directories.

::

    /lockkit+once/charge:17/9f…c1__lock__0000000041       the holder of the lock of a run
    /lockkit+once+note/charge:17                          the note on that lock

The data of a note is its life in milliseconds, a space, and the text; its life counts from the node's ``mtime``, which
the ensemble's leader sets. A note is written in one transaction with a check that the holder's node exists.

The ensemble does not remove a note whose life is over: lockkit deletes it when it is read, or overwrites it.

To know the leader's clock, a client sets the data of the notes' directory and reads the ``mtime`` in the answer; it
repeats that after `CLOCK_SECONDS` at the earliest.
"""

from __future__ import annotations

import math
import re
from functools import partial

from kazoo.exceptions import NoNodeError

from lockkit.backend import Note
from lockkit.backends.zookeeper.directories import LockDirectories
from lockkit.backends.zookeeper.node import LockNode
from lockkit.backends.zookeeper.session import Session
from lockkit.errors import BackendUnavailable
from lockkit.units import Instant, Seconds

CLOCK_SECONDS = 60.0
"""How long a client relies on what it knows of the leader's clock. Longer notices later that it was set; shorter costs
another round trip more often."""

ATTEMPTS_MAX = 5
"""How often a note is written that is created or deleted by others at the same time. Each time that takes another
client's write within a round trip."""


class LockNotes:
    """The notes on the locks of one client."""

    def __init__(self, directories: LockDirectories) -> None:
        self._directories = directories
        self._clock_offset = 0.0
        self._clock_at = -math.inf

    async def read(self, session: Session, name: str, until: Instant) -> Note | None:
        path = self._directories.note_path(name)
        try:
            data, stat = await session.read(partial(session.client.get_async, path), until)
        except NoNodeError:
            return None
        keep_ms, _, text = data.decode("utf-8", "replace").partition(" ")
        if not re.fullmatch(r"\d{1,15}", keep_ms):
            return None  # not lockkit's, or not of this form
        now = await self.clock(session, path.rpartition("/")[0], until)
        remaining = (stat.mtime + int(keep_ms)) / 1000 - now
        if remaining > 0:
            return Note(text, remaining)
        session.client.delete_async(path, stat.version)  # refused if it was written meanwhile; nobody waits
        return None

    async def clock(self, session: Session, directory: str, until: Instant) -> float:
        """Give the leader's wall clock, Unix time."""
        asked_at = session.now
        if asked_at - self._clock_at >= CLOCK_SECONDS:
            try:
                stat = await session.answer(session.client.set_async(directory, b""), until)
            except NoNodeError:
                await self._directories.make(session, directory, until)
                stat = await session.answer(session.client.set_async(directory, b""), until)
            self._clock_offset = stat.mtime / 1000 - asked_at
            self._clock_at = asked_at
        return session.now + self._clock_offset

    async def write(self, node: LockNode, name: str, text: str, keep: Seconds, until: Instant) -> bool:
        session, path = node.session, self._directories.note_path(name)
        data = f"{math.ceil(keep * 1000)} {text}".encode()
        create = True  # most keys get one note
        for _ in range(ATTEMPTS_MAX):
            transaction = session.client.transaction()
            transaction.check(node.path, -1)
            if create:
                transaction.create(path, data)
            else:
                transaction.set_data(path, data)
            failed = await session.committed(transaction.commit_async(), until)
            if failed is None:
                return session.id == node.session_id
            if failed == 0:
                return False
            if not create:  # neither a note nor, it seems, a directory for it
                await self._directories.make(session, path.rpartition("/")[0], until)
            create = not create
        message = f"others create and delete {path} as often as lockkit writes it"
        raise BackendUnavailable(message)
