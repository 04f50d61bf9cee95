"""
What a client tells: events to observers (see `lockkit.observers`), and log lines about many leases or calls at once.

An outage hits every lease of a client at the same moment, and a log handler may take milliseconds for a line. So
renewals, the watch and acquisitions only note here what has happened. A separate coroutine counts and logs it: the
first line at once, the rest of the same outage together, at growing intervals.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, TypeVar, cast

from lockkit import observers
from lockkit.backend import Grant, Mode, split_space
from lockkit.background import Background
from lockkit.engine.client_state import ClientState
from lockkit.engine.lease_record import HELD, LeaseRecord
from lockkit.engine.settings import LockSettings
from lockkit.errors import BackendUnavailable, LockTimeout
from lockkit.observers import Call, LockEvent
from lockkit.runtime import wall_clock
from lockkit.units import Instant, Seconds
from lockkit.validation import plain

log = logging.getLogger("lockkit")

L = TypeVar("L")


class ObservedCall:
    """A call that acquires while there are observers."""

    def __init__(self, client: ClientState, settings: LockSettings) -> None:
        """Start the clock."""
        self._client = client
        self._settings = settings
        self._began = client.runtime.now()
        self._waits = False

    def waits(self) -> None:
        """Tell the observers, once, that the call waits."""
        if not self._waits:
            self._waits = True
            observers.post("waiting", self._event())

    async def follow(self, call: Awaitable[L], leave: Callable[[LeaseRecord, BaseException], Awaitable[None]]) -> L:
        """Await the call, and tell the observers how it ended."""
        try:
            lease = await call
        except BaseException as error:
            await self._refused(error)
            raise
        record: LeaseRecord = cast("Any", lease)._record  # noqa: SLF001 - made by make_lease
        grant = record.grant
        try:
            await observers.tell(self._client.runtime, "granted", self._event(grant.token, grant.owner))
        except BaseException as error:  # cancelled or interrupted meanwhile
            await leave(record, error)
            raise
        return lease

    async def _refused(self, error: BaseException) -> None:
        """Tell the observers why the call does not get the lock."""
        if isinstance(error, LockTimeout):
            reason = "busy"
        elif isinstance(error, BackendUnavailable):
            reason = "unavailable"
        else:
            reason = "error" if isinstance(error, Exception) else "cancelled"
        event = self._event(reason=reason)
        if reason == "cancelled":
            observers.post("refused", event)
        else:
            await observers.tell(self._client.runtime, "refused", event)

    def _event(self, token: int | None = None, owner: str | None = None, reason: str | None = None) -> LockEvent:
        client, settings = self._client, self._settings
        waited = client.runtime.now() - self._began
        name = split_space(settings.name)[1]
        return LockEvent(
            name, settings.label, client.url, settings.mode, token, owner, waited, None, reason, wall_clock(),
            self._waits,
        )  # fmt: skip


def of_lease(record: LeaseRecord, reason: str | None = None, late: Seconds | None = None) -> LockEvent:
    """Make the event of a lease."""
    grant, client = record.grant, record.client
    name, mode = public(client, grant.name, record.mode)
    held = client.runtime.now() - record.since
    assert held >= 0.0, "counted from before the request"
    return LockEvent(
        name, record.settings.label, client.url, mode, grant.token, grant.owner, None, held, reason, wall_clock(),
        late=late,
    )  # fmt: skip


def post(call: Call, record: LeaseRecord, reason: str | None = None, late: Seconds | None = None) -> None:
    """Hand an event of a lease to the observers without waiting for them. Never under the mutex."""
    if observers.active is not None:
        observers.post(call, of_lease(record, reason, late))


def undone(client: ClientState, settings: LockSettings, owner: str) -> None:
    """Tell the observers that a request has been withdrawn."""
    if observers.active is not None:
        name, mode = public(client, settings.name, settings.mode)
        event = LockEvent(name, settings.label, client.url, mode, None, owner, None, None, None, wall_clock())
        observers.post("undone", event)


def public(client: ClientState, name: str, mode: Mode) -> tuple[str, Mode]:
    """Return name and mode as the application knows them: where each slot is a lock, those of the semaphore."""
    space, plain = split_space(name)
    if space == "sem" and client.capabilities.permits == "slots":
        assert "#" in plain, "each slot is a lock of its own, named by `slot_name`"
        return plain.rpartition("#")[0], "permit"
    return plain, mode


GATHER_SECONDS = 0.1
"""How long notes are gathered before the first line, seconds. Longer logs late; shorter counts only a part, and writes
another line for the rest."""

PAUSE = 1.0
"""Seconds between two looks at what has been noted. Longer tells later that an outage is over."""

PAUSE_MAX = 60.0
"""Longest time between lines about the same, seconds; it begins with `PAUSE` and doubles. Longer hides how an outage
goes on; shorter writes more lines about it."""

NAMES_MAX = 3
"""How many locks a line names. More makes lines too long to read."""

Kind = Literal["jeopardy", "lost", "acquire", "release", "other"]


@dataclass(slots=True)
class _Tally:
    """What has been noted about one cause."""

    text: str
    count: int = 0
    names: list[str] = field(default_factory=list)
    deadline: Instant = inf

    def add(self, lock: Grant | str, deadline: Instant) -> None:
        self.count += 1
        self.deadline = min(self.deadline, deadline)
        if len(self.names) < NAMES_MAX:
            self.names.append(repr(lock) if isinstance(lock, str) else f"{lock.name!r} (token {lock.token})")

    def __str__(self) -> str:
        """Name the locks."""
        if self.count == 1:
            return f"lock {self.names[0]}"
        return f"{self.count} locks ({', '.join(self.names)}{', ...' if self.count > len(self.names) else ''})"


@dataclass(slots=True)
class _Outage:
    """Unanswered renewals, from the first one until no lease waits for one any more."""

    since: Instant
    held: int = 0
    causes: set[str] = field(default_factory=set)
    renewed: int = 0
    lost: int = 0


class Report:
    """
    The lines about the leases and calls of one client.

    All notes go through a deque, which is atomic: any thread may append one, with or without the client's mutex.
    """

    def __init__(self, client: ClientState, leases: Callable[[], Sequence[LeaseRecord]]) -> None:
        """Start nothing yet; `leases` returns all that the client holds."""
        self._client = client
        self._leases = leases
        self._background = Background(client.runtime, "lockkit-log", self._work)
        self.forked()

    def forked(self) -> None:
        """Forget what has been noted: it is the parent's."""
        self._noted: deque[tuple[Kind, str, str, Grant | str, Instant]] = deque()
        self._outage: _Outage | None = None
        self._unreleased_until = 0.0
        self._written = self._client.runtime.event()
        self._written.set()
        self._failing: tuple[Instant, int] | None = None  # since when calls are not answered, and how many
        self._background.forked()

    # -- noted by the others, never under the mutex ----------------------------------------------------------------

    def jeopardy(self, failed: Iterable[tuple[LeaseRecord, BaseException]]) -> None:
        """Note leases whose renewals have begun to fail."""
        outage = self._outage
        if outage is None:
            outage = self._outage = _Outage(self._client.runtime.now())
        outage.held = max(outage.held, len(self._leases()))
        for record, error in failed:
            self._noted.append(("jeopardy", str(error), str(error), record.grant, record.valid_until))
        self._write()

    def renewed_again(self, count: int) -> None:
        """Note leases whose renewals work again."""
        if self._outage is not None:
            self._outage.renewed += count

    def lost(self, record: LeaseRecord, reason: str, text: str) -> None:
        """Note a lost lease; `text` says why."""
        if self._outage is not None and record.renewal.in_jeopardy:
            self._outage.lost += 1
        self._noted.append(("lost", reason, text, record.grant, inf))
        self._write()

    def unanswered(self, name: str, error: BaseException) -> None:
        """Note a call that got no answer, and goes on trying to acquire a lock."""
        if self._failing is not None:
            self._failing = (self._failing[0], self._failing[1] + 1)
            log.debug("acquiring lock %r: %s; lockkit retries", name, error)
            return
        self._failing = (self._client.runtime.now(), 1)
        self._noted.append(("acquire", str(error), str(error), name, inf))
        self._write()

    def answered(self) -> None:
        """Note that a call has been answered."""
        if self._failing is not None:
            (since, count), self._failing = self._failing, None
            seconds = self._client.runtime.now() - since
            self.later("%s answers again after %.1f s; calls that had failed: %d", self._client.url, seconds, count)

    def unreleased(self, record: LeaseRecord, error: BaseException) -> None:
        """Log a lease that was not released at the end of its block: the first at once, those that follow together."""
        now = self._client.runtime.now()
        if now >= self._unreleased_until:
            self._unreleased_until = now + PAUSE
            seconds = round(max(record.grant.ttl, record.min_hold_left), 1)
            log.warning("%s; lockkit retries, and the backend frees the lock within %g s", error, seconds)
            return
        cause = str(error.__cause__ or error)
        self._noted.append(("release", cause, cause, record.grant.name, inf))
        self._write()

    def later(self, message: str, *arguments: object) -> None:
        """Note a line; of several of the same message that come close together, the first is written."""
        self._noted.append(("other", message, message % arguments, "", inf))
        self._write()

    def _write(self) -> None:
        self._background.wake()
        try:
            self._background.start()
        except RuntimeError:  # no more threads, or the event loop has ended
            self.flush()

    # -- written -----------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        client, pause, write_at = self._client, PAUSE, 0.0
        try:
            await client.sleep(GATHER_SECONDS)
            while True:
                self._background.clear()
                now = client.runtime.now()
                if self._noted and (now >= write_at or client.closed):
                    self._written.clear()
                    self.flush()
                    self._written.set()
                    write_at, pause = now + pause, min(2 * pause, PAUSE_MAX)
                self._end_outage()
                if not self._noted and (client.closed or (self._outage is None and now >= write_at)):
                    return
                await client.sleep(PAUSE)
        finally:
            self.flush()  # also if this is cancelled: the event loop ends
            self._written.set()

    async def end(self, seconds: Seconds) -> None:
        """Have everything written, by the coroutine that may be writing for at most so many seconds, or here."""
        await self._written.wait(max(0.0, seconds))
        self.flush()

    def flush(self) -> None:
        """Write what has been noted."""
        tallies: dict[tuple[Kind, str], _Tally] = {}
        for _ in range(len(self._noted)):
            try:
                kind, cause, text, lock, deadline = self._noted.popleft()
            except IndexError:
                break  # another thread writes it
            tallies.setdefault((kind, cause), _Tally(text)).add(lock, deadline)
        for (kind, cause), tally in tallies.items():
            self._log(kind, cause, tally)

    def _log(self, kind: Kind, cause: str, tally: _Tally) -> None:
        url, text = self._client.url, plain(tally.text)
        if kind == "lost":
            log.warning("lost %s at %s: %s", tally, url, text)
        elif kind == "acquire":
            log.warning("acquiring %s at %s: %s; lockkit retries, and says when it is answered", tally, url, text)
        elif kind == "release":
            log.warning("could not release %s at %s: %s; lockkit retries, and the ttl frees it", tally, url, text)
        elif kind == "other":
            log.warning("%s%s", text, f" (and {tally.count - 1} more of the same)" if tally.count > 1 else "")
        elif (outage := self._outage) is not None and cause not in outage.causes:
            outage.causes.add(cause)
            left = max(0.0, tally.deadline - self._client.runtime.now())
            log.warning(
                "renewal of %s of %d held at %s failed, %.3f s to %s deadline; lockkit retries: %s",
                tally, outage.held, url, left, "the nearest" if tally.count > 1 else "its", text,
            )  # fmt: skip

    def _end_outage(self) -> None:
        """Say that an outage is over, once no lease waits for a renewal any more."""
        outage = self._outage
        if outage is None or self._noted:
            return  # first the lines about it
        if any(record.renewal.in_jeopardy and record.state is HELD for record in self._leases()):
            return
        self._outage = None
        log.warning(
            "renewals at %s %s after %.1f s: %d renewed again, %d lost",
            self._client.url, "work again" if outage.renewed else "have ended",
            self._client.runtime.now() - outage.since, outage.renewed, outage.lost,
        )  # fmt: skip
