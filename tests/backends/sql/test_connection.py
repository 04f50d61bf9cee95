"""Drivers that block their thread, without a server."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

import lockkit
from lockkit.backends.sql.connection import in_thread
from lockkit.backends.sql.sqlite import SqliteConnection
from lockkit.runtime import BlockingRuntime, drive
from tests.interrupts import CallStrike

PATIENCE = 60.0


class DriverSocket:
    """What a frame of the driver holds."""


def failing(held: list[weakref.ref[DriverSocket]], answered: threading.Event) -> Callable[[], None]:
    """Make a call that fails once it is answered."""

    def call() -> None:
        sock = DriverSocket()
        held.append(weakref.ref(sock))
        assert answered.wait(PATIENCE)
        raise ConnectionResetError

    return call


def call(function: Callable[[], None], seconds: float) -> None:
    """Call in a thread, for at most so long."""
    drive(in_thread(BlockingRuntime(), function, seconds, lambda _: None))


@pytest.mark.parametrize("late", [False, True])
def test_error_leaves_nothing_to_the_garbage_collector(*, late: bool) -> None:
    """It would find the driver's socket before what closes it, and warn of that."""
    held: list[weakref.ref[DriverSocket]] = []
    answered = threading.Event()
    gc.disable()
    try:
        if late:
            with pytest.raises(TimeoutError):
                call(failing(held, answered), 0.0)
            answered.set()
        else:
            answered.set()
            with pytest.raises(ConnectionResetError):
                call(failing(held, answered), PATIENCE)
        for thread in threading.enumerate():
            if thread.name == "lockkit-sql-call":
                thread.join(PATIENCE)

        assert held[0]() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_statement_of_sqlite_that_is_interrupted_locks_the_file_no_longer(tmp_path: Path) -> None:
    """Ctrl-C between the statement and its rows: what frees the lock again waited in vain for the one before."""
    url, number = f"sqlite:///{tmp_path}/locks.db", 0
    with lockkit.connect(url) as client:
        client.lock("x").acquire().release()  # makes the table
    while True:
        with lockkit.connect(url) as client, lockkit.connect(url) as other:
            client.ping()
            lock = client.lock("x", timeout=PATIENCE)
            strike = CallStrike(number, SqliteConnection._run.__code__)
            strike.during(lambda lock=lock: lock.acquire().release())  # type: ignore[misc] # of this round
            if not strike.struck:
                break
            assert other.holders("x") == [], f"instant {number}"
        number += 1
    assert number > 1
