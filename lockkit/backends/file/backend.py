"""
Locks between the processes of one machine, without a server: ``file:///DIRECTORY`` or ``file:``.

``file:`` alone means the user's state directory.

Algorithm. One record file per lock (`lockkit.backends.file.record`) holds its `Ledger`: holder, end of the lease,
token, queue. Every operation (`lockkit.backends.file.record_store`) takes ``flock`` on the record, reads, decides,
writes, and gives the flock back: some microseconds, never while waiting for a holder. So the *lock* is what the record
says, not the flock, and it ends with its ttl even if the holder is only stopped.

- The ttl runs on the clock that all processes of the machine share and that counts suspended time (CLOCK_BOOTTIME).
  A record from before a reboot (other boot id) is free.
- Each client keeps a flocked file of its own (`lockkit.backends.file.clients`), so that a killed holder or waiter is
  recognised and replaced at once.
- Waiters queue in the record and are woken through inotify (`lockkit.backends.file.wakeup`): a release wakes the next
  one. Where inotify cannot be used (macOS, or all instances of the user taken) they poll every 2 to 50 ms.
- Tokens are ``max(last + 1, wall clock µs)``: they survive the loss of the record, and records that were not used for a
  day are removed, a few now and then, by the clients that come by.

A damaged record (empty, cut off, foreign) grants nobody anything. It is mended by the first client that meets it, as
soon as every lease that may have stood in it has run out: at once if no other client lives, else after the largest ttl
that any living client ever asked for. ``lockkit break NAME`` mends it now.

What the machine must offer: a local file system with flock and hard links, /proc on Linux. Known network file systems
are refused. macOS follows the same code without inotify, and was not run.

What it cannot promise: anything beyond this machine and kernel. Anything against somebody who may write to the
directory, or who removes its files while they are in use: a removed record frees the lock, which its holder learns at
its next renewal. A process that is stopped within the microseconds in which it has a record flocked makes that lock
unavailable until it goes on or is killed; the error names it.

Source: flock(2), inotify(7), proc_locks(5); the queue is that of Mellor-Crummey and Scott (1991) in spirit, each waiter
watching only its predecessor; tokens as in `lockkit.backends.memory.backend`.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from lockkit.backend import (
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    Host,
    LockBackend,
    Option,
    Renewal,
    Renewed,
    Request,
    Unknown,
    decode_metadata,
)
from lockkit.backends.file.client_file import Presence
from lockkit.backends.file.clients import poke
from lockkit.backends.file.directory import Directory, explain
from lockkit.backends.file.record import FileClaim
from lockkit.backends.file.record_file import wall_clock_ns
from lockkit.backends.file.record_store import Store
from lockkit.configuration.profiles import default_directory
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import in_forked_child
from lockkit.validation import parse_bool

if TYPE_CHECKING:
    from lockkit.backends.file.clients import Client
    from lockkit.backends.file.wakeup import Watcher
    from lockkit.backends.lock_state import Ledger
    from lockkit.url import Url

__all__ = ["FileBackend"]

log = logging.getLogger("lockkit")

RENEW_PATIENCE = 0.5
"""How long one round of renewals waits for records that other processes have flocked, seconds in all. Longer and a
stopped process delays the renewals of other locks; shorter and a busy machine has more of them repeated."""

POLL_MIN = 0.002
POLL_MAX = 0.05
"""Pauses between the looks of a waiter without inotify, seconds."""

WATCH_AGAIN_SECONDS = 10.0
"""How long waiters poll until inotify is tried again, where the user has no instances or watches left."""

CLOSE_PATIENCE = 0.2
"""How long `close` waits for what other processes have flocked, and for its own listener, seconds each. What is left
then ends with the client file."""


class FileBackend(LockBackend):
    """Processes of this machine."""

    capabilities = Capabilities(
        crash_release="process",
        min_ttl=0.01,
        ttl_granularity=0.0,
        fair=True,
        wakeup="push",
        token_source="max(last + 1, wall clock in µs), in the record; grows on if the record is lost",  # noqa: S106
        survives_node_loss=False,
        survives_data_loss=True,
        shared_mode=False,
        clock_assumption="none beyond the monotonic clock that all processes of this machine share",
        waiters_visible=True,
        scope="machine",
        caveat="Excludes only on this machine, on a local file system, among those who may write to the directory.",
    )
    options: ClassVar[Mapping[str, Option]] = {
        "group": Option(parse_bool, "share the locks with the group of the directory (files 0660)", default=False),
    }

    def __init__(self, path: str, host: Host, *, group: bool) -> None:
        """Make a client of that directory; nothing is touched yet."""
        self._runtime = host.runtime
        self._now = host.runtime.now
        self._directory = Directory(path, group=group)
        self._url = f"file://{path}"
        self._presence = Presence(host.runtime, self._directory, self._superseded)
        self._store = Store(host.runtime, self._directory, self._presence, self._url)
        self._waiting: dict[str, Request] = {}
        self._watcher: Watcher | None = None
        self._watch_at = 0.0  # when inotify may be tried again
        self._mutex = threading.Lock()  # a real one, also under asyncio: it is never held across an await
        self._closed = False
        _backends.add(self)

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> FileBackend:
        """See `LockBackend.open`."""
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
        """See `LockBackend.url`."""
        return self._url

    # -- the nine questions ----------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """See `LockBackend.try_acquire`."""
        while True:
            name = request.name
            answer = self._store.quick(name, self._take, request)
            if answer is None:
                by = request.answer_by
                answer = await self._store.transact(name, self._take, request, create=True, answer_by=by)
            outcome, before, wake = answer
            if wake:
                self._poke(wake)
            if isinstance(outcome, Grant):
                if request.state is not None:
                    self._leave_place(request)
                return outcome
            place: _Place | None = request.state
            if not request.queue:
                return outcome
            if place is None or not self._wakes(place):
                # Watch first, then take the place: a poke must not come before somebody listens for it.
                self._prepare_place(request)
            elif before is None or self._follow(request.owner, place, before.client):
                return outcome

    def _take(
        self, ledger: Ledger[FileClaim], now: float, request: Request
    ) -> tuple[Grant | Busy, FileClaim | None, Sequence[FileClaim]]:
        client = self._presence.client
        assert client is not None
        if request.ttl > client.ttl_max:
            client.allow(request.ttl)
        claim = FileClaim(request.owner, request.ttl, client.id, request.metadata)
        if request.queue and request.state is None and ledger.holder is not None and self._watcher is not None:
            self._make_place(request)
        queue = request.state is not None
        granted, wake = ledger.acquire(claim, now, wall_clock_ns() // 1000, queue=queue, dead=self._presence.dead)
        if granted:
            self._store.held[request.name] = request.owner, ledger.until
            return Grant(request.name, request.owner, ledger.token, request.ttl), None, wake
        holder = ledger.holder
        busy = Busy(ledger.retry_after(now), owner=None if holder is None else holder.owner)
        return busy, _before(ledger, request.owner, self._presence.dead) if queue else None, wake

    def _prepare_place(self, request: Request) -> None:
        """Have a watcher if possible, so that the next look takes a place in the queue."""
        pause = POLL_MIN if request.state is None else request.state.pause
        self._leave_place(request)
        client = self._presence.client
        with self._mutex:
            if self._watcher is None and self._now() >= self._watch_at and client is not None:
                try:
                    self._watcher, failed = self._watch(client), None
                except OSError as error:
                    failed = error
            else:
                failed = None
        if failed is not None:
            self._poll(failed)
        self._make_place(request, pause)

    def _make_place(self, request: Request, pause: float = POLL_MIN) -> None:
        request.wake.clear()
        request.state = _Place(self._watcher, pause)
        self._waiting[request.owner] = request

    def _watch(self, client: Client) -> Watcher:
        from lockkit.backends.file.wakeup import Watcher  # noqa: PLC0415 - ctypes, only for who waits

        return Watcher(self._runtime, self._directory, client, self._waiting, self._concerns)

    def _wakes(self, place: _Place) -> bool:
        """Tell whether a request with this place is woken, or polls because nothing can wake it for now."""
        watcher = place.watcher
        if watcher is not self._watcher:
            return False
        if watcher is None:
            return self._now() < self._watch_at
        try:
            if watcher.listen():
                return True
        except RuntimeError as error:  # no more threads
            self._poll(error)
        else:
            self._forget_watcher(watcher)
        return False

    def _follow(self, owner: str, place: _Place, client_id: str) -> bool:
        """Watch for the end of the client before us; False if it has ended already."""
        place.before = client_id
        try:
            return place.watcher is None or place.watcher.follow(owner, client_id)
        except OSError as error:
            self._poll(error)  # too many watches
            return False

    def _poll(self, error: Exception) -> None:
        """Have all requests poll for a while: nothing can wake them."""
        log.info(
            "waiters at %s look every %g s for the next %g s, inotify cannot be used: %s",
            self._url, POLL_MAX, WATCH_AGAIN_SECONDS, error,
        )  # fmt: skip
        self._watch_at = self._now() + WATCH_AGAIN_SECONDS
        watcher = self._watcher
        if watcher is not None:
            self._forget_watcher(watcher)
            watcher.retire()

    def _forget_watcher(self, watcher: Watcher) -> None:
        with self._mutex:
            if self._watcher is watcher:
                self._watcher = None

    def _leave_place(self, request: Request) -> None:
        place, request.state = request.state, None
        self._waiting.pop(request.owner, None)
        if place is not None and place.watcher is not None:
            place.watcher.unfollow(request.owner)

    def _concerns(self, request: Request) -> bool:
        """Tell, by a look at the record without its flock, whether a poke may be about this request."""
        place = request.state
        ledger = self._store.peek(request.name)
        if place is None or ledger is None or ledger.holder is None:
            return True
        before = _before(ledger, request.owner, _never)
        return before is None or before.client != place.before

    async def wait(self, request: Request, busy: Busy, until: float) -> None:
        """See `LockBackend.wait`."""
        place: _Place | None = request.state
        if place is not None and place.watcher is None:
            until = min(until, self._runtime.now() + place.pause * self._runtime.random.uniform(0.5, 1.0))
            place.pause = min(place.pause * 2, POLL_MAX)
        await super().wait(request, busy, until)

    async def abandon(self, request: Request) -> None:
        """See `LockBackend.abandon`."""
        if (request.state is None and not request.uncertain) or self._closed:
            return
        wake = await self._store.transact(request.name, _strike, request, create=False, answer_by=request.answer_by)
        self._leave_place(request)
        self._store.let_go(request.name, request.owner)
        self._poke(wake)

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """See `LockBackend.renew`."""
        outcomes: list[Renewal] = []
        patience = RENEW_PATIENCE
        for index, grant in enumerate(grants):
            if index % 64 == 63:  # noqa: PLR2004 - some half millisecond
                await self._runtime.sleep(0)  # thousands of leases must not stop an event loop
            began = self._runtime.now()
            try:
                renewal = await self._store.transact(
                    grant.name, self._prolong, grant, create=False, answer_by=began + patience
                )
            except (BackendUnavailable, ConfigurationError) as error:
                renewal = Unknown(error)
                patience = max(0.0, patience - (self._runtime.now() - began))
            outcomes.append(renewal)
        return outcomes

    def _prolong(self, ledger: Ledger[FileClaim], now: float, grant: Grant) -> Renewal:
        client = self._presence.client
        assert client is not None
        client.allow(grant.ttl)
        client.touch(now)
        reason = ledger.renew(grant.owner, grant.ttl, now)
        if reason is not None:
            self._store.let_go(grant.name, grant.owner)
            return Gone(reason)
        holder = ledger.holder
        assert holder is not None
        if holder.client != client.id:
            # Our former client file was removed by somebody, and with it our sign of life.
            ledger.holder = holder._replace(client=client.id)
        self._store.held[grant.name] = grant.owner, ledger.until
        return Renewed()

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        """See `LockBackend.release`."""
        answer = self._store.quick(grant.name, _give_back, grant)
        if answer is None:
            answer = await self._store.transact(grant.name, _give_back, grant, create=False, answer_by=answer_by)
        ours, wake = answer
        self._store.let_go(grant.name, grant.owner)
        if wake:
            self._poke(wake)
        return ours

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        """See `LockBackend.release_all`. What another process has flocked comes last, and holds up nothing else."""
        stuck = []
        for grant in grants:
            try:
                await self.release(grant, -inf)
            except LockError:
                stuck.append(grant)
        await super().release_all(stuck, answer_by)

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `LockBackend.holders`."""
        return await self._store.transact(name, self._describe, None, create=False)

    def _describe(self, ledger: Ledger[FileClaim], now: float, _: None) -> Sequence[Holder]:
        holder = ledger.holder
        if holder is None or not ledger.held(now, self._presence.dead):
            return []
        waiters = sum(not self._presence.dead(waiter) for waiter in ledger.queue)
        return [Holder(holder.owner, ledger.token, ledger.until - now, decode_metadata(holder.metadata), waiters)]

    async def break_lock(self, name: str) -> bool:
        """See `LockBackend.break_lock`. Mends a damaged record too, which counts as a lock that was held."""
        broken, wake = await self._store.transact(name, self._break, None, create=False, forced=True)
        self._poke(wake)
        return broken

    def _break(self, ledger: Ledger[FileClaim], now: float, _: None) -> tuple[bool, Sequence[FileClaim]]:
        return ledger.break_lock(now, self._presence.dead)

    async def ping(self) -> None:
        """See `LockBackend.ping`. Makes the directory if need be."""
        try:
            self._presence.enter()
        except LockError as error:
            self._store.about(error, None)
            raise
        except OSError as error:
            raise self._store.about(explain(error, self._directory.path), None) from error

    async def close(self) -> None:
        """See `LockBackend.close`. Goes on where an earlier call was cancelled."""
        try:
            await self._leave_queues()
        finally:
            # From here on nothing waits: a cancelled call must not leave the client file flocked.
            stopped = None if self._watcher is None else self._watcher.retire()
            self._closed = True
            self._presence.leave()
            self._store.clear()
        if stopped is not None:
            await stopped.wait(CLOSE_PATIENCE)

    async def _leave_queues(self) -> None:
        """Strike the requests that wait. What cannot be struck in time goes with our client file."""
        answer_by = self._now() + CLOSE_PATIENCE
        for request in list(self._waiting.values()):
            request.answer_by = answer_by
            try:
                await self.abandon(request)
            except LockError as error:
                log.debug("closing %s: %s", self._url, error)

    def __del__(self) -> None:
        """Do not seem to live when nobody uses this any more."""
        if hasattr(self, "_closed"):
            self._presence.forget()
            self._store.clear()

    def forked(self) -> None:
        """Drop what belongs to the parent: our copy of its client file would keep it "alive" after its death."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.forget()
        self._mutex = threading.Lock()
        self._waiting.clear()
        self._presence.forget()
        self._store.clear()

    def _poke(self, claims: Sequence[FileClaim]) -> None:
        """Wake waiters: our own directly, those of other clients through their client files."""
        for claim in claims:
            request = self._waiting.get(claim.owner)
            if request is not None:
                request.wake.set()
            elif claim.client:
                poke(self._directory, claim.client)

    def _superseded(self) -> None:
        """Start anew after somebody removed our client file, or the whole directory."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.retire()
        self._store.reopen()
        for request in list(self._waiting.values()):
            request.wake.set()


class _Place:
    """
    What a waiting request keeps.

    Attributes:
        watcher: Who wakes it; None if it polls.
        before: The client before it in the queue.
        pause: How long it sleeps between two looks if it polls, seconds.
    """

    __slots__ = ("before", "pause", "watcher")

    def __init__(self, watcher: Watcher | None, pause: float) -> None:
        self.watcher = watcher
        self.before = ""
        self.pause = pause


_backends: weakref.WeakSet[FileBackend] = weakref.WeakSet()


def _before(ledger: Ledger[FileClaim], owner: str, dead: Callable[[FileClaim], bool]) -> FileClaim | None:
    """Find whose end a waiter must hear of: that of the one before it; for the first two that of the holder."""
    before = ledger.predecessor(owner, dead)
    # The first may be stopped when the holder dies. When the first dies instead, the second is woken by the release.
    return ledger.holder if ledger.holder is not None and before in ledger.queue[:1] else before


def _never(claim: FileClaim) -> bool:
    del claim
    return False


def _give_back(ledger: Ledger[FileClaim], now: float, grant: Grant) -> tuple[bool, Sequence[FileClaim]]:
    return ledger.release(grant.owner, now)


def _strike(ledger: Ledger[FileClaim], now: float, request: Request) -> Sequence[FileClaim]:
    return ledger.abandon(request.owner, now)


def _after_fork() -> None:
    for backend in list(_backends):
        backend.forked()


in_forked_child(_after_fork)
