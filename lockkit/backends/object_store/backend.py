"""
Locks in an object store: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``.

Algorithm: one object for each lock, whose content is a `Record`. Every step reads the object, or remembers it from the
last time, and writes it back on the condition that it has not changed since. The store decides between two writers.
It shows no clock to compare with, so clients observe expiry (`lockkit.expiry`), by the nonce that each write draws.

======== ==================================================== =====================================================
step     the object as it was seen                            what is written, if it is still so
======== ==================================================== =====================================================
acquire  none, free, or observed dead                         the new owner, a larger token
renew    this owner's                                         the same, with a new nonce
release  this owner's                                         without an owner, with the token and the note
abandon  what the request's lost write expected               the same as a free lock: that write comes to nothing
======== ==================================================== =====================================================

What the server must offer: strongly consistent reads, and writes on the condition that the object does not exist or has
an ETag (S3 since November 2024, Google Cloud Storage by generation, Azure Blob Storage). A store that ignores the
condition cannot be noticed by one client: ``lockkit doctor`` races several.

What it cannot promise: waiters poll, once a second. Nobody sees how long a lock has been held that crashed before the
first look: the first client to ask waits a whole ttl. Objects are never deleted, because the token is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, TypeVar

from lockkit.backend import (
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    Host,
    LockBackend,
    NamesPage,
    Note,
    Renewal,
    Renewed,
    Request,
    Unknown,
    decode_metadata,
    granted_at,
    in_space,
    split_space,
)
from lockkit.backends.lock_state import wall_clock_us
from lockkit.backends.object_store.record import Record, decode, lock_name, object_name
from lockkit.backends.object_store.store import OPTIONS, Store
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.expiry import Observations
from lockkit.runtime import wall_clock
from lockkit.units import Instant, Seconds
from lockkit.url import Url

T = TypeVar("T")
Decide = Callable[[Record], Record | T]

WRITES_MAX = 5
"""How often a step is tried while others write. More than twice only if one acquires and breaks in a loop."""

RENEW_SHARE = 1 / 3
"""Share of the shortest ttl in use that renewals may take. More: one that stalls delays the next renewals until leases
end. Less gives up on a store that is only slow, or has many leases to renew."""

PAGE_LOCKS = 500
"""Objects that one page of `ObjectBackend.names` reads. More could take longer than a call may."""


class ObjectBackend(LockBackend):
    """Locks in a bucket."""

    capabilities = Capabilities(
        crash_release="ttl",
        min_ttl=5.0,
        ttl_granularity=0.0,
        fair=False,
        wakeup="poll",
        token_source="max(last + 1, wall clock of the client in µs), in the object, which is never deleted",  # noqa: S106
        survives_node_loss=True,
        survives_data_loss=False,
        shared_mode=False,
        permits="slots",
        clock_assumption="the monotonic clocks of holder and waiter run at the same rate, within 1 %",
        waiters_visible=False,
        scope="network",
        caveat="A client takes a dead holder's lock, and no longer lists it, when it has seen it unchanged for a whole "
        "ttl: the first look after a crash finds it held, however long ago that was.",
        metadata_update=True,
        listing=True,
        notes=True,
        transfer=True,
        usable_after_fork=False,
    )
    options = OPTIONS
    poll_seconds = 1.0

    def __init__(self, store: Store, host: Host) -> None:
        """Connect at the first call."""
        self._store = store
        self._runtime = host.runtime
        self._observed = Observations[Record](host.runtime)
        self._shortest_ttl: Seconds = inf
        self._clock_us = wall_clock_us  # of the token the last one decides; the client's clock only makes it a time

    @classmethod
    def examiner(cls, url: Url) -> str:
        del url
        return "lockkit.backends.object_store.examine"

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> ObjectBackend:
        return cls(Store(url, options, host.runtime), host)

    @property
    def url(self) -> str:
        return self._store.shown

    # -- objects ---------------------------------------------------------------------------------------------------

    async def _read(self, name: str) -> Record:
        found = await self._store.read(object_name(name))
        if found is None:
            self._observed.forget(name)
            return Record()
        try:
            record = decode(*found)
        except ValueError as error:
            message = f"object {object_name(name)!r} at {self.url} was not written by lockkit: {error}. "
            message += "Use another prefix, or delete it"
            raise ConfigurationError(message, name=split_space(name)[1], backend=self.url) from error
        self._observed.see(name, record)
        return record

    async def _read_each(self, names: Sequence[str]) -> Mapping[str, Record]:
        """Read the objects of several locks; leave out those that an application wrote."""
        found: dict[str, Record] = {}
        for name, one in zip(names, await self._store.run_each(self._read, names), strict=True):
            if isinstance(one, Record):
                found[name] = one
            elif not isinstance(one, ConfigurationError) or not isinstance(one.__cause__, ValueError):
                raise one
        return found

    async def _change(self, name: str, decide: Decide[T], seen: Record | None = None) -> Record | T:
        """Write what `decide` makes of a record, until nobody else writes meanwhile; return its last word."""
        for _ in range(WRITES_MAX):
            outcome = decide(seen or await self._read(name))
            if not isinstance(outcome, Record):
                return outcome
            version = await self._store.write(object_name(name), outcome.encode(), outcome.version)
            if version is not None:
                self._observed.see(name, replace(outcome, version=version))
                return outcome
            seen = None
        message = f"lock {split_space(name)[1]!r} at {self.url} was changed by others {WRITES_MAX} times meanwhile"
        raise BackendUnavailable(message, backend=self.url)

    # -- acquiring -------------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        def decide(seen: Record) -> Record | Busy:
            left = self._observed.left(request.name, seen, seen.ttl)
            if left > 0 and seen.owner != request.owner:  # its own by a write that a proxy repeated
                return Busy(left, owner=seen.owner, metadata=seen.metadata)
            return self._taken(request, seen, Record.freed)

        request.state = None
        last = self._observed.last(request.name)
        # What was held is read again: a single try must find a lock that is free.
        return await self._acquire(request, decide, last if last is not None and last.owner is None else None)

    async def _acquire(self, request: Request, decide: Decide[T], seen: Record | None = None) -> Grant | T:
        taken = await self._store.run(self._change(request.name, decide, seen), request.answer_by)
        return Grant(request.name, request.owner, taken.token, request.ttl) if isinstance(taken, Record) else taken

    def _taken(self, request: Request, seen: Record, undo: Callable[[Record], Record]) -> Record:
        """Make the request the holder."""
        # For `abandon`: what the write expects, and what replaces that, so that a late write comes to nothing. It stays
        # after the write: if the caller is cancelled just then, nobody gets the grant, and `abandon` has to undo it.
        request.state = seen.version, undo
        self._shortest_ttl = min(self._shortest_ttl, request.ttl)
        token, metadata = max(seen.token + 1, self._clock_us()), request.metadata
        return seen.changed(token=token, owner=request.owner, ttl=request.ttl, metadata=metadata, broken=None)

    async def take_over(self, request: Request, owner: str) -> Grant | None:
        def decide(seen: Record) -> Record | Grant | None:
            if seen.owner == request.owner:  # by a call whose answer was lost
                return Grant(request.name, request.owner, seen.token, request.ttl)
            held = seen.owner == owner and self._observed.left(request.name, seen, seen.ttl) > 0
            return self._taken(request, seen, Record.changed) if held else None

        return await self._acquire(request, decide)

    async def abandon(self, request: Request) -> None:
        def decide(seen: Record) -> Record | None:
            if seen.owner == request.owner:
                return seen.freed()
            # Its write may still be on its way. It comes to nothing once the object has another version.
            expected, undo = request.state
            return undo(seen) if seen.version == expected else None

        if request.uncertain and request.state is not None:
            await self._store.run(self._change(request.name, decide), request.answer_by)
        request.state = None

    # -- holding ---------------------------------------------------------------------------------------------------

    async def _replace(self, grant: Grant, change: Callable[[Record], Record] | None = None) -> Gone | None:
        """Write in place of the grant's record, or release it; `Gone` if it is not this owner's."""

        def decide(seen: Record) -> Record | Gone | None:
            if change is None and seen.nonce in (grant.state or ()):
                return None  # it was released, by a write whose answer was lost
            if seen.owner is None:
                return Gone("broken" if seen.broken == grant.owner else "gone")
            if seen.owner != grant.owner:
                return Gone("taken")
            if change is not None:
                return change(seen)
            record = seen.freed()
            grant.state = {*(grant.state or ()), record.nonce}
            return record

        last = self._observed.last(grant.name)
        mine = last if last is not None and last.owner == grant.owner else None
        outcome = await self._change(grant.name, decide, mine)
        return outcome if isinstance(outcome, Gone) else None

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        self._shortest_ttl = min([self._shortest_ttl, *(grant.ttl for grant in grants)])
        answer_by = self._runtime.now() + self._shortest_ttl * RENEW_SHARE
        outcomes = await self._store.run_each(
            lambda grant: self._replace(grant, lambda seen: seen.changed(ttl=grant.ttl)), grants, answer_by
        )
        return [Unknown(one) if isinstance(one, BaseException) else one or Renewed() for one in outcomes]

    async def release(self, grant: Grant, answer_by: Instant = inf) -> bool:
        return await self._store.run(self._replace(grant), answer_by) is None

    async def release_all(self, grants: Sequence[Grant], answer_by: Instant) -> None:
        for outcome in await self._store.run_each(self._replace, grants, answer_by):
            if isinstance(outcome, BaseException):
                raise outcome

    async def update(self, grant: Grant, metadata: str) -> Gone | None:
        return await self._store.run(self._replace(grant, lambda seen: seen.changed(metadata=metadata)))

    async def write_note(self, grant: Grant, text: str, keep: Seconds, answer_by: Instant = inf) -> bool:
        change = self._replace(grant, lambda seen: seen.changed(note=text, note_until=wall_clock() + keep))
        return await self._store.run(change, answer_by) is None

    # -- inspection ------------------------------------------------------------------------------------------------

    async def holders(self, name: str) -> Sequence[Holder]:
        seen = await self._store.run(self._read(name))
        left = self._observed.left(name, seen, seen.ttl)
        if seen.owner is None or left <= 0:
            return []
        return [Holder(seen.owner, seen.token, left, decode_metadata(seen.metadata), since=granted_at(seen.token))]

    async def break_lock(self, name: str) -> bool:
        def decide(seen: Record) -> Record | None:
            return seen.freed(broken=True) if self._observed.left(name, seen, seen.ttl) > 0 else None

        return await self._store.run(self._change(name, decide)) is not None

    async def read_note(self, name: str, answer_by: float = inf) -> Note | None:
        seen = await self._store.run(self._read(name), answer_by)
        left = seen.note_until - wall_clock()
        return None if seen.note is None or left <= 0 else Note(seen.note, left)

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        """See `LockBackend.names`. Reads each object whose name follows the prefix: the state of a lock is in it."""
        first = object_name(prefix)
        folder, last = first.rpartition("/")[0], first if after is None else after.next
        # A listing begins behind a name, so the object with just that one is read too. There is none called "=once/".
        found = [first] if after is None and first and not first.endswith("/") else []
        page = await self._store.run(self._store.list(folder, last.rstrip("/"), PAGE_LOCKS))
        found += [name for name in page if name != first]
        names = [name for one in found if (name := lock_name(one)) is not None and in_space(name, prefix)]
        read = await self._read_each(names)
        held = [name for name, seen in read.items() if self._observed.left(name, seen, seen.ttl) > 0]
        more = len(page) == PAGE_LOCKS and page[-1].startswith(first)
        return NamesPage(held, page[-1] if more else None)

    async def ping(self) -> None:
        await self._store.run(self._store.read("=ping"))

    async def erase(self) -> None:
        """Delete what lockkit has written below the prefix. The conformance suite calls it; tokens may repeat."""
        last = ""
        while page := await self._store.run(self._store.list("", last, PAGE_LOCKS)):
            last = page[-1]
            names = [name for one in page if (name := lock_name(one)) is not None]
            if written := [object_name(name) for name in await self._read_each(names)]:
                await self._store.run(self._store.delete(written))

    async def close(self) -> None:
        self._store.loop.stop()
