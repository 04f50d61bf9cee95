"""APScheduler in several processes, played by several schedulers with clients of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

import lockkit
from lockkit import aio
from lockkit.errors import ConfigurationError
from lockkit.integrations import apscheduler
from lockkit.integrations.apscheduler import Leadership, leader_only
from lockkit.testing.timing import PATIENCE
from tests.tries import until

RUNS: list[tuple[str, datetime]] = []
TTL = 30.0  # no election is lost because the machine stalls


def job(name: str) -> None:
    """What only one process may do."""
    RUNS.append((name, datetime.now(UTC)))


def ran() -> set[str]:
    """Who has run jobs since the last call."""
    names = {name for name, _ in RUNS}
    RUNS.clear()
    return names


class Process:
    """A scheduler with its client, as each process of an application has them."""

    def __init__(self, name: str, url: str, stack: ExitStack) -> None:
        self.client = stack.enter_context(lockkit.connect(url))
        self.scheduler = BackgroundScheduler(timezone=UTC)
        self.scheduler.add_job(job, "interval", seconds=0.1, args=[name], id="job")
        self.leadership: Leadership | None = None
        stack.callback(self.stop)

    def start(self, *, led: bool = True) -> None:
        """Start it, with the others or regardless of them."""
        if led:
            self.leadership = leader_only(self.scheduler, self.client, "jobs", ttl=TTL)
        self.scheduler.start()

    def stop(self) -> None:
        """End it."""
        if self.scheduler.running:
            self.scheduler.shutdown()

    @property
    def leads(self) -> bool:
        """Whether it may run jobs."""
        return self.leadership is not None and self.leadership.leads


@pytest.fixture
def processes(request: pytest.FixtureRequest) -> Iterator[list[Process]]:
    """Two, not started."""
    RUNS.clear()
    with ExitStack() as stack:
        yield [Process(name, f"memory://{request.node.name}", stack) for name in "ab"]


def test_apscheduler_alone_runs_the_job_in_each_process(processes: list[Process]) -> None:
    """Its own: N processes, N runs."""
    for process in processes:
        process.start(led=False)

    until(lambda: {name for name, _ in RUNS} == {"a", "b"})


def test_only_the_leader_runs_jobs(processes: list[Process]) -> None:
    """And when it is shut down, another one does."""
    for process in processes:
        process.start()
    until(lambda: len(RUNS) > 3)
    leader, standby = sorted(processes, key=lambda process: not process.leads)
    assert [leader.leads, standby.leads] == [True, False]
    assert len(ran()) == 1

    leader.stop()
    ran()
    until(lambda: len(RUNS) > 1)
    assert [leader.leads, standby.leads] == [False, True]
    assert len(ran()) == 1


def test_leader_that_lost_the_election_runs_no_job(processes: list[Process]) -> None:
    """It looks at its deadline before it looks for jobs; then it campaigns again."""
    leader, operator = processes
    leader.start()
    until(lambda: len(RUNS) > 1)

    def taken() -> lockkit.Lease | None:
        """Take the lock from the leader, which campaigns again at once: sometimes it is faster."""
        operator.client.break_lock("jobs")
        return operator.client.lock("jobs").try_acquire()

    with until(taken):
        until(lambda: not leader.leads)
        assert leader.scheduler._process_jobs() is None
    until(lambda: leader.leads)
    ran()
    until(lambda: len(RUNS) > 1)


def test_new_leader_runs_nothing_that_was_due_before(
    processes: list[Process], caplog: pytest.LogCaptureFixture
) -> None:
    """Its own memory does not say what the old leader has run. It tells of jobs that are gone."""
    first, second = processes
    first.start()
    until(lambda: first.leads)
    soon = datetime.now(UTC) + timedelta(seconds=0.1)
    for trigger in (
        DateTrigger(soon),
        IntervalTrigger(hours=1, start_date=soon),
        IntervalTrigger(seconds=0.1, start_date=soon, end_date=soon),
        OrTrigger([DateTrigger(soon), IntervalTrigger(hours=1)]),
    ):
        # Given, or a scheduler that starts after that time would ask the trigger for the time after that.
        second.scheduler.add_job(job, trigger, args=["late"], misfire_grace_time=None, next_run_time=soon)
    second.start()
    until(lambda: datetime.now(UTC) > soon)

    first.stop()
    until(lambda: any(name == "b" for name, _ in RUNS))

    assert "late" not in ran()
    triggers = sorted(found.trigger.__class__.__name__ for found in second.scheduler.get_jobs())
    assert triggers == ["IntervalTrigger", "IntervalTrigger", "OrTrigger"]
    told = [one.getMessage() for one in caplog.records if (one.name, one.levelname) == ("lockkit", "WARNING")]
    assert sorted(text.partition("[")[0] for text in told) == [
        "election 'jobs': dropped the overdue job: job (trigger: date",
        "election 'jobs': dropped the overdue job: job (trigger: interval",
    ]


def test_shared_job_store_is_caught_up(tmp_path: Path) -> None:
    """It says what is overdue, and a new leader runs that."""
    RUNS.clear()
    with lockkit.connect("memory://shared") as client:
        scheduler = BackgroundScheduler(
            timezone=UTC, jobstores={"default": SQLAlchemyJobStore(f"sqlite:///{tmp_path / 'jobs.db'}")}
        )
        scheduler.add_job(job, "date", run_date=datetime.now(UTC), args=["late"], misfire_grace_time=None)
        with client.lock("jobs"):
            leader_only(scheduler, client, "jobs", ttl=TTL, shared_jobstore=True)
            scheduler.start()
        # Not in the middle: APScheduler's thread fails if the scheduler is shut down while it removes a job.
        until(lambda: RUNS and not scheduler.get_jobs())
        scheduler.shutdown()
    assert ran() == {"late"}


class Broken(MemoryJobStore):  # type: ignore[misc] # apscheduler has no types
    """A job store whose database is away once."""

    failures = 1

    def get_all_jobs(self) -> list[object]:
        """Fail, or answer."""
        if self.failures:
            self.failures -= 1
            raise OSError("the database is away")
        found: list[object] = super().get_all_jobs()
        return found


def test_job_store_that_fails_ends_no_campaign(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process resigns, and leads again once its store answers."""
    RUNS.clear()
    monkeypatch.setattr(apscheduler, "AGAIN_SECONDS", 0.01)
    with lockkit.connect("memory://broken") as client:
        scheduler = BackgroundScheduler(timezone=UTC, jobstores={"default": Broken()})
        scheduler.add_job(job, "interval", seconds=0.05, args=["a"])
        leader_only(scheduler, client, "jobs", ttl=TTL)
        scheduler.start()
        until(lambda: RUNS)
        scheduler.shutdown()
    assert "the database is away" in caplog.text


def test_asyncio_scheduler_runs_jobs_in_its_loop() -> None:
    """The campaign has a thread of its own, which blocks no event loop."""

    async def set_event(event: asyncio.Event) -> None:
        event.set()

    async def main() -> None:
        with lockkit.connect("memory://loop") as client:
            scheduler = AsyncIOScheduler(timezone=UTC)
            done = asyncio.Event()
            scheduler.add_job(set_event, "interval", seconds=0.05, args=[done])
            leader_only(scheduler, client, "jobs", ttl=TTL)
            scheduler.start()
            await asyncio.wait_for(done.wait(), PATIENCE)
            scheduler.shutdown()
            await asyncio.sleep(0)

    asyncio.run(main())


def test_unreachable_lock_server_runs_no_job(caplog: pytest.LogCaptureFixture) -> None:
    """The process cannot know whether it leads; it says so, and tries again."""
    RUNS.clear()
    with lockkit.connect("redis://127.0.0.1:1/0", unavailable_after=0.2) as client:
        scheduler = BackgroundScheduler(timezone=UTC)
        scheduler.add_job(job, "interval", seconds=0.05, args=["a"])
        leader_only(scheduler, client, "jobs")
        with caplog.at_level(logging.ERROR, "lockkit"):
            scheduler.start()
            until(lambda: "runs no jobs" in caplog.text)
        scheduler.shutdown()
    assert ran() == set()


def test_running_scheduler_is_refused() -> None:
    """Its jobs may have run already."""
    scheduler = BackgroundScheduler(timezone=UTC)
    scheduler.start()
    with lockkit.connect("memory://") as client, pytest.raises(ConfigurationError, match="before"):
        leader_only(scheduler, client)
    scheduler.shutdown()


def test_second_leadership_of_a_scheduler_is_refused() -> None:
    """Its campaign would be against the first one, and no process would run a job."""
    scheduler = BackgroundScheduler(timezone=UTC)
    with lockkit.connect("memory://") as client:
        leader_only(scheduler, client)
        with pytest.raises(ConfigurationError, match="called twice"):
            leader_only(scheduler, client)


def test_client_of_the_asyncio_api_is_refused() -> None:
    """Its campaign is a coroutine, which the thread of the campaign could not run."""

    async def main() -> None:
        async with aio.connect("memory://") as client:
            with pytest.raises(ConfigurationError, match=r"lockkit\.connect\(\)"):
                leader_only(AsyncIOScheduler(timezone=UTC), client)  # type: ignore[arg-type]

    asyncio.run(main())
