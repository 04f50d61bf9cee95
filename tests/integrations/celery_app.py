"""The app of the tests of Celery: its tasks, and a record of what they did, in the broker's Redis."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import redis
from celery import Celery

import lockkit
from lockkit.integrations import jobs
from lockkit.integrations.celery import LockedTask

URL = os.environ["LOCKKIT_TEST_REDIS"]
EVENTS = "events"
HOLD = "hold"
VISIBLE_SECONDS = 2
BEAT_TTL = 1.5
CHARGE_TTL = 4.0

app = Celery("shop", broker=URL, backend=URL)
app.conf.update(
    lockkit_url=URL,
    lockkit_beat_ttl=BEAT_TTL,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": VISIBLE_SECONDS},
    worker_prefetch_multiplier=1,
    beat_schedule={"each half second": {"task": "shop.tick", "schedule": 0.5}},
)
# In each process that imports this, the worker's children are forked from it: none may use this client.
with jobs.client_of_process(URL).lock(f"warm:{os.getpid()}"):
    pass


def record(**event: Any) -> None:
    """Append to what the test reads."""
    with redis.Redis.from_url(URL) as connection:
        connection.rpush(EVENTS, json.dumps({"pid": os.getpid(), **event}))


def events(connection: redis.Redis) -> list[dict[str, Any]]:
    """All that was recorded."""
    lines: Any = connection.lrange(EVENTS, 0, -1)
    return [json.loads(line) for line in lines]


def work(task: LockedTask, seconds: float) -> int:
    """Record the beginning and the end of a task, and its token."""
    token: int = task.request.lockkit_token
    record(task=task.name, what="begin", token=token)
    time.sleep(seconds)
    record(task=task.name, what="end", token=token)
    return token


@app.task(base=LockedTask, bind=True, name="shop.pay", lock="acct:{n}", busy_countdown=0.1, max_retries=0)
def pay(self: LockedTask, n: int, seconds: float = 0.0) -> list[int]:  # noqa: ARG001
    """Sent again while the account is locked; has no retry to spend."""
    return [work(self, seconds), self.request.retries]


@app.task(
    base=LockedTask,
    bind=True,
    name="shop.charge",
    lock="acct:{n}",
    once="charge:{n}",
    lock_ttl=CHARGE_TTL,
    busy_countdown=0.2,
    acks_late=True,
)
def charge(self: LockedTask, n: int) -> dict[str, int]:  # noqa: ARG001
    """Runs once, also if its worker is killed and the broker delivers it again. Not done while `HOLD` is set."""
    record(task=self.name, what="begin", token=self.request.lockkit_token)
    with redis.Redis.from_url(URL) as connection:
        while connection.exists(HOLD):
            time.sleep(0.02)
    record(task=self.name, what="end", token=self.request.lockkit_token)
    return {"token": self.request.lockkit_token}


@app.task(base=LockedTask, bind=True, name="shop.sleep", lock="acct:{n}", lock_ttl=3600)
def sleep(self: LockedTask, n: int) -> None:  # noqa: ARG001
    """Holds the lock until it is ended."""
    work(self, 3600)


@app.task(base=LockedTask, name="shop.clients", lock="clients:{n}")
def clients(n: int) -> list[list[int]]:
    """Which process has made the clients that this process uses, and which one this is."""
    with lockkit.connect(URL) as client:
        (holder,) = client.holders(f"clients:{n}")
    return [[pid for pid, _ in jobs._clients if pid == os.getpid()], [os.getpid()], [holder.metadata["pid"]]]


@app.task(name="shop.tick")
def tick() -> None:
    """Sent by beat; no worker runs it."""
