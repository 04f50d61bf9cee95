"""
Run APScheduler 3 in several processes, only one of which runs the jobs. Needs ``pip install 'lockkit[apscheduler]'``.

APScheduler 3 does not coordinate processes: each runs all jobs. Here the processes elect a leader, and the schedulers
of the others run no jobs.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from apscheduler.events import EVENT_SCHEDULER_SHUTDOWN, EVENT_SCHEDULER_STARTED
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.base import BaseScheduler

from lockkit.errors import ConfigurationError, LockError
from lockkit.sync.client import Client
from lockkit.sync.election import Term
from lockkit.units import Seconds

__all__ = ["Leadership", "leader_only"]

log = logging.getLogger("lockkit")

AGAIN_SECONDS: Seconds = 1.0
"""How long to pause after the lock server could not be asked, seconds."""


def leader_only(
    scheduler: BaseScheduler,
    client: Client,
    name: str = "apscheduler",
    *,
    ttl: Seconds | timedelta | None = None,
    shared_jobstore: bool = False,
) -> Leadership:
    """
    Let a scheduler run jobs only while this process leads. Call this before ``scheduler.start()``.

    The campaign begins when the scheduler starts, and the leader resigns when it is shut down.

    Args:
        scheduler: Any of APScheduler 3, with any job stores and executors.
        client: Of this process.
        name: Of the election; the same in all processes.
        ttl: Seconds until another process can lead after the leader was killed. None: the client's default.
        shared_jobstore: The processes share one persistent job store, which says what has run: a new leader then
            catches up on overdue jobs, according to ``misfire_grace_time``. False: it runs nothing that was due before
            it led, because it does not know what the old leader has run.

    Raises:
        ConfigurationError: The scheduler runs already, or was given to this function before; the client is one of
            `lockkit.aio`; or the name or the ttl is wrong.
    """
    given: object = client
    if not isinstance(given, Client):
        kind = f"{type(given).__module__}.{type(given).__qualname__}"
        message = (
            f"leader_only() takes a client of lockkit.connect(), not {kind}: the campaign has a thread of its own, "
            "also with an AsyncIOScheduler"
        )
        raise ConfigurationError(message, name=name)
    if isinstance(getattr(scheduler._process_jobs, "__self__", None), Leadership):  # noqa: SLF001 - see Leadership
        message = "leader_only() was called twice for one scheduler, whose campaigns would compete: call it once"
        raise ConfigurationError(message, name=name, backend=client.url)
    if scheduler.running:
        message = "leader_only() was called after scheduler.start(): jobs may have run already. Call it before"
        raise ConfigurationError(message, name=name, backend=client.url)
    return Leadership(scheduler, client, name, ttl=ttl, shared_jobstore=shared_jobstore)


class Leadership:
    """Whether the scheduler of this process leads. Made by `leader_only`."""

    def __init__(
        self,
        scheduler: BaseScheduler,
        client: Client,
        name: str,
        *,
        ttl: Seconds | timedelta | None,
        shared_jobstore: bool,
    ) -> None:
        """Watch the scheduler."""
        self._scheduler = scheduler
        self._election = client.election(name, ttl=ttl)
        self._shared_jobstore = shared_jobstore
        self._term: Term | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # What each kind of scheduler calls to look for due jobs; APScheduler 3 has no public place for a condition.
        self._process_jobs = scheduler._process_jobs  # noqa: SLF001
        scheduler._process_jobs = self._process_jobs_if_leading  # noqa: SLF001
        scheduler.add_listener(self._started, EVENT_SCHEDULER_STARTED)
        scheduler.add_listener(self._shut_down, EVENT_SCHEDULER_SHUTDOWN)

    @property
    def leads(self) -> bool:
        """Whether this process leads. Reads the clock, so a leader that was paused for too long notices at once."""
        term = self._term
        return term is not None and not term.must_stop()

    def _process_jobs_if_leading(self) -> Seconds | None:
        """Look for due jobs, or sleep until `_lead` wakes the scheduler up."""
        if not self.leads:
            return None
        pause: Seconds | None = self._process_jobs()
        return pause

    def _started(self, _: object) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._campaign, name="lockkit-apscheduler", daemon=True)
        self._thread.start()

    def _shut_down(self, _: object) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _campaign(self) -> None:
        while not self._stop.is_set():
            try:
                self._election.run(self._lead, self._stop)
            except LockError as error:
                log.error("election %r: the scheduler runs no jobs: %s", self._election.name, error)  # noqa: TRY400 - a sentence says it all
                self._stop.wait(AGAIN_SECONDS)
            except Exception:  # of a job store: it must not end the campaign of this process
                log.exception("election %r: the scheduler runs no jobs", self._election.name)
                self._stop.wait(AGAIN_SECONDS)

    def _lead(self, term: Term) -> None:
        log.info("the scheduler leads election %r in term %d", self._election.name, term.token)
        if not self._shared_jobstore:
            self._forget_overdue()
        self._term = term
        try:
            self._scheduler.wakeup()
            term.must_stop(None)
        finally:
            self._term = None

    def _forget_overdue(self) -> None:
        """Move jobs that were due while another process led to their next times."""
        # In UTC: between two times of one zone, Python ignores that its clocks were changed.
        now = datetime.now(UTC)
        for job in self._scheduler.get_jobs():
            if job.next_run_time is None or job.next_run_time > now:  # None: paused
                continue
            following = job.trigger.get_next_fire_time(None, now)
            if following is not None and following <= now:  # a single date, which may be one of several triggers
                following = job.trigger.get_next_fire_time(now, now)
            with suppress(JobLookupError):  # the application has removed it meanwhile
                if following is None:
                    log.warning("election %r: dropped the overdue job: %s", self._election.name, job)
                    job.remove()
                else:
                    log.info("election %r: moved the overdue job to %s: %s", self._election.name, following, job)
                    job.modify(next_run_time=following)
