"""A rolling deploy of each integration: the next holder gets the lock when a process is stopped, not after the ttl."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from redis import Redis
from rq import Queue

import lockkit
from lockkit.engine.settings import DEFAULT_TTL
from lockkit_tools.servers import RedisServer
from tests.integrations.processes import START_SECONDS
from tests.programs import python_group
from tests.tries import until

BOUND = DEFAULT_TTL / 2
"""Seconds: what a ttl had to free would come later, and a busy machine is slower than the figures of the page."""

MODULE = "tests.integrations.stopping"
SITE = "tests.integrations.stopping_site"
WORKER = f"celery -A {MODULE}:celery worker --concurrency=1 --without-gossip --without-mingle --without-heartbeat"


@pytest.fixture(scope="module")
def programs(redis_server: RedisServer) -> Iterator[ModuleType]:
    """The module of the programs, as those who send tasks import it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKKIT_TEST_REDIS", redis_server.url)
        yield importlib.import_module(MODULE)
        sys.modules.pop(MODULE)


def handed_over(command: str, name: str, log: Path, *, send: Callable[[], Any] | None, stop: int | None) -> float:
    """Start a process that takes a lock, and stop it."""
    with (
        lockkit.connect(os.environ["LOCKKIT_TEST_REDIS"]) as other,
        python_group(log, "-m", *command.split(), DJANGO_SETTINGS_MODULE=SITE) as running,
    ):
        if send is not None:
            send()
        try:
            # Not by asking for holders: it may still be in its acquisition then, and the child of Celery that has done
            # its tasks holds for a moment only.
            until(lambda: f"held {name}" in log.read_text(), START_SECONDS)
        except AssertionError:
            pytest.fail(log.read_text())
        if stop is not None:
            running.send_signal(stop)
        began = time.monotonic()
        with other.lock(name, timeout=DEFAULT_TTL * 2):
            seconds = time.monotonic() - began
        if stop is not None:
            running.wait(START_SECONDS)
    return seconds


pytestmark = pytest.mark.slow

TERM = signal.SIGTERM
FREE = "127.0.0.1:0"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        pytest.param(f"{MODULE} script", "script", id="script"),
        pytest.param(f"{MODULE} coroutine", "coroutine", id="coroutine"),
        pytest.param(f"{MODULE} scheduler", "scheduler", id="apscheduler"),
        pytest.param(f"uvicorn --port 0 {MODULE}:leading", "leading", id="uvicorn-lifespan"),
        pytest.param(f"uvicorn --port 0 {MODULE}:closing", "closing", id="uvicorn-own-lifespan"),
        pytest.param(f"uvicorn --port 0 --workers 2 {MODULE}:leading", "leading", id="uvicorn-workers"),
        pytest.param(
            f"gunicorn -b {FREE} -k uvicorn.workers.UvicornWorker {MODULE}:leading", "leading", id="gunicorn-uvicorn"
        ),
        pytest.param(
            f"gunicorn -b {FREE} -k uvicorn.workers.UvicornWorker {MODULE}:closing", "closing", id="gunicorn-own"
        ),
        pytest.param(f"{MODULE} run_uvicorn", "run_uvicorn", id="uvicorn-run"),
        pytest.param(
            f"gunicorn -b {FREE} -c python:tests.integrations.stopping_gunicorn -k uvicorn.workers.UvicornWorker "
            f"{MODULE}:outside",
            "outside",
            id="gunicorn-outside",
        ),
        pytest.param(f"gunicorn -b {FREE} {MODULE}:wsgi", "wsgi", id="gunicorn-sync"),
        pytest.param("django keep", "django", id="django-command"),
        pytest.param(f"django locked django -- {sys.executable} -m {MODULE} locked", "django", id="django-locked"),
    ],
)
def test_process_that_is_terminated_hands_over(command: str, name: str, programs: ModuleType, tmp_path: Path) -> None:
    """As a container or a service manager does it."""
    del programs
    assert handed_over(command, name, tmp_path / "log", send=None, stop=TERM) < BOUND


@pytest.mark.parametrize(
    ("how", "stop", "task"),
    [
        *((how, stop, task) for how, stop in (("warm", TERM), ("cold", signal.SIGQUIT)) for task in ("work", "keep")),
        ("max tasks", None, "keep"),
    ],
)
def test_children_of_celery_hand_over(
    how: str, stop: int | None, task: str, programs: ModuleType, tmp_path: Path
) -> None:
    """Also what no task releases; a warm shutdown waits for the task, a cold one ends it."""
    name = f"{how} {task}"
    command = f"{WORKER} -n {how[0]}-{task} " + ("" if stop else "--max-tasks-per-child=1")

    def send() -> None:
        programs.celery.tasks[task].delay(*([name] if task == "keep" else [name, 2.0 if how != "cold" else 3600]))

    seconds = handed_over(command, name, tmp_path / "log", send=send, stop=stop)
    assert seconds < BOUND
    programs.celery.control.purge()


@pytest.mark.parametrize("actor", ["act", "keep_in_actor"])
def test_worker_of_dramatiq_hands_over(actor: str, programs: ModuleType, tmp_path: Path) -> None:
    """It waits for its messages."""
    arguments = [actor] if actor == "keep_in_actor" else [actor, 2.0]
    command = f"dramatiq {MODULE}:broker --processes 1 --threads 1"
    send = getattr(programs, actor).send
    seconds = handed_over(command, actor, tmp_path / "log", send=lambda: send(*arguments), stop=TERM)
    assert seconds < BOUND


def test_worker_of_rq_hands_over(programs: ModuleType, tmp_path: Path) -> None:
    """It waits for its job."""

    def send() -> None:
        with Redis.from_url(programs.URL) as connection:
            Queue("stopping", connection=connection).enqueue(programs.job, "job", 2.0)

    command = f"rq.cli worker --url {programs.URL} stopping"
    seconds = handed_over(command, "job", tmp_path / "log", send=send, stop=TERM)
    assert seconds < BOUND
