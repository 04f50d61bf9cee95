"""
Locks inside one process: ``memory://`` or ``memory://SPACE``.

Algorithm: a `LockState` per name (holder, queue, token) under one mutex per space.
A release sets the wake-up event of the next waiter, whichever thread or event loop it waits in.
All clients of the process that name the same space share its locks: threads, tasks of any event loop, both APIs.

What the server must offer: nothing; the "server" is this module's dictionary and the machine's monotonic clock.

What it cannot promise: nothing beyond this process. Another process, also a forked child, has spaces of its own.
If a thread dies, nothing notices: its lease is renewed until it is garbage-collected, and ends a ttl later.

Tokens: ``max(last of the space + 1, wall clock µs)``, so they also increase from one run of the program to the next as
long as the clock is not set back by more than the pause between them.
The state of a lock is removed as soon as it has neither holder nor waiter, and that of a lease that expired without a
release now and then; the last token is kept per space.
Notes are kept beside the locks; those whose life is over are removed when the next one is written.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any, ClassVar

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
    Request,
    in_space,
)
from lockkit.backends.lock_state import LockState, wall_clock_us
from lockkit.errors import ConfigurationError
from lockkit.runtime import in_forked_child
from lockkit.units import Instant, Seconds
from lockkit.url import Url

PAGE_LOCKS = 1000
"""Locks that one page of `MemoryBackend.names` looks at. More keeps the mutex for longer than half a millisecond."""

EXPIRED_MAX = 1000
"""How many locks there may be before those of leases that expired without a release are removed; then again when there
are twice as many as were left. More takes memory; fewer looks through all of them more often."""


class MemoryBackend(LockBackend):
    """Threads and tasks of this process."""

    capabilities = Capabilities(
        crash_release="ttl",
        min_ttl=0.01,
        ttl_granularity=0.0,
        fair=True,
        wakeup="push",
        token_source="max(last of the space + 1, wall clock in µs); keeps increasing across restarts of the process",  # noqa: S106
        survives_node_loss=False,
        survives_data_loss=True,
        shared_mode=True,
        fair_shared=True,
        downgrade=True,
        permits="native",
        clock_assumption="none beyond this machine's monotonic clock",
        waiters_visible=True,
        scope="process",
        caveat="Excludes only within this process; a forked child or another process has locks of its own.",
        metadata_update=True,
        listing=True,
        notes=True,
        transfer=True,
    )
    options: ClassVar[Mapping[str, Option]] = {}

    def __init__(self, space: str, host: Host) -> None:
        """Join the space of that name."""
        self._runtime = host.runtime
        self._host = host
        self._space = _spaces.setdefault(space, _Space())
        with self._space.mutex:
            self._space.clients.add(self)
        self._url = f"memory://{space}"

    @classmethod
    def examiner(cls, url: Url) -> str:
        del url
        return "lockkit.backends.memory.examine"

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> MemoryBackend:
        del options
        if len(url.hosts) > 1 or url.port is not None or url.username is not None or url.path.strip("/"):
            message = (
                f"{url.safe_text} is not understood: write memory:// or memory://SPACE, "
                "where SPACE is any word; clients with the same word share locks"
            )
            raise ConfigurationError(message, backend=url.safe_text)
        return cls(url.host or "", host)

    @property
    def url(self) -> str:
        return self._url

    async def try_acquire(self, request: Request) -> Grant | Busy:
        space = self._space
        with space.mutex:
            lock = space.locks.get(request.name)
            if lock is None:
                if len(space.locks) >= space.locks_max:
                    space.remove_expired(self._runtime.now())
                lock = space.locks[request.name] = LockState()
            elif request.queue:
                # Made before a releasing thread can see the request: the property would make a second event there.
                request.state = request.wake
            # Read under the mutex: an earlier time may be before a lease that was granted meanwhile.
            now = self._runtime.now()
            token_min = max(wall_clock_us(), space.token + 1)
            outcome, notify = lock.acquire(request.name, request, now, token_min, request.queue)
            if isinstance(outcome, Grant):
                space.token = outcome.token
                request.state = None
        if notify:
            _notify(notify)
        return outcome

    async def abandon(self, request: Request) -> None:
        if request.state is None and not request.uncertain:
            return
        with self._space.mutex:
            notify = self._space.lock(request.name).abandon(request.owner, self._runtime.now())
            self._space.remove_if_idle(request.name)
        request.state = None
        _notify(notify)

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        with self._space.mutex:
            now = self._runtime.now()
            return [self._space.lock(grant.name).renew(grant.owner, grant.ttl, now) for grant in grants]

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        del answer_by
        with self._space.mutex:
            in_time, notify = self._space.lock(grant.name).release(grant.owner, self._runtime.now())
            self._space.remove_if_idle(grant.name)
        if notify:
            _notify(notify)
        return in_time

    async def downgrade(self, grant: Grant) -> bool:
        with self._space.mutex:
            held, notify = self._space.lock(grant.name).downgrade(grant.owner, self._runtime.now())
        _notify(notify)
        return held

    async def holders(self, name: str) -> Sequence[Holder]:
        with self._space.mutex:
            return self._space.lock(name).holders(self._runtime.now())

    async def update(self, grant: Grant, metadata: str) -> Gone | None:
        def change(claim: Request) -> Request:
            claim.metadata = metadata
            return claim

        with self._space.mutex:
            return self._space.lock(grant.name).update(grant.owner, change, self._runtime.now())

    async def take_over(self, request: Request, owner: str) -> Grant | None:
        space = self._space
        with space.mutex:
            token_min = max(wall_clock_us(), space.token + 1)
            grant = space.lock(request.name).take_over(request.name, owner, request, self._runtime.now(), token_min)
            if grant is not None:
                space.token = max(space.token, grant.token)
        return grant

    async def break_lock(self, name: str) -> bool:
        return self._break(name, LockState.break_lock)

    async def break_permit(self, name: str, slot: int) -> bool:
        return self._break(name, lambda lock, now: lock.break_permit(slot, now))

    def _break(self, name: str, change: Callable[[LockState[Request], float], tuple[bool, Sequence[Request]]]) -> bool:
        with self._space.mutex:
            lock = self._space.lock(name)
            broken, notify = change(lock, self._runtime.now())
            owners, lock.broken = lock.broken, ()  # their clients are notified below
            self._space.remove_if_idle(name)
        _notify(notify)
        for owner in owners:
            self._report_broken(owner)
        return broken

    def _report_broken(self, owner: str) -> None:
        with self._space.mutex:
            clients = tuple(self._space.clients)  # the holder is in this process
        for client in clients:
            client._host.lost(owner, "broken")  # noqa: SLF001 - of this class

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        """See `LockBackend.names`. The first page takes down what there is; each page looks at a part of it."""
        with self._space.mutex:
            locks, now = self._space.locks, self._runtime.now()
            if after is None:
                names, begin = [name for name in locks if in_space(name, prefix)], 0
            else:
                names, begin = after.next
            end = begin + PAGE_LOCKS
            part = names[begin:end]
            found = [name for name in part if self._space.lock(name).in_use(now)]
        return NamesPage(found, (names, end) if end < len(names) else None)

    async def read_note(self, name: str, answer_by: float = inf) -> Note | None:
        del answer_by
        with self._space.mutex:
            found = self._space.notes.get(name)
            left = 0.0 if found is None else found[1] - self._runtime.now()
        return None if found is None or left <= 0 else Note(found[0], left)

    async def write_note(self, grant: Grant, text: str, keep: Seconds, answer_by: float = inf) -> bool:
        del answer_by
        space = self._space
        with space.mutex:
            now = self._runtime.now()
            if space.lock(grant.name).confirm(grant.owner, now) is not None:
                return False
            space.keep_note(grant.name, text, now + keep, now)
        return True

    async def ping(self) -> None:
        """See `LockBackend.ping`. There is nothing that could fail to answer."""

    async def close(self) -> None:
        """See `LockBackend.close`. There is nothing to close: the space belongs to the process."""


class _Space:
    """The locks of one ``memory://SPACE``."""

    __slots__ = ("_ends", "clients", "locks", "locks_max", "mutex", "notes", "token")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        # A real lock, whatever the runtime: clients of several threads and event loops share the space.
        # It is held for a few microseconds and never across an await.
        self.mutex = threading.Lock()
        self.locks: dict[str, LockState[Request]] = {}
        self.locks_max = EXPIRED_MAX
        self.clients: weakref.WeakSet[MemoryBackend] = weakref.WeakSet()
        self.token = 0
        self.notes: dict[str, tuple[str, Instant]] = {}  # text, and when its life ends
        self._ends: list[tuple[Instant, str]] = []  # the same ends as a heap, with those of notes that were replaced

    def lock(self, name: str) -> LockState[Request]:
        """Return the state of a lock; a free one, which is not kept, if there is none. Under the mutex."""
        return self.locks.get(name) or LockState()

    def remove_if_idle(self, name: str) -> None:
        """Remove a lock that nobody holds or waits for. Under the mutex."""
        lock = self.locks.get(name)
        if lock is not None and lock.idle:
            del self.locks[name]

    def remove_expired(self, now: Instant) -> None:
        """Remove the locks that nobody holds or waits for any more. Under the mutex."""
        self.locks = {name: lock for name, lock in self.locks.items() if lock.in_use(now)}
        self.locks_max = max(EXPIRED_MAX, 2 * len(self.locks))

    def keep_note(self, name: str, text: str, end: Instant, now: Instant) -> None:
        """Keep a note, and remove those whose life is over. Under the mutex."""
        self.notes[name] = text, end
        heappush(self._ends, (end, name))
        while self._ends[0][0] <= now:
            _, ended = heappop(self._ends)
            if ended in self.notes and self.notes[ended][1] <= now:
                del self.notes[ended]


_spaces: dict[str, _Space] = {}


def _notify(waiters: Sequence[Request]) -> None:
    """Wake waiters. Outside the mutex: an event may call into its loop."""
    for waiter in waiters:
        waiter.wake.set()


def _forget_parent() -> None:
    """Empty all spaces in a forked child: they have the parent's holders, and a thread of it may hold a mutex."""
    for space in _spaces.values():
        space.reset()


in_forked_child(_forget_parent)
