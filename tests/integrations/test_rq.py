"""RQ jobs under locks: a real worker over a real Redis."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import redis
from rq import Queue, Retry
from rq.job import Job, JobStatus

import lockkit
from lockkit.errors import LockTimeout
from lockkit.integrations.rq import locked_job
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import RedisServer
from tests.integrations.processes import START_SECONDS
from tests.programs import python_group
from tests.tries import until

COMMAND = """
rq worker --with-scheduler default
"""


@pytest.fixture(scope="module")
def jobs(redis_server: RedisServer) -> Iterator[ModuleType]:
    """The functions, as the sender imports them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKKIT_TEST_REDIS", redis_server.url)
        yield importlib.import_module("tests.integrations.rq_app")
        sys.modules.pop("tests.integrations.rq_app")


@pytest.fixture(scope="module")
def connection(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """To Redis."""
    with redis.Redis.from_url(redis_server.url) as connected:
        yield connected


@pytest.fixture(scope="module")
def queue(
    redis_server: RedisServer, jobs: ModuleType, connection: redis.Redis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Queue]:
    """A queue with two workers that run jobs."""
    log = tmp_path_factory.mktemp("rq") / "log"
    command = ("-m", "rq.cli", *COMMAND.split()[1:], "--url", redis_server.url)
    with ExitStack() as workers:
        for _ in range(2):
            workers.enter_context(python_group(log, *command, LOCKKIT_TEST_REDIS=redis_server.url))
        queue = Queue(connection=connection)
        assert ended(queue.enqueue(jobs.pay, 0), START_SECONDS), log.read_text()
        yield queue


def ended(job: Job, seconds: float = PATIENCE) -> JobStatus:
    """Wait for the end of a job."""
    final = {JobStatus.FINISHED, JobStatus.FAILED}
    status: JobStatus = until(lambda: (found := job.get_status(refresh=True)) in final and found, seconds)
    return status


@pytest.mark.timeout(START_SECONDS + 60)
def test_jobs_of_one_account_run_one_after_the_other(queue: Queue, jobs: ModuleType, connection: redis.Redis) -> None:
    """Two workers, one lock: what is busy is scheduled again. Each process has a client of its own."""
    connection.delete(jobs.EVENTS)
    sent = [queue.enqueue(jobs.pay, 1, 0.3) for _ in range(2)]

    assert [ended(job, START_SECONDS) for job in sent] == [JobStatus.FINISHED] * 2
    returned: list[Any] = sorted((job.return_value() for job in sent), key=str)
    lines: list[Any] = connection.lrange(jobs.EVENTS, 0, -1)
    assert [line.decode() for line in lines] == [f"{what} {n}" for n, *_ in returned for what in ("begin", "end")]
    assert all(pid == maker for _, pid, maker in returned)


@pytest.mark.timeout(START_SECONDS + 60)
def test_rq_alone_runs_two_jobs_of_an_account_at_the_same_time(
    queue: Queue, jobs: ModuleType, connection: redis.Redis
) -> None:
    """Its own: `unique` jobs are those of one id, and these two differ. Each waits until the other one is there."""
    connection.delete(jobs.EVENTS)
    sent = [queue.enqueue(jobs.pay_unlocked, 5, 2) for _ in range(2)]

    assert [ended(job) for job in sent] == [JobStatus.FINISHED] * 2
    assert [job.return_value() for job in sent] == [2, 2]


def test_busy_job_of_a_queue_without_workers_fails(jobs: ModuleType, connection: redis.Redis) -> None:
    """RQ runs no job again that it runs at once: it counted as finished."""
    with lockkit.connect(jobs.URL) as client, client.lock("acct:6"):
        job = Queue("at-once", connection=connection, is_async=False).enqueue(jobs.pay, 6)

    assert job.get_status(refresh=True) == JobStatus.FAILED
    assert (result := job.latest_result()) is not None
    assert "LockTimeout" in str(result.exc_string)


def test_busy_is_an_error_unless_rq_calls_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells RQ to run a job again would be a result for another caller, which goes on as if it had paid."""

    @locked_job("acct:{n}", url="memory://rq")
    def pay(n: int, inner: int | None = None) -> object:  # noqa: ARG001
        return None if inner is None else pay(inner)

    def order() -> object:
        return pay(2)

    monkeypatch.setattr("lockkit.integrations.rq.get_current_job", lambda: SimpleNamespace(func=pay, worker_name="w"))
    with lockkit.connect("memory://rq") as client, client.lock("acct:2"):
        with pytest.raises(LockTimeout):
            pay(1, 2)
        assert isinstance(pay(2), Retry)
        monkeypatch.setattr(
            "lockkit.integrations.rq.get_current_job", lambda: SimpleNamespace(func=order, worker_name="w")
        )
        with pytest.raises(LockTimeout):
            order()


def test_job_that_asks_to_run_again_is_not_done_once() -> None:
    """What it returns then is no result: it ended every repeat, and the work was never done."""
    results = [again := Retry(max=3, interval=5), "paid"]
    pay = locked_job("acct", once="pay", url="memory://rq-again")(lambda: results.pop(0))

    assert [pay(), pay(), pay()] == [again, "paid", "paid"]
