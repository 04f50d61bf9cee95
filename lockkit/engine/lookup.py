"""
What a client asks besides acquiring: who holds a lock, which names are held, and the notes on locks.

A note is a small text that outlives the lease of its writer. The backend compares the owner and writes in one atomic
step, so a holder that has lost its lease never overwrites the note of the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Literal

from lockkit.backend import (
    CALL_SECONDS,
    NOTE_BYTES_MAX,
    LockBackend,
    NamesPage,
    Note,
    apart,
    decode_metadata,
    split_space,
)
from lockkit.engine.client_state import ClientState
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.leases import Leases
from lockkit.errors import BackendUnavailable, LockError, LockHolder, Unsupported
from lockkit.runtime import Event
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

Kind = Literal["lock", "semaphore", "once"]
"""What has a name: a lock (also an election, a read/write lock), a semaphore, or the key of once."""

SPACE_OF: Mapping[Kind, str] = {"lock": "", "semaphore": "sem", "once": "once"}
"""In which space the names of each kind are, see `apart`; in the order in which people are shown them."""


class Listing:
    """
    One reading of `LockBackend.names`, from the first page to the last.

    It keeps where the next page begins and no connection: dropping it leaves nothing behind.
    """

    def __init__(self, client: ClientState, prefix: str, kind: Kind) -> None:
        """Read nothing yet."""
        self._client = client
        self._prefix = prefix
        self._kind = kind
        self._last: NamesPage | None = None
        self._semaphores: set[str] = set()

    async def page(self) -> Sequence[str] | None:
        """Read the next names; None at the end."""
        space = SPACE_OF[self._kind]
        asked = apart(space, self._prefix) if space else self._prefix
        while self._last is None or self._last.next is not None:
            answer = self._client.ready().names(asked, self._last)
            page = self._last = await self._client.asked(answer, "list the locks that are held", None)
            names = self._given(page.names) if space else page.names
            if names:
                return names
        return None

    def _given(self, found: Sequence[str]) -> Sequence[str]:
        """Give names of a space as the user knows them; where each slot of a semaphore is a lock, that once."""
        space = SPACE_OF[self._kind]
        names = [split_space(name)[1] for name in found if split_space(name)[0] == space]
        if self._kind != "semaphore" or self._client.capabilities.permits != "slots":
            return names
        bases = dict.fromkeys(name.rpartition("#")[0] for name in names)
        new = [name for name in bases if name.startswith(self._prefix) and name not in self._semaphores]
        self._semaphores.update(new)
        return new


def holder_of(owner: str, metadata: Mapping[str, object] | str | None) -> LockHolder:
    """Describe a holder."""
    about = decode_metadata(metadata) if metadata is None or isinstance(metadata, str) else metadata
    host, pid, text = about.get("host"), about.get("pid"), about.get("text")
    return LockHolder(
        owner,
        host if isinstance(host, str) else None,
        pid if type(pid) is int else None,
        text if isinstance(text, str) else None,
        dict(about),
    )


class HolderLookups:
    """Asks for holders in the background: calls that time out together share one request."""

    def __init__(self, client: ClientState) -> None:
        """Start without requests."""
        self._client = client
        self._pending: dict[str, _Lookup] = {}

    def forked(self) -> None:
        """Forget the parent's requests."""
        self._pending = {}

    async def ask(self, backend: LockBackend, name: str, seconds: Seconds) -> LockHolder | None:
        """Ask who holds a lock."""
        lookup = self._pending.get(name)
        if lookup is None or lookup.done.is_set():
            lookup = _Lookup(self._client.runtime.event())
            if not self._client.spawn("lockkit-holder", partial(lookup.run, backend, name)):
                return None
            self._pending[name] = lookup
        try:
            await lookup.done.wait(seconds)
        finally:
            if self._pending.get(name) is lookup:
                self._pending.pop(name, None)
        return lookup.holder


class _Lookup:
    """One request, and its answer."""

    def __init__(self, done: Event) -> None:
        self.done = done
        self.holder: LockHolder | None = None

    async def run(self, backend: LockBackend, name: str) -> None:
        assert not self.done.is_set(), "asked once"
        try:
            for holder in await backend.holders(name):
                self.holder = holder_of(holder.owner, holder.metadata)
                break
        except LockError as error:
            log.debug("asking for the holder of lock %r: %s", name, error)
        finally:
            self.done.set()


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

    async def read(self, name: str, answer_by: Instant = inf) -> Note | None:
        """Read the note on a lock in one round trip; None if there is none."""
        answer = self._client.ready().read_note(name, answer_by)
        return await self._client.asked(answer, f"read the note on lock {name!r}", split_space(name)[1])

    async def clock(self) -> float:
        """Ask for the backend's wall clock, Unix time."""
        return await self._client.asked(self._client.ready().clock(), "ask for the time", None)

    async def write(self, record: LeaseRecord, text: str, keep: Seconds, answer_by: Instant = inf) -> None:
        """
        Put a note on the lock that a lease holds, in place of the one before.

        Retries while the backend does not answer and the lease is held, for one ttl at most: a server that is full
        renews for ever, and takes no note.
        """
        assert len(text.encode()) <= NOTE_BYTES_MAX, "checked by the primitive, which knows what is too long"
        runtime, pause = self._client.runtime, RETRY_SECONDS_MIN
        give_up_at = min(runtime.now() + record.grant.ttl, answer_by)
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
                if written:
                    return
                self._leases.lose(record, "gone")  # unless it was released meanwhile: either is raised above
