"""What tasks, actors and jobs share: one suite over Celery, Dramatiq and RQ."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import dramatiq
import pytest
from celery import Celery
from celery.exceptions import Retry as CeleryRetry
from dramatiq.brokers.stub import StubBroker
from rq import Retry as RqRetry

import lockkit
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockLost, LockTimeout
from lockkit.integrations import jobs
from lockkit.integrations.celery import LockedTask
from lockkit.integrations.dramatiq import ActorBusy, locked_actor
from lockkit.integrations.jobs import JobLock, current_lease
from lockkit.integrations.rq import locked_job
from lockkit.testing.timing import PATIENCE
from tests.tries import until

URL = "memory://jobs"

Job = Callable[..., Any]
Declare = Callable[..., Job]


def pay(n: int) -> int:
    """A job."""
    return n


def celery_task(function: Job, url: str = URL, **options: Any) -> Job:
    """A task of Celery, which has the options under names of its own."""
    named = {"ttl": "lock_ttl", "timeout": "lock_timeout", "keep": "once_keep"}
    app = Celery("jobs", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(lockkit_url=url)
    options = {named.get(option, option): value for option, value in options.items()}
    task: Job = app.task(shared=False, name="pay", base=LockedTask, **options)(function)
    app.finalize()
    return task


def dramatiq_actor(function: Job, url: str = URL, **options: Any) -> Job:
    """An actor of Dramatiq."""
    return locked_actor(url=url, broker=StubBroker(), **options)(function)


def rq_job(function: Job, url: str = URL, **options: Any) -> Job:
    """A job of RQ."""
    return locked_job(url=url, **options)(function)


DECLARE: dict[str, Declare] = {"celery": celery_task, "dramatiq": dramatiq_actor, "rq": rq_job}


@pytest.fixture(params=DECLARE)
def declare(request: pytest.FixtureRequest) -> Declare:
    """The decorator of each library."""
    return DECLARE[request.param]


@contextmanager
def busy(name: str = "acct:1") -> Iterator[None]:
    """Another client holds a lock."""
    with lockkit.connect(URL) as client, client.lock(name, timeout=PATIENCE):
        yield


def test_job_runs_under_its_lock(declare: Declare) -> None:
    """With the ttl of its options; its lease is to be had while it runs."""
    seen: list[tuple[str, float, bool]] = []

    def look(n: int) -> int:
        lease = current_lease()
        seen.append((lease.name, lease.ttl, lease.held))
        return n

    assert declare(look, lock="acct:{n}", ttl=7)(1) == 1
    assert seen == [("acct:1", 7, True)]
    with busy(), pytest.raises(LockError, match="outside a job"):  # so the lock is free
        current_lease()


@pytest.mark.parametrize("on_busy", ["retry", "skip", "wait"])
def test_busy_job_does_not_run(declare: Declare, on_busy: str) -> None:
    """It is skipped, or there is nobody to send it again."""
    job = declare(pay, lock="acct:{n}", on_busy=on_busy, timeout=0)
    with busy():
        if on_busy == "skip":
            assert job(1) is None
        else:
            with pytest.raises(LockTimeout, match="acct:1"):
                job(1)
    assert job(1) == 1


def again_celery(job: Any) -> Any:  # noqa: ANN401 - seconds
    """When Celery runs the task again."""
    job.push_request(id="one", args=(1,), kwargs={}, retries=2, called_directly=False, is_eager=False)
    with pytest.raises(CeleryRetry) as caught:
        job.run(1)
    job.pop_request()
    return caught.value.when


def again_dramatiq(job: Job) -> float:
    """When Dramatiq delivers the message again."""
    with pytest.raises(ActorBusy) as caught:
        job(1)
    return (caught.value.delay or 0) / 1000


def again_rq(job: Job) -> int:
    """When RQ schedules the job again: it counts whole seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockkit.integrations.rq.get_current_job", lambda: SimpleNamespace(func=job, worker_name="w"))
        found = job(1)
    assert isinstance(found, RqRetry)
    return found.intervals[0]


@pytest.mark.parametrize(
    ("library", "again", "seconds"),
    [("celery", again_celery, 2.5), ("dramatiq", again_dramatiq, 2.5), ("rq", again_rq, 3)],
)
def test_busy_job_is_sent_again(library: str, again: Callable[[Job], float], seconds: float) -> None:
    """By the worker, after the countdown, which may be a timedelta."""
    job = DECLARE[library](pay, lock="acct:{n}", busy_countdown=timedelta(milliseconds=2500))
    with busy():
        assert again(job) == seconds


@pytest.mark.parametrize("on_busy", ["retry", "skip"])
def test_job_without_its_lock_server_fails(declare: Declare, on_busy: str) -> None:
    """An outage is not a busy lock: the job is not skipped."""
    with pytest.raises(BackendUnavailable):
        declare(pay, url="redis://127.0.0.1:1/0", lock="acct:{n}", on_busy=on_busy)(1)


def test_job_that_fails_frees_its_lock(declare: Declare) -> None:
    """Also with a timeout of another lock, which does not count as busy: the job has run."""

    def fail(n: int) -> None:
        raise LockTimeout(f"inner {n}")

    with pytest.raises(LockTimeout, match="inner 1"):
        declare(fail, lock="acct:{n}", once="pay:{n}", on_busy="skip")(1)
    with busy():
        pass


def test_job_that_lost_its_lock_fails(declare: Declare) -> None:
    """Though its function returns as if nothing had happened."""

    def lose(n: int) -> int:
        with lockkit.connect(URL) as operator:
            operator.break_lock(f"acct:{n}")
        assert current_lease().wait_lost(PATIENCE)
        return n

    with pytest.raises(LockLost, match="acct:1"):
        declare(lose, lock="acct:{n}", ttl=0.6)(1)


def test_repeat_gets_the_stored_result(declare: Declare) -> None:
    """A job with a key runs once, for as long as its result is kept."""
    runs: list[int] = []

    def charge(n: int) -> list[int]:
        runs.append(n)
        return [n, len(runs)]

    job = declare(charge, once=f"{id(runs)}:{{n}}", keep=0.5)
    assert job(3) == job(3) == [3, 1]
    until(lambda: job(3) == [3, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lock": "acct:{m}"}, "no parameter 'm'"),
        ({"once": "charge:{m}"}, "no parameter 'm'"),
        ({"lock": "a", "on_busy": "reject"}, "on_busy must be"),
        ({"lock": 3}, "lock must be a str"),
        ({"lock": ""}, "lock must be a str of 1 to 255 characters, not ''"),
        ({"lock": "a", "once": b"a"}, "once must be a str"),
        ({"lock": "a", "ttl": 0}, "ttl must be more than 0"),
        ({"lock": "a", "timeout": -1}, "timeout must be 0 or more"),
        ({"lock": "a", "timeout": 5}, "timeout has no effect with on_busy='retry'"),
        ({"lock": "a", "timeout": 5, "on_busy": "skip"}, "timeout has no effect with on_busy='skip'"),
        ({"lock": "a", "keep": 0}, "keep must be more than 0"),
        ({"lock": "a", "busy_countdown": None}, "busy_countdown must be seconds"),
        ({"lock": "a", "busy_countdown": -1}, "busy_countdown must be 0 or more seconds"),
        ({}, "a lock, such as lock='acct:{n}'|neither lock= nor once="),
    ],
)
def test_wrong_option_is_an_error_where_the_job_is_declared(
    declare: Declare, options: dict[str, Any], message: str
) -> None:
    """Not when a worker runs it, or when the first lock is busy."""
    with pytest.raises(ConfigurationError, match=message):
        declare(pay, **options)


@pytest.mark.parametrize("options", [{"lock": "acct"}, {"once": "charge"}])
def test_coroutine_function_is_refused(declare: Declare, options: dict[str, str]) -> None:
    """Its body would run after the lock is released."""

    async def later() -> None: ...

    with pytest.raises(ConfigurationError, match="coroutine function") as caught:
        declare(later, **options)
    assert caught.value.name in options.values()


# -- without any of the libraries ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_busy", "timeout"), [("wait", 3.0), ("retry", 0)])
def test_lock_and_key_are_asked_for_as_the_job_says(on_busy: Any, timeout: float) -> None:  # noqa: ANN401 - a literal
    """Only ``"wait"`` waits; metrics count both under their templates."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def noted(make: Callable[..., object]) -> Callable[..., object]:
        def ask(name: str, **options: object) -> object:
            asked.append((name, options))
            return make(name, **options)

        return ask

    job = JobLock(pay, "acct:{n}", once="pay:{n}", on_busy=on_busy, ttl=7, timeout=timeout, keep=60)
    with lockkit.connect(f"memory://jobs-{on_busy}") as client:
        noting: Any = SimpleNamespace(lock=noted(client.lock), once=noted(client.once))
        assert job.run(noting, lambda _: 5, (1,), {}) == job.run(noting, lambda _: 6, (1,), {}) == 5

    once = ("pay:1", {"keep": 60.0, "ttl": 7.0, "timeout": timeout, "label": "pay:{n}"})
    lock = ("acct:1", {"ttl": 7.0, "timeout": timeout, "reentrant": True, "label": "acct:{n}"})
    assert asked == [once, lock, once]


@pytest.mark.parametrize("on_busy", ["retry", "skip", "wait"])
def test_job_that_calls_another_one_of_its_lock_does_not_wait_for_itself(on_busy: Any) -> None:  # noqa: ANN401 - a literal
    """The inner call has the same lease. It was told to pass reentrant=True, skipped, or waited for ever."""
    job = JobLock(pay, "acct:{n}", on_busy=on_busy)
    with lockkit.connect("memory://jobs-inner") as client:

        def outer(lease: lockkit.Lease | None) -> object:
            assert job.run(client, lambda inner: inner is lease and 2, (1,), {}) == 2
            assert lease is not None
            return lease.held and 1

        assert job.run(client, outer, (1,), {}) == 1
        assert not client.lock("acct:1").locked()


@pytest.mark.parametrize(
    ("configured", "whom", "warnings"),
    [("memory://jobs-narrow", "threads and tasks of this process", 2), ("file:", "processes of this machine", 1)],
)
def test_locks_that_other_machines_do_not_see_are_warned_of_once(
    configured: str, whom: str, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of those of the machine, only if nothing names them; of those of the process always: workers are processes."""
    monkeypatch.setenv("LOCKKIT_URL", configured)
    monkeypatch.setattr(jobs, "_clients", {})

    for url in (None, None, configured):
        jobs.client_of_process(url)

    assert [record.levelname for record in caplog.records if "locks out" in record.getMessage()] == [
        "WARNING"
    ] * warnings
    assert f"locks out {whom} only: if workers run elsewhere" in caplog.text
    for client in jobs._clients.values():
        client.close()


@pytest.mark.parametrize("decorator", [locked_actor, locked_job])
def test_decorator_without_brackets_is_refused(decorator: Any) -> None:  # noqa: ANN401 - used wrongly
    """Not by the first job, in a worker."""
    with pytest.raises(ConfigurationError, match=rf"^write @{decorator.__name__}\('acct:\{{n\}}'\), with the name"):
        decorator(pay)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give the job a lock"),
        ({"lok": "acct:{n}"}, "give the job a lock"),
        ({"lock": "a", "tll": 5}, "tll.*'ttl'"),
    ],
)
def test_misspelt_option_of_an_actor_is_refused(options: dict[str, Any], message: str) -> None:
    """When the actor is declared: Dramatiq says it of those that none of its middleware knows."""
    with pytest.raises(ConfigurationError, match=message):
        locked_actor(broker=StubBroker(), **options)(pay)


def test_actor_is_made_once() -> None:
    """Both decorators make one; with two, the error for a field said that the job has no such parameter."""
    with pytest.raises(ConfigurationError, match=r"in place of @dramatiq\.actor"):
        locked_actor("acct", broker=StubBroker())(dramatiq.actor(broker=StubBroker())(pay))


def test_job_whose_work_would_go_on_after_its_end_is_refused() -> None:
    """A plain function around a coroutine function: what it returns would run without the lock."""

    async def later(n: int) -> int:
        return n

    @functools.wraps(later)
    def started(n: int) -> Any:  # noqa: ANN401 - a coroutine
        return later(n)

    def ran(n: int) -> int:
        return asyncio.run(later(n))

    with lockkit.connect("memory://jobs") as client:
        with pytest.raises(ConfigurationError, match="would run after the lock is released"):
            JobLock(started, "acct:{n}").run(client, lambda _: started(1), (1,), {})
        assert JobLock(ran, "acct:{n}").run(client, lambda _: ran(1), (1,), {}) == 1
        with pytest.raises(ConfigurationError, match="would run after the lock is released"):
            JobLock(started, None, once="pay:{n}").run(client, lambda _: started(1), (1,), {})
        assert client.once("pay:1", keep=60).state() is None
