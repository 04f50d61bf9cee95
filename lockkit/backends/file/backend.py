"""
Locks between the processes of one machine, without a server: ``file:///DIRECTORY`` or ``file:``.

``file:`` alone means the user's state directory.

Algorithm. One record file per lock (`lockkit.backends.file.record`) holds its `LockState`: holder, end of the lease,
token, queue. Every operation (`lockkit.backends.file.record_store`) takes ``flock`` on the record, reads, decides,
writes, and drops the flock: some microseconds, never while waiting for a holder. So the *lock* is what the record
says, not the flock, and it ends with its ttl even if the holder is only stopped.

- The ttl runs on the clock that all processes of the machine share and that counts suspended time (CLOCK_BOOTTIME).
  A record from before a reboot (other boot id) is free.
- Each client keeps a flocked file of its own (`lockkit.backends.file.directory`), so that a killed holder or waiter is
  recognised and replaced at once.
- Waiters queue in the record and are woken through inotify (`lockkit.backends.file.wakeup`): a release wakes the next
  one. Where inotify cannot be used (macOS, or all instances of the user taken) they poll every 2 to 50 ms. Once a
  second each looks whether another program removed the record or its client file, since nothing wakes it then.
- Tokens are ``max(last + 1, wall clock µs)``, so they keep increasing when a record is lost. Clients remove records
  that nobody uses: of a name that a client uses once with the release, others later.

A note is kept in the record, until its end by the wall clock: it survives a reboot, but not the loss of the record.

A damaged record (empty, cut off, foreign) grants nothing. The first client that meets it repairs it, and the lock is
free as soon as every lease that may have been stored there has ended: after the largest ttl that any live client ever
asked for. ``lockkit break NAME`` frees it at once.

What the machine must offer: a local file system with flock and hard links, /proc on Linux. Known network file systems
are refused. macOS uses the same code without inotify; it has not been tested there.

What it cannot promise: anything beyond this machine and kernel. Anything against a user who may write to the
directory, or a program that removes its files while they are in use: removing a record frees the lock, which its
holder learns at its next renewal. If a process is stopped within the microseconds in which it has a record flocked, no
other process can use that lock until it continues or is killed; the error names it.

Source: flock(2), inotify(7), proc_locks(5); each waiter watches only its predecessor, as in the queue lock of
Mellor-Crummey and Scott (1991); tokens as in `lockkit.backends.memory.backend`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
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
    Renewed,
    Request,
    Unknown,
)
from lockkit.backends.file.directory import CHECK_SECONDS, DETACHED, Directory
from lockkit.backends.file.record import FileClaim
from lockkit.backends.file.record_store import RecordStore, State
from lockkit.backends.file.wakeup import WakeupListener
from lockkit.backends.lock_state import wall_clock_us
from lockkit.configuration.profiles import default_directory
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.runtime import in_forked_child
from lockkit.units import Instant, Seconds
from lockkit.url import Url
from lockkit.validation import parse_bool

log = logging.getLogger("lockkit")

RENEW_PATIENCE_SECONDS = 0.5
"""How long one round of renewals waits for all records together that other processes have flocked. Longer, and a
stopped process delays the renewals of other locks; shorter, and a busy machine has to repeat more of them."""

POLL_SECONDS_MIN = 0.002
POLL_SECONDS_MAX = 0.05
"""Pauses between the attempts of a waiter without inotify."""

LISTEN_AGAIN_SECONDS = 10.0
"""How long waiters poll until inotify is tried again, where the user has no instances or watches left."""

CLOSE_SECONDS = 0.2
"""How long `close` waits for its listener. Longer delays the end of a busy program; shorter leaves a thread behind."""

_POLLS = "polls"
"""State of a request that waits and that no listener wakes; the others have their listener there."""


class FileBackend(LockBackend):
    """Processes of this machine."""

    capabilities = Capabilities(
        crash_release="process",
        min_ttl=0.01,
        ttl_granularity=0.0,
        fair=True,
        wakeup="push",
        token_source="max(last + 1, wall clock in µs), in the record; keeps increasing if the record is lost",  # noqa: S106
        survives_node_loss=False,
        survives_data_loss=True,
        shared_mode=True,
        fair_shared=True,
        downgrade=True,
        permits="native",
        clock_assumption="none beyond the monotonic clock that all processes of this machine share",
        waiters_visible=True,
        scope="machine",
        caveat="Excludes only on this machine, on a local file system, among users who may write to the directory.",
        metadata_update=True,
        listing=True,
        notes=True,
        transfer=True,
    )
    options: ClassVar[Mapping[str, Option]] = {
        "group": Option(parse_bool, "share the locks with the group of the directory (files 0660)", default=False),
    }

    def __init__(self, path: str, host: Host, *, group: bool) -> None:
        """Make a client of that directory; nothing is touched yet."""
        self._runtime = host.runtime
        self._now = host.runtime.now
        self._directory = Directory(host.runtime, path, group=group, on_removed=self._client_file_removed)
        self._url = f"file://{path}"
        self._store = RecordStore(host.runtime, self._directory, self._url)
        self._waiting: dict[str, Request] = {}  # by owner
        self._listener: WakeupListener | None = None
        self._listen_at = 0.0  # when inotify may be tried again
        self._mutex = threading.Lock()  # a real one, also under asyncio: it is never held across an await
        self._closed = False
        _backends.add(self)

    @classmethod
    def examiner(cls, url: Url) -> str:
        del url
        return "lockkit.backends.file.examine"

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> FileBackend:
        if url.hosts or url.username is not None or url.scheme != "file":
            message = (
                f"{url.safe_text} is not understood: write file:///DIRECTORY with three slashes, "
                "or file: alone for the default directory"
            )
            raise ConfigurationError(message, backend=url.safe_text)
        path = url.path or str(default_directory() / "locks")
        return cls(os.path.normpath(path), host, group=options["group"])

    @property
    def url(self) -> str:
        return self._url

    # -- LockBackend -----------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        attempt = partial(self._acquire, request)
        while True:
            outcome, predecessor, waiters = await self._store.update(
                request.name, attempt, request.answer_by, taking=True
            )
            if waiters:
                self._notify(waiters)
            if isinstance(outcome, Grant):
                if request.state is not None:
                    self._stop_waiting(request)
                return outcome
            if not request.queue:
                return outcome
            if not self._is_waiting(request):
                # Listen first, then enter the queue: otherwise a notification could come before anything listens.
                self._start_waiting(request)
            elif (
                predecessor is None or request.state is _POLLS or request.state.watch(request.owner, predecessor.client)
            ):
                return outcome

    def _acquire(
        self, request: Request, state: State, now: float
    ) -> tuple[Grant | Busy, FileClaim | None, Sequence[FileClaim]]:
        directory, dead = self._directory, self._store.dead
        directory.allow_ttl(request.ttl, now)
        client_id = directory.client_id
        claim = FileClaim(request.owner, request.ttl, client_id, request.metadata, request.mode, request.limit)
        queue = request.state is not None
        outcome, waiters = state.acquire(request.name, claim, now, wall_clock_us(), queue, dead)
        if isinstance(outcome, Grant):
            return outcome, None, waiters
        return outcome, state.predecessor(request.owner, dead) if queue else None, waiters

    async def wait(self, request: Request, busy: Busy, until: Instant) -> None:
        del busy
        if request.state is _POLLS:
            until = min(until, self._now() + self._runtime.random.uniform(POLL_SECONDS_MIN, POLL_SECONDS_MAX))
        while not await request.wake.wait(max(0.0, min(until - self._now(), CHECK_SECONDS))):
            # Nothing wakes a waiter whose record or client file another program removed: it must look itself.
            if self._now() >= until or self._store.must_look(request.name):
                return
        request.wake.clear()

    async def abandon(self, request: Request) -> None:
        if (request.state is None and not request.uncertain) or self._closed:
            return
        waiters = await self._store.update(
            request.name,
            lambda state, now: state.abandon(request.owner, now),
            request.answer_by,
        )
        self._stop_waiting(request)
        self._notify(waiters)

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        outcomes: list[Renewal] = []
        patience = RENEW_PATIENCE_SECONDS
        for index, grant in enumerate(grants):
            if index % 64 == 63:  # noqa: PLR2004 - some half millisecond
                await self._runtime.sleep(0)  # thousands of leases must not block an event loop
            started = self._runtime.now()
            try:
                renewal = await self._store.update(grant.name, partial(self._renew, grant), started + patience)
            except (BackendUnavailable, ConfigurationError) as error:
                renewal = Unknown(error)
                patience = max(0.0, patience - (self._runtime.now() - started))
            outcomes.append(renewal)
        return outcomes

    def _renew(self, grant: Grant, state: State, now: float) -> Renewal:
        self._directory.allow_ttl(grant.ttl, now)
        renewal = state.renew(grant.owner, grant.ttl, now)
        if not isinstance(renewal, Renewed):
            return renewal
        lease = state.leases[grant.owner]
        if lease.claim.client != self._directory.client_id:
            # Another program removed our former client file, by which the others see that we live.
            lease.claim = lease.claim._replace(client=self._directory.client_id)
        return renewal

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        in_time, waiters = await self._store.update(
            grant.name, lambda state, now: state.release(grant.owner, now), answer_by
        )
        if waiters:
            self._notify(waiters)
        else:
            self._store.remove_single_use(grant.name)
        return in_time

    async def downgrade(self, grant: Grant) -> bool:
        held, waiters = await self._store.update(grant.name, lambda state, now: state.downgrade(grant.owner, now))
        self._notify(waiters)
        return held

    async def holders(self, name: str) -> Sequence[Holder]:
        dead = self._store.dead
        return await self._store.update(name, lambda state, now: state.holders(now, dead))

    async def confirm(self, grant: Grant) -> Gone | None:
        dead = self._store.dead
        return await self._store.update(grant.name, lambda state, now: state.confirm(grant.owner, now, dead))

    async def update(self, grant: Grant, metadata: str) -> Gone | None:
        def change(claim: FileClaim) -> FileClaim:
            return claim._replace(metadata=metadata)

        return await self._store.update(grant.name, lambda state, now: state.update(grant.owner, change, now))

    async def detach(self, grant: Grant) -> Renewal:
        """See `LockBackend.detach`. No client's end frees the lock then."""

        def change(state: State, now: float) -> Renewal:
            self._directory.allow_ttl(grant.ttl, now)
            gone = state.update(grant.owner, lambda claim: claim._replace(client=DETACHED), now)
            return gone or state.renew(grant.owner, grant.ttl, now)

        return await self._store.update(grant.name, change)

    async def take_over(self, request: Request, owner: str) -> Grant | None:
        def change(state: State, now: float) -> Grant | None:
            self._directory.allow_ttl(request.ttl, now)
            claim = FileClaim(request.owner, request.ttl, self._directory.client_id, request.metadata)
            return state.take_over(request.name, owner, claim, now, wall_clock_us())

        return await self._store.update(request.name, change, request.answer_by, taking=True)

    async def break_lock(self, name: str) -> bool:
        """See `LockBackend.break_lock`. Repairs a damaged record too, which counts as a lock that was held."""
        dead = self._store.dead
        broken, waiters = await self._store.update(name, lambda state, now: state.break_lock(now, dead), forced=True)
        self._notify(waiters)
        return broken

    async def break_permit(self, name: str, slot: int) -> bool:
        dead = self._store.dead
        broken, waiters = await self._store.update(name, lambda state, now: state.break_permit(slot, now, dead))
        self._notify(waiters)
        return broken

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        """See `LockBackend.names`. Reads the records without their flocks, so that it delays nobody."""
        if after is not None:
            await self._runtime.sleep(0)  # a page takes milliseconds, and must not block an event loop with the next
        return self._store.names(prefix, None if after is None else after.next)

    async def read_note(self, name: str, answer_by: float = inf) -> Note | None:
        def read(state: State, now: float) -> Note | None:
            del now
            if state.note is None:
                return None
            text, end_us = state.note
            left_us = end_us - wall_clock_us()
            if left_us <= 0:
                state.note = None
            return Note(text, left_us / 1e6) if left_us > 0 else None

        return await self._store.update(name, read, answer_by)

    async def write_note(self, grant: Grant, text: str, keep: Seconds, answer_by: float = inf) -> bool:
        def write(state: State, now: float) -> bool:
            if state.confirm(grant.owner, now) is not None:
                return False
            state.note = text, wall_clock_us() + math.ceil(keep * 1e6)
            return True

        return await self._store.update(grant.name, write, answer_by)

    async def erase(self) -> None:
        """See `LockBackend.erase`. Leaves what is not lockkit's."""
        self._store.erase()

    async def ping(self) -> None:
        """See `LockBackend.ping`. Makes the directory if it is missing."""
        self._store.ping()

    async def close(self) -> None:
        """See `LockBackend.close`. What is left, also in a queue, ends with the client file."""
        # No await before that has ended: a cancelled call must not leave it flocked.
        stopped = None if self._listener is None else self._listener.stop()
        self._closed = True
        self._directory.refuse()
        self._store.close()
        self._directory.close()
        if stopped is not None:
            await stopped.wait(CLOSE_SECONDS)

    def __del__(self) -> None:
        """Close the client file: a client that was dropped must not seem to live."""
        if hasattr(self, "_closed"):
            self._directory.forget()
            self._store.clear()

    def forked(self) -> None:
        """Close the parent's files: our copy of its client file would keep it "alive" after its end."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.forget()
        self._mutex = threading.Lock()
        self._waiting.clear()
        self._directory.forget()
        self._store.clear()

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _is_waiting(self, request: Request) -> bool:
        """Tell whether a request may go on waiting as it does: woken by a listener, or polling without one."""
        if request.state is _POLLS:
            return self._listener is None and self._now() < self._listen_at
        return request.state is not None and request.state is self._listener and self._listener.start()

    def _start_waiting(self, request: Request) -> None:
        """Have a listener if possible, so that the next attempt enters the queue."""
        former, failed = request.state, None
        self._stop_waiting(request)
        with self._mutex:
            if self._listener is former:
                self._listener = None  # it has ended
            if self._listener is None and self._now() >= self._listen_at and self._directory.client_path:
                try:
                    self._listener = WakeupListener(self._runtime, self._directory, self._waiting)
                except OSError as error:
                    failed = error
                    self._listen_at = self._now() + LISTEN_AGAIN_SECONDS
        if failed is not None:
            log.info(
                "waiters at %s poll every %g s for the next %g s, inotify cannot be used: %s",
                self._url, POLL_SECONDS_MAX, LISTEN_AGAIN_SECONDS, failed,
            )  # fmt: skip
        request.wake.clear()
        request.state = self._listener or _POLLS
        self._waiting[request.owner] = request

    def _stop_waiting(self, request: Request) -> None:
        listener, request.state = request.state, None
        self._waiting.pop(request.owner, None)
        if isinstance(listener, WakeupListener):
            listener.unwatch(request.owner)

    def _notify(self, claims: Sequence[FileClaim]) -> None:
        """Wake waiters: our own directly, those of other clients through their client files."""
        for claim in claims:
            request = self._waiting.get(claim.owner)
            if request is not None:
                request.wake.set()
            elif claim.client:
                self._directory.notify(claim.client)

    def _client_file_removed(self) -> None:
        """Open everything again after another program removed our client file, or the whole directory."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
        self._store.close()
        for request in list(self._waiting.values()):
            request.wake.set()


_backends: weakref.WeakSet[FileBackend] = weakref.WeakSet()


def _after_fork() -> None:
    for backend in list(_backends):
        backend.forked()


in_forked_child(_after_fork)
