"""
Locks in an object store: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``.

Algorithm: one object for each lock, whose content is a `Record`. Every step reads the object, or remembers it from the
last time, and writes it back on the condition that it has not changed since. The store decides between two writers.
An object store shows no clock to compare with, so the end of a lease is **observed**: a waiter that has seen the same
nonce for the whole ttl of the record, by its own monotonic clock, takes the lock, on condition that the object is still
the same. Its observation begins after an answer that held the nonce, so after the holder's request that wrote it; and
the holder counts its ttl from before that request. Amazon's lock client for DynamoDB does the same with versions
(github.com/awslabs/amazon-dynamodb-lock-client).

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

Tokens: ``max(last + 1, wall clock of the client in µs)``. The last one decides; the clock only makes them times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, TypeVar

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
    Option,
    Renewal,
    Renewed,
    Request,
    Unknown,
    decode_metadata,
    granted_at,
    in_space,
    seconds_left,
    split_space,
)
from lockkit.backends.lock_state import wall_clock_us
from lockkit.backends.object_store import store
from lockkit.backends.object_store.record import Record, decode, lock_name, object_name
from lockkit.backends.object_store.store import Place, Store, Version
from lockkit.drivers import DriverLoop
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.runtime import wall_clock
from lockkit.units import Instant, Seconds
from lockkit.url import Url

T = TypeVar("T")
R = TypeVar("R")

NAMES_MAX = 10_000
"""Most locks that are remembered. The one that was seen first goes first: whether it is dead is observed anew."""

WRITES_MAX = 5
"""How often a step is tried while other clients change the object. More than one or two changes come from a client that
breaks and acquires in a loop."""

AT_ONCE = 32
"""How many requests of one call are under way. More opens more connections; fewer renews many leases later."""

PAGE_LOCKS = 500
"""Objects that one page of `ObjectBackend.names` reads. More could take longer than a call may."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An object as this client last saw it."""

    record: Record
    version: Version | None  # what a write expects that is to replace it; None: there is no object
    since: Instant  # when its nonce was seen first, client monotonic time


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
    options: ClassVar[Mapping[str, Option]] = store.OPTIONS
    poll_seconds: ClassVar[Seconds] = 1.0

    def __init__(self, place: Place, host: Host) -> None:
        """Connect at the first call."""
        self._url = place.shown
        self._runtime = host.runtime
        self._loop = DriverLoop(host.runtime)
        self._store = Store(place)
        self._seen: dict[str, Seen] = {}  # only in the loop

    @classmethod
    def examiner(cls, url: Url) -> str:
        del url
        return "lockkit.backends.object_store.examine"

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> ObjectBackend:
        return cls(store.place_of(url, options), host)

    @property
    def url(self) -> str:
        return self._url

    # -- objects ---------------------------------------------------------------------------------------------------

    async def _call(self, coroutine: Coroutine[Any, Any, T], answer_by: Instant = inf) -> T:
        """Run a coroutine in the loop, within the time of a call."""
        try:
            self._store.check_process()
        except ConfigurationError:
            coroutine.close()
            raise
        return await self._loop.run(self._bounded(coroutine, seconds_left(answer_by, self._runtime.now())))

    async def _bounded(self, coroutine: Coroutine[Any, Any, T], seconds: Seconds) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await coroutine
        except TimeoutError as error:
            raise self._store.translate(error) from error

    async def _call_each(
        self, work: Callable[[T], Coroutine[Any, Any, R]], items: Sequence[T], answer_by: Instant = inf
    ) -> list[R | BaseException]:
        """Do the same for several, so many at once. What gets no answer in time does not take it from the others."""
        turn = asyncio.Semaphore(AT_ONCE)
        until = self._runtime.now() + seconds_left(answer_by, self._runtime.now())

        async def take_turn(item: T) -> R:
            async with turn:
                return await self._bounded(work(item), until - self._runtime.now())

        async def all_of_them() -> list[R | BaseException]:
            return await asyncio.gather(*map(take_turn, items), return_exceptions=True)

        self._store.check_process()
        return await self._loop.run(all_of_them())

    async def _read(self, name: str) -> Seen:
        found = await self._store.read(object_name(name))
        if found is None:
            self._seen.pop(name, None)
            return Seen(Record(), None, self._runtime.now())
        try:
            record = decode(found[0])
        except ValueError as error:
            message = (
                f"object {object_name(name)!r} at {self._url} was not written by lockkit: {error}. Use another prefix, "
                "or delete it"
            )
            raise ConfigurationError(message, name=split_space(name)[1], backend=self._url) from error
        return self._note(name, record, found[1])

    async def _write(self, name: str, record: Record, expected: Version | None) -> bool:
        version = await self._store.write(object_name(name), record.encode(), expected)
        if version is None:
            return False
        self._note(name, record, version)
        return True

    def _note(self, name: str, record: Record, version: Version) -> Seen:
        """Remember an object, and since when it has not changed."""
        last = self._seen.pop(name, None)
        unchanged = last is not None and last.record.nonce == record.nonce
        seen = Seen(record, version, last.since if last is not None and unchanged else self._runtime.now())
        while len(self._seen) >= NAMES_MAX:
            del self._seen[next(iter(self._seen))]
        self._seen[name] = seen
        return seen

    def _left(self, seen: Seen) -> Seconds:
        """Return after how long the lock may be taken if nobody renews it; 0 or less: now."""
        if seen.record.owner is None:
            return 0.0
        return seen.record.ttl - (self._runtime.now() - seen.since)

    # -- acquiring -------------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        return await self._call(self._try_acquire(request), request.answer_by)

    async def _try_acquire(self, request: Request) -> Grant | Busy:
        request.state = None
        seen = self._seen.get(request.name)
        if seen is not None and seen.record.owner is None and await self._take(request, seen):
            return self._granted(request)
        # It was held, or is no longer as it was: a single try must find a lock that is free.
        seen = await self._read(request.name)
        left, record = self._left(seen), seen.record
        if left > 0 and record.owner != request.owner:
            return Busy(left, owner=record.owner, metadata=record.metadata)
        if await self._take(request, seen):
            return self._granted(request)
        return Busy(retry_after=0.0)  # another client was faster

    async def _take(self, request: Request, seen: Seen, undo: Callable[[Record], Record] = Record.freed) -> bool:
        """Make the request the holder of a lock that is free, dead, or its own by a write that a proxy repeated."""
        # For `abandon`: what the write expects, and what replaces that, so that a late write comes to nothing.
        request.state = seen.version, undo
        record = seen.record.changed(
            token=max(seen.record.token + 1, wall_clock_us()),
            owner=request.owner,
            ttl=request.ttl,
            metadata=request.metadata,
            broken=None,
        )
        return await self._write(request.name, record, seen.version)

    def _granted(self, request: Request) -> Grant:
        # The state stays: if the caller is cancelled just now, nobody gets the grant, and `abandon` has to undo it.
        return Grant(request.name, request.owner, self._seen[request.name].record.token, request.ttl)

    async def take_over(self, request: Request, owner: str) -> Grant | None:
        return await self._call(self._take_over(request, owner), request.answer_by)

    async def _take_over(self, request: Request, owner: str) -> Grant | None:
        for _ in range(WRITES_MAX):
            seen = await self._read(request.name)
            if seen.record.owner == request.owner:
                return self._granted(request)  # by a call whose answer was lost
            if seen.record.owner != owner or self._left(seen) <= 0:
                return None
            if await self._take(request, seen, Record.changed):
                return self._granted(request)
        raise self._restless(request.name)

    async def abandon(self, request: Request) -> None:
        if request.uncertain and request.state is not None:
            await self._call(self._abandon(request), request.answer_by)
        request.state = None

    async def _abandon(self, request: Request) -> None:
        """
        Undo a write whose answer was lost.

        It may still be on its way. It expects a version, so it comes to nothing once the object has another one.
        """
        expected, undo = request.state
        while True:
            seen = await self._read(request.name)
            mine = seen.record.owner == request.owner
            if not mine and seen.version != expected:
                return
            if await self._write(request.name, (Record.freed if mine else undo)(seen.record), seen.version):
                return

    # -- holding ---------------------------------------------------------------------------------------------------

    async def _replace(self, grant: Grant, change: Callable[[Record], Record]) -> Gone | None:
        """Write in place of the grant's record; `Gone` if it is not this owner's."""
        seen = self._seen.get(grant.name)
        if seen is None or seen.record.owner != grant.owner:
            seen = await self._read(grant.name)
        for _ in range(WRITES_MAX):
            if seen.record.owner is not None and seen.record.owner != grant.owner:
                return Gone("taken")
            if seen.record.owner is None:
                return Gone("broken" if seen.record.broken == grant.owner else "gone")
            record = change(seen.record)
            if record.owner is None:
                grant.state = {*(grant.state or ()), record.nonce}  # a release whose answer is lost is known by it
            if await self._write(grant.name, record, seen.version):
                return None
            seen = await self._read(grant.name)  # a renewal whose answer was lost came between
        raise self._restless(grant.name)

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        outcomes = await self._call_each(self._renew, grants)
        return [Unknown(one) if isinstance(one, BaseException) else one for one in outcomes]

    async def _renew(self, grant: Grant) -> Renewal:
        gone = await self._replace(grant, lambda record: record.changed(ttl=grant.ttl))
        return Renewed() if gone is None else gone

    async def release(self, grant: Grant, answer_by: Instant = inf) -> bool:
        return await self._call(self._release(grant), answer_by)

    async def _release(self, grant: Grant) -> bool:
        if await self._replace(grant, Record.freed) is None:
            return True
        seen = self._seen.get(grant.name)
        return seen is not None and seen.record.nonce in (grant.state or ())

    async def release_all(self, grants: Sequence[Grant], answer_by: Instant) -> None:
        for outcome in await self._call_each(self._release, grants, answer_by):
            if isinstance(outcome, BaseException):
                raise outcome

    async def update(self, grant: Grant, metadata: str) -> Gone | None:
        return await self._call(self._replace(grant, lambda record: record.changed(metadata=metadata)))

    async def write_note(self, grant: Grant, text: str, keep: Seconds, answer_by: Instant = inf) -> bool:
        until = wall_clock() + keep
        change = self._replace(grant, lambda record: record.changed(note=text, note_until=until))
        return await self._call(change, answer_by) is None

    def _restless(self, name: str) -> BackendUnavailable:
        message = f"lock {split_space(name)[1]!r} at {self._url} was changed by others {WRITES_MAX} times meanwhile"
        return BackendUnavailable(message, backend=self._url)

    # -- inspection ------------------------------------------------------------------------------------------------

    async def holders(self, name: str) -> Sequence[Holder]:
        seen = await self._call(self._read(name))
        left, record = self._left(seen), seen.record
        if record.owner is None or left <= 0:
            return []
        metadata = decode_metadata(record.metadata)
        return [Holder(record.owner, record.token, left, metadata, since=granted_at(record.token))]

    async def break_lock(self, name: str) -> bool:
        return await self._call(self._break(name))

    async def _break(self, name: str) -> bool:
        for _ in range(WRITES_MAX):
            seen = await self._read(name)
            if self._left(seen) <= 0:
                return False
            if await self._write(name, seen.record.freed(broken=True), seen.version):
                return True
        raise self._restless(name)

    async def read_note(self, name: str) -> Note | None:
        record = (await self._call(self._read(name))).record
        left = record.note_until - wall_clock()
        return None if record.note is None or left <= 0 else Note(record.note, left)

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        """See `LockBackend.names`. Reads each object whose name follows the prefix: the state of a lock is in it."""
        first = object_name(prefix)
        folder, last = first.rpartition("/")[0], first if after is None else after.next
        # A listing begins behind a name, so the object with just that one is read too. There is none called "=once/".
        found = [first] if after is None and first and not first.endswith("/") else []
        page = await self._call(self._store.list(folder, last.rstrip("/"), PAGE_LOCKS))
        found += [name for name in page if name != first]
        names = [name for one in found if (name := lock_name(one)) is not None and in_space(name, prefix)]
        seen = await self._call_each(self._read, names)
        more = len(page) == PAGE_LOCKS and page[-1].startswith(first)
        held = [name for name, one in zip(names, seen, strict=True) if self._is_held(one)]
        return NamesPage(held, page[-1] if more else None)

    def _is_held(self, seen: Seen | BaseException) -> bool:
        if isinstance(seen, ConfigurationError) and isinstance(seen.__cause__, ValueError):
            return False  # data of an application
        if isinstance(seen, BaseException):
            raise seen
        return self._left(seen) > 0

    async def ping(self) -> None:
        await self._call(self._store.read("=ping"))

    async def erase(self) -> None:
        """Delete what lockkit has written below the prefix. The conformance suite calls it; tokens may repeat."""
        last = ""
        while page := await self._call(self._store.list("", last, PAGE_LOCKS)):
            last = page[-1]
            names = [name for one in page if (name := lock_name(one)) is not None]
            read = await self._call_each(self._read, names)
            written = [object_name(name) for name, one in zip(names, read, strict=True) if isinstance(one, Seen)]
            if written:
                await self._call(self._store.delete(written))

    async def close(self) -> None:
        self._loop.stop()
