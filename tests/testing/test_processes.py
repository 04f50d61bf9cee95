"""Workers: other processes that do as they are told."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockkit import ConfigurationError, LockLost, LockTimeout
from lockkit.testing.processes import Worker, WorkerFailed
from lockkit.testing.target import Face, Target


@pytest.fixture
def target(tmp_path: Path) -> Target:
    """A backend that processes share."""
    return Target(f"file://{tmp_path}/locks")


@pytest.fixture(params=["blocking", "asyncio"])
def worker(request: pytest.FixtureRequest, target: Target) -> Iterator[Worker]:
    """One of each face."""
    face: Face = request.param
    with Worker(target, face) as worker:
        yield worker


def test_what_its_client_raises_is_raised_here(worker: Worker, target: Target) -> None:
    """With its class and attributes."""
    with target.connect() as client, client.lock("x"), pytest.raises(LockTimeout) as caught:
        worker.acquire("x", wait=0)
    assert caught.value.name == "x"
    with pytest.raises(ConfigurationError):
        worker.acquire("")


def test_stopped_worker_does_nothing_until_it_is_resumed(worker: Worker) -> None:
    """It answers afterwards."""
    held = worker.acquire("x", ttl=0.2)
    worker.stop()

    worker.send("check", number=held.number)
    with pytest.raises(WorkerFailed, match="did not answer"):
        worker.receive(0.5)
    worker.resume()

    with pytest.raises(LockLost):
        worker.receive()


def test_killed_worker_is_reported(worker: Worker) -> None:
    """Not waited for."""
    os.kill(worker.pid, signal.SIGKILL)

    with pytest.raises(WorkerFailed, match="ended with status -9"):
        worker.acquire("x")
