"""What tasks, actors and jobs share, without running any of their frameworks."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from dramatiq.brokers.stub import StubBroker

import lockkit
from lockkit.errors import ConfigurationError
from lockkit.integrations import jobs
from lockkit.integrations.dramatiq import locked_actor
from lockkit.integrations.jobs import JobLock
from lockkit.integrations.rq import locked_job


def pay(n: int) -> int:
    """A job."""
    return n


@pytest.mark.parametrize(("on_busy", "timeout"), [("wait", 3.0), ("retry", 0)])
def test_lock_and_key_are_asked_for_as_the_job_says(on_busy: Any, timeout: float) -> None:  # noqa: ANN401 - a literal
    """Only ``"wait"`` waits; metrics count both under their templates."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def noted(make: Callable[..., object]) -> Callable[..., object]:
        def ask(name: str, **options: object) -> object:
            asked.append((name, options))
            return make(name, **options)

        return ask

    job = JobLock(pay, "acct:{n}", once="pay:{n}", on_busy=on_busy, ttl=7, timeout=3, keep=60)
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
    ("configured", "whom"),
    [("memory://jobs-narrow", "threads of this process"), ("file:", "processes of this machine")],
)
def test_locks_that_other_machines_do_not_see_are_warned_of_once(
    configured: str, whom: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the application gives their URL itself: then it knows."""
    monkeypatch.setenv("LOCKKIT_URL", configured)
    monkeypatch.setattr(jobs, "_clients", {})

    for url in (None, None, configured):
        jobs.client_of_process(url)

    assert [record.levelname for record in caplog.records] == ["WARNING"]
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
