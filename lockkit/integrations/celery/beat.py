"""
Several beats of Celery may run: one leads and sends, the others stand by.

An election alone does not prevent a tick from being sent twice. A new leader does not know what the old one has sent,
and a leader that was paused between its last check and the broker does not know that it was replaced. So beat marks
each due time in the lock server before it sends the task (`lockkit.Client.once`, by entry and due time), and only the
beat that made the mark sends it. All beats must agree on due times: those of a crontab are the same everywhere, and
those of an interval are counted from the epoch here, not from the start of the process.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery, schedules
from celery.beat import PersistentScheduler, ScheduleEntry, event_t

from lockkit.errors import ConfigurationError, LockError, LockTimeout
from lockkit.integrations.celery.task import refuse_other_settings
from lockkit.integrations.jobs import client_of_process
from lockkit.sync.election import Election, Term
from lockkit.units import Seconds

__all__ = ["LeaderOnly", "LeaderScheduler"]

log = logging.getLogger("lockkit")

STANDBY_SECONDS: Seconds = 1.0
"""How often a standby tries to lead, seconds. Longer leaves the schedule without a leader for longer; shorter asks the
lock server more often."""

KEEP_SECONDS: Seconds = 24 * 3600.0
"""How long a mark outlives the due time after it, seconds: far more than the clocks of two beats differ."""

ENTRY_BYTES_MAX = 128
"""Longer names of entries go into the mark's key as a digest: a key has at most 255 bytes."""

WINDOWS = (timedelta(hours=1), timedelta(days=1), timedelta(days=32), timedelta(days=366))
"""How far to look back for the last due time, so that a schedule last run months ago does not take minutes."""


class LeaderOnly:
    """
    Mix this into a scheduler of celery beat, before the scheduler class: it sends only while it leads.

    Settings of the app: ``lockkit_url`` (the lock server, which must keep notes: ``capabilities.notes``),
    ``lockkit_beat_name`` (of the election; by default ``celery-beat:`` and the app's name) and ``lockkit_beat_ttl``
    (seconds until another beat can lead after the leader was killed).
    """

    app: Celery
    schedule: dict[str, Any]
    max_interval: Seconds
    _heap: list[Any] | None

    _term: Term | None = None
    _unknown = False
    _refused = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """
        As the scheduler.

        Raises:
            ConfigurationError: A setting of the app is lockkit's by its name, but misspelt.
        """
        self._due: dict[str, tuple[datetime, Seconds]] = {}
        super().__init__(*args, **kwargs)
        refuse_other_settings(self.app)

    @property
    def election_name(self) -> str:
        """Name of the election."""
        name: str = self.app.conf.get("lockkit_beat_name") or f"celery-beat:{self.app.main or 'celery'}"
        return name

    # -- leading -----------------------------------------------------------------------------------------------------

    def tick(self, *args: Any, **kwargs: Any) -> Seconds:
        """Send what is due, if this beat leads. Returns the seconds until the next check."""
        term = self._leading()
        if term is None:
            return min(self.max_interval, STANDBY_SECONDS)
        self._refused = False
        pause: Seconds = super().tick(*args, **kwargs)  # type: ignore[misc] # of the scheduler
        # Do not sleep through the end of the term; after a refusal, do not ask again at once.
        return STANDBY_SECONDS if self._refused else min(pause, max(term.grace, STANDBY_SECONDS))

    def _leading(self) -> Term | None:
        """Return the term if this beat leads or was just elected; None if it does not lead, or cannot know."""
        if self._term is not None and self._term.must_stop():
            self._resign()
        if self._term is not None:
            return self._term
        try:
            self._term = self._election().campaign(timeout=0)
        except ConfigurationError:
            raise
        except LockTimeout as error:
            log.debug("beat stands by: %s", error)
            self._unknown = False
        except LockError as error:
            level = logging.DEBUG if self._unknown else logging.ERROR
            log.log(level, "beat sends nothing, because it cannot lead: %s", error)
            self._unknown = True
        else:
            log.info("beat leads election %r in term %d", self.election_name, self._term.token)
            self._unknown = False
            self._heap = None  # check all entries again
        return self._term

    def _election(self) -> Election:
        client = client_of_process(self.app.conf.get("lockkit_url"))
        if not client.capabilities.notes:
            message = (
                f"lock server {client.url} keeps no notes, which beat needs to mark what it has sent: set lockkit_url "
                "to one with capabilities.notes, for example a single Redis or a database's lock table"
            )
            raise ConfigurationError(message, name=self.election_name, backend=client.url)
        return client.election(self.election_name, ttl=self.app.conf.get("lockkit_beat_ttl"))

    def _resign(self) -> None:
        term, self._term = self._term, None
        if term is None:
            return
        try:
            term.resign()
        except LockError as error:
            log.warning("beat leads no longer: %s", error)

    def close(self) -> None:
        """Let another beat lead, and close the scheduler."""
        self._resign()
        super().close()  # type: ignore[misc] # of the scheduler

    # -- due times ---------------------------------------------------------------------------------------------------

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        """Order the entries by their due times as `is_due` sees them."""
        super().populate_heap(*args, **kwargs)  # type: ignore[misc] # of the scheduler
        self._heap = sorted(self._on_grid(event) for event in self._heap or [])

    def _on_grid(self, event: event_t) -> event_t:
        if _grid(event.entry, self.app.now()) is None or not _asks_schedule(event.entry):
            return event
        due, pause = self.is_due(event.entry)
        return event._replace(time=self._when(event.entry, 0 if due else pause) or 0)  # type: ignore[attr-defined]

    def is_due(self, entry: ScheduleEntry) -> tuple[bool, Seconds]:
        """Tell whether an entry is due, and in how many seconds to check it again."""
        now = self.app.now().astimezone(UTC)
        grid = _grid(entry, now)
        if grid is not None and _asks_schedule(entry):
            last, pause = grid
            is_due = last > _last_run(entry)
        else:
            is_due, pause = super().is_due(entry)  # type: ignore[misc] # of the scheduler
            last = now
            if is_due:  # an interval then counts from the last run, which is another one in each beat
                last = _last_due(entry, now, self.app) if grid is None else grid[0]
        if is_due:
            self._due[entry.name] = last, pause
        return is_due, pause

    # -- sending -----------------------------------------------------------------------------------------------------

    def apply_entry(self, entry: ScheduleEntry, producer: object = None) -> None:
        """Send the task of a due entry, unless its due time is marked already."""
        due, pause = self._due.pop(entry.name, (self.app.now(), 0.0))
        try:
            marked = self._mark(entry, due, pause)
        except LockError as error:
            log.warning("beat did not send %r, due at %s: %s", entry.name, due.isoformat(), error)
            self.schedule[entry.name] = entry  # its due time is not over
            self._heap, self._refused = None, True
            return
        if not marked:
            log.info("beat did not send %r: another beat has already sent it for %s", entry.name, due.isoformat())
            return
        options = entry.options
        headers = {**(options.get("headers") or {}), "lockkit_due": due.astimezone(UTC).isoformat()}
        entry.options = {**options, "headers": headers}
        try:
            super().apply_entry(entry, producer=producer)  # type: ignore[misc] # of the scheduler
        finally:
            entry.options = options

    def _mark(self, entry: ScheduleEntry, due: datetime, pause: Seconds) -> bool:
        """Mark a due time as sent; False if it was before."""
        name = self.election_name
        client = client_of_process(self.app.conf.get("lockkit_url"))
        key = f"{name}:{_short(entry.name)}:{due.astimezone(UTC).isoformat(timespec='milliseconds')}"
        keep = max(pause, 0.0) + KEEP_SECONDS
        with client.once(key, keep=keep, ttl=self.app.conf.get("lockkit_beat_ttl"), timeout=0) as attempt:
            if not attempt.first:
                return False
            term = self._term
            if term is None or term.must_stop():
                raise LockError(f"this beat does not lead election {name!r} any longer", name=name, backend=client.url)
            attempt.done({"term": term.token})
        return True


class LeaderScheduler(LeaderOnly, PersistentScheduler):  # type: ignore[misc] # celery has no types
    """Celery's own scheduler, sending only while it leads: ``celery -A app beat -S lockkit.integrations.celery...``."""


def _short(name: str) -> str:
    raw = name.encode()
    return name if len(raw) <= ENTRY_BYTES_MAX else hashlib.sha256(raw).hexdigest()


# Times are compared and subtracted in UTC: between two times of one zone, Python ignores that its clocks were changed.


def _last_run(entry: ScheduleEntry) -> datetime:
    last_run: datetime = entry.schedule.maybe_make_aware(entry.last_run_at)
    return last_run.astimezone(UTC)


def _asks_schedule(entry: ScheduleEntry) -> bool:
    """Tell whether its schedule alone says when it is due: entries of other packages may be switched off."""
    return type(entry).is_due is ScheduleEntry.is_due


def _grid(entry: ScheduleEntry, now: datetime) -> tuple[datetime, Seconds] | None:
    """Last due time of an interval and the seconds to the next, counted from the epoch; None for other schedules."""
    schedule: Any = entry.schedule
    if type(schedule) is not schedules.schedule:
        return None
    every: Seconds = schedule.run_every.total_seconds()
    if every <= 0:
        return None
    count, since = divmod(now.timestamp(), every)
    return datetime.fromtimestamp(count * every, UTC), every - since


def _last_due(entry: ScheduleEntry, now: datetime, app: Celery) -> datetime:
    """Last due time of a schedule up to now, and after the entry's last run."""
    schedule = copy.copy(entry.schedule)
    schedule.nowfun, schedule.app = lambda: now, app

    def following(time: datetime) -> datetime:
        left: timedelta = schedule.remaining_estimate(time.astimezone(schedule.tz))
        return now + left

    last_run = _last_run(entry)
    due = last_run
    for window in (*WINDOWS, now - last_run):
        due = following(max(last_run, now - window))
        if due <= now:
            break
    while due < (after := following(due)) <= now:
        due = after
    return due
