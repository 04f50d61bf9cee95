"""The jobs of the tests of RQ, and a record of what they did, in RQ's Redis."""

from __future__ import annotations

import os
import time

import redis
from rq import Retry, get_current_job

import lockkit
from lockkit.integrations import jobs
from lockkit.integrations.rq import current_lease, locked_job
from lockkit.testing.timing import PATIENCE

URL = os.environ.get("LOCKKIT_TEST_REDIS", "memory://rq")
EVENTS = "events"


def record(what: str) -> None:
    """Append to what the test reads."""
    with redis.Redis.from_url(URL) as connection:
        connection.rpush(EVENTS, what)


@locked_job("acct:{n}", busy_countdown=0.1, url=URL)
def pay(n: int, seconds: float = 0.0) -> list[int]:  # noqa: ARG001
    """Scheduled again while the account is locked."""
    token = current_lease().token
    record(f"begin {token}")
    time.sleep(seconds)
    record(f"end {token}")
    return [token, os.getpid(), *(pid for pid, _ in jobs._clients if pid == os.getpid())]


def order(n: int) -> str:
    """A job without a lock, which calls the function of another one."""
    pay(n)
    return "ordered and paid"


def order_later(n: int) -> object:
    """The same, in the hope of better times."""
    try:
        return pay(n)
    except lockkit.LockTimeout:
        return Retry(max=100, interval=1)


@locked_job("acct:{n}", on_busy="skip", url=URL)
def skip(n: int) -> int:  # noqa: ARG001
    """Dropped while the account is locked."""
    return current_lease().token


@locked_job(once="charge:{n}", url=URL)
def charge(n: int) -> str:
    """Runs once."""
    record(f"charge {n}")
    job = get_current_job()
    assert job is not None
    return job.id


@locked_job("lost:{n}", ttl=0.6, url=URL)
def lose(n: int) -> str:
    """Loses its lock, and ends as if nothing had happened."""
    with lockkit.connect(URL) as operator:
        operator.break_lock(f"lost:{n}")
    assert current_lease().wait_lost(20)
    return "well"


def pay_unlocked(n: int, together: int) -> int:
    """Work on an account as RQ alone lets it; return how many were at it at the same time."""
    record(f"begin {n}")
    deadline = time.monotonic() + PATIENCE
    with redis.Redis.from_url(URL) as connection:
        while connection.llen(EVENTS) < together and time.monotonic() < deadline:
            time.sleep(0.02)
        return int(connection.llen(EVENTS))
