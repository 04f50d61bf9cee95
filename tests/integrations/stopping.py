"""
Programs of `test_stopping.py`: each holds the lock that is named like it, as the page "Stopping" says.

``python -m tests.integrations.stopping KIND``; the servers and queues import their applications from here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dramatiq
from apscheduler.schedulers.blocking import BlockingScheduler
from celery import Celery
from dramatiq.brokers.redis import RedisBroker
from fastapi import FastAPI

import lockkit
from lockkit.integrations.apscheduler import leader_only
from lockkit.integrations.celery import LockedTask
from lockkit.integrations.dramatiq import locked_actor
from lockkit.integrations.fastapi import lifespan
from lockkit.integrations.rq import locked_job

URL = os.environ["LOCKKIT_TEST_REDIS"]

kept: list[lockkit.Lease] = []
"""Leases that nothing in the process releases."""


def say_held(name: str) -> None:
    """Tell the test that the caller holds the lock."""
    print(f"held {name}", flush=True)  # noqa: T201


def keep(name: str) -> None:
    """Hold a lock until the process ends."""
    kept.append(lockkit.connect(URL).lock(name).acquire())
    say_held(name)


# -- programs ----------------------------------------------------------------------------------------------------------


def exit_on_sigterm() -> None:
    """End as by Ctrl-C when a container or a service manager ends the program."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def script() -> None:
    """A plain one."""
    exit_on_sigterm()
    with lockkit.connect(URL).lock("script"):
        say_held("script")
        time.sleep(3600)


def coroutine() -> None:
    """With an event loop."""

    async def main() -> None:
        async with lockkit.aio.connect(URL) as client, client.lock("coroutine"):
            say_held("coroutine")
            await asyncio.sleep(3600)

    exit_on_sigterm()
    asyncio.run(main())


def scheduler() -> None:
    """The leader of schedulers."""
    blocking = BlockingScheduler()
    # Not by sys.exit(), which APScheduler catches while it submits a job.
    stop = threading.Thread(target=blocking.shutdown, kwargs={"wait": False})
    signal.signal(signal.SIGTERM, lambda *_: stop.start())
    leader_only(blocking, lockkit.connect(URL), "scheduler")
    # The campaign begins while it starts, and only what runs can be shut down.
    blocking.add_job(say_held, "interval", ["scheduler"], seconds=0.2)
    blocking.start()


def locked() -> None:
    """What a command of Django runs under its lock."""
    say_held("django")
    time.sleep(3600)


def run_uvicorn() -> None:
    """A program that starts uvicorn, and its client outside the lifespan."""
    import uvicorn  # noqa: PLC0415 - of this program only

    exit_on_sigterm()
    keep("run_uvicorn")
    uvicorn.run(FastAPI(), port=0)


# -- applications ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _closing(_: object) -> AsyncIterator[None]:
    client = lockkit.connect(URL)  # it may be one of a module
    with client:
        kept.append(client.lock("closing").acquire())
        say_held("closing")
        yield


@asynccontextmanager
async def _keeping(_: object) -> AsyncIterator[None]:
    keep("outside")
    yield


async def _work(term: lockkit.aio.Term) -> None:
    del term
    say_held("leading")
    await asyncio.sleep(3600)


if sys.argv[-1].endswith(":wsgi"):  # gunicorn imports an application in its worker
    keep("wsgi")

leading = FastAPI(lifespan=lifespan(URL, leading={"leading": _work}))
closing = FastAPI(lifespan=_closing)
outside = FastAPI(lifespan=_keeping)


def wsgi(environ: dict[str, Any], start_response: Any) -> list[bytes]:  # noqa: ANN401 - gunicorn's
    """Answer nothing."""
    del environ
    start_response("204 No Content", [])
    return []


celery = Celery("stopping", broker=URL, backend=URL)
celery.conf.update(lockkit_url=URL, broker_connection_retry_on_startup=True, worker_prefetch_multiplier=1)
celery.task(name="keep")(keep)


@celery.task(base=LockedTask, name="work", lock="{name}")
def work(name: str, seconds: float) -> None:
    """Hold the lock while it runs."""
    say_held(name)
    time.sleep(seconds)


broker = RedisBroker(url=URL)  # type: ignore[no-untyped-call] # Dramatiq's


@locked_actor("{name}", url=URL, broker=broker)
def act(name: str, seconds: float) -> None:
    """Hold the lock while it runs."""
    say_held(name)
    time.sleep(seconds)


@dramatiq.actor(broker=broker)
def keep_in_actor(name: str) -> None:
    """Hold the lock until the worker ends."""
    keep(name)


@locked_job("{name}", url=URL)
def job(name: str, seconds: float) -> None:
    """Hold the lock while it runs."""
    say_held(name)
    time.sleep(seconds)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
