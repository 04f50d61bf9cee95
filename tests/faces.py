"""One test for both APIs: its body is written once, against the interface of `lockkit.aio`; see `FaceDriver`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from lockkit.backends.memory.backend import MemoryBackend
from lockkit.testing.face_driver import DRIVERS, FaceDriver, adapt
from lockkit.testing.target import Target
from tests.engine.scripted import RUNTIMES, ScriptedBackend, scripted


def both_faces(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine function with a parameter `driver`, on a space in memory of its own."""

    @wraps(story)
    def run(driver: type[FaceDriver], **fixtures: Any) -> None:
        made = driver(Target(f"memory://{secrets.token_hex(6)}"), MemoryBackend.capabilities)
        made.run(story(driver=made, **fixtures))

    test: Callable[..., None] = pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)(run)
    return test


def scripted_for(driver: FaceDriver, space: str | None = None, **options: Any) -> tuple[Any, ScriptedBackend]:
    """Make a client on a scripted backend."""
    client, backend = scripted(RUNTIMES[driver.face](), space, **options)
    return adapt(client), backend
