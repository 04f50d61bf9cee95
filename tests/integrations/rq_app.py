"""The jobs of the tests of RQ, and a record of what they did, in RQ's Redis."""

from __future__ import annotations

import os
import time

import redis

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


def pay_unlocked(n: int, together: int) -> int:
    """Work on an account as RQ alone lets it; return how many were at it at the same time."""
    record(f"begin {n}")
    deadline = time.monotonic() + PATIENCE
    with redis.Redis.from_url(URL) as connection:
        while connection.llen(EVENTS) < together and time.monotonic() < deadline:
            time.sleep(0.02)
        return int(connection.llen(EVENTS))
