"""
Notes on locks: read by anyone, written by the holder.

A note is a small text that outlives the lease of its writer. The backend compares the owner and writes in one atomic
step, so a holder that has lost its lease never overwrites the note of the next one.
"""

from __future__ import annotations

import logging

from lockkit.backend import CALL_SECONDS, NOTE_BYTES_MAX, Note, split_space
from lockkit.engine.client_state import ClientState
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.leases import Leases
from lockkit.errors import BackendUnavailable, Unsupported
from lockkit.units import Seconds

log = logging.getLogger("lockkit")

RETRY_SECONDS_MIN = 0.02
RETRY_SECONDS_MAX = 1.0
"""Pauses between the attempts to write a note while the backend does not answer. Longer, and a lease may end although
the server came back in time; shorter asks a server in trouble more often."""


class Notes:
    """The notes that one client reads and writes."""

    def __init__(self, client: ClientState, leases: Leases) -> None:
        """Do nothing yet."""
        self._client = client
        self._leases = leases

    def require(self, what: str) -> None:
        """Check that the backend has notes."""
        if not self._client.capabilities.notes:
            url = self._client.url
            message = (
                f"{what} needs notes on locks, which {url} does not keep. Use redis://, etcd://, zookeeper://, file: "
                "or the lock table of a database (postgresql://, mysql:// or sqlite:// with mode=table)"
            )
            raise Unsupported(message, backend=url)

    async def read(self, name: str) -> Note | None:
        """Read the note on a lock in one round trip; None if there is none."""
        backend = self._client.ready()
        try:
            return await backend.read_note(name)
        except BackendUnavailable as error:
            plain = split_space(name)[1]
            raise self._client.unavailable(error, f"read the note on lock {name!r}", plain) from (
                error.__cause__ or error
            )

    async def clock(self) -> float:
        """Ask for the backend's wall clock, Unix time."""
        try:
            return await self._client.ready().clock()
        except BackendUnavailable as error:
            raise self._client.unavailable(error, "ask for the time", None) from error.__cause__ or error

    async def write(self, record: LeaseRecord, text: str, keep: Seconds) -> None:
        """
        Put a note on the lock that a lease holds, in place of the one before.

        Retries while the backend does not answer and the lease is held, for one ttl at most: a server that is full
        renews for ever, and takes no note.
        """
        assert len(text.encode()) <= NOTE_BYTES_MAX, "checked by the primitive, which knows what is too long"
        runtime, pause = self._client.runtime, RETRY_SECONDS_MIN
        give_up_at = runtime.now() + record.grant.ttl
        while True:
            record.check()
            answer_by = self._client.answer_by(CALL_SECONDS, min(record.valid_until, give_up_at))
            try:
                written = await self._client.ready().write_note(record.grant, text, keep, answer_by)
            except BackendUnavailable as error:
                left = give_up_at - runtime.now()
                if left <= 0.0:
                    name = split_space(record.grant.name)[1]
                    raise self._client.unavailable(error, f"write the note on lock {name!r}", name) from (
                        error.__cause__ or error
                    )
                log.warning("writing the note on lock %r: %s; lockkit retries", record.grant.name, error)
                await runtime.sleep(min(pause * runtime.random.uniform(0.5, 1.0), record.remaining(), left))
                pause = min(pause * 2, RETRY_SECONDS_MAX)
            else:
                if not written:
                    self._leases.lose(record, "gone")
                    raise record.lost_error()
                return
