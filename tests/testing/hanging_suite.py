"""
A test that hangs with a server, to be ended by a signal; run by ``test_ending.py``.

Its name keeps it out of every other run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lockkit_tools.servers import RedisServer


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server of the module."""
    with RedisServer() as server:
        yield server


@pytest.mark.usefixtures("server")
def test_hangs() -> None:
    """For ever."""
    threading.Event().wait()
