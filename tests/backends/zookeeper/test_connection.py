"""A session's connection: its answers, its login, its end."""

from __future__ import annotations

import signal
import socket
import threading
from contextlib import suppress
from typing import Any

import pytest

import lockkit
from lockkit.backends.zookeeper.connection import Answer, outcome
from lockkit.backends.zookeeper.session import END
from lockkit.runtime import BlockingRuntime, drive, monotonic
from lockkit_tools.servers import ZooKeeperServer, wait_until
from tests.backends.zookeeper.support import PATIENCE, Connect, answer, sessions_of

LONG = 60.0


def test_end_of_a_session_is_answered(server: ZooKeeperServer, connect: Connect) -> None:
    """So that `close()` returns when the locks are free."""
    client = connect(server.url)
    client.ping()
    (session,) = sessions_of(client)

    assert answer(session.send(END)[0], PATIENCE / 4) is None


def test_error_of_a_signal_handler_is_no_answer() -> None:
    """A time limit, as Celery and RQ raise it, strikes the wait: it ends the call, which is not tried again."""

    class TimeLimitError(Exception):
        """Of the application."""

    def strike(signum: int, frame: object) -> None:
        del signum, frame
        raise TimeLimitError

    def wait() -> None:
        timer.start()
        drive(outcome(BlockingRuntime(), Answer(), PATIENCE))

    before = signal.signal(signal.SIGUSR1, strike)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    try:
        with pytest.raises(TimeLimitError):
            wait()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_login_is_bounded(server: ZooKeeperServer, connect: Connect) -> None:
    """A member that accepts connections and answers nothing does not cost half of the session timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]},{server.address}"
        client = connect(f"zookeeper://{hosts}", randomize_hosts=False)
        began = monotonic()

        with client.lock("bounded", ttl=LONG, timeout=PATIENCE):
            pass

        assert monotonic() - began < LONG / 2


def test_client_stopped_while_connecting_does_not_connect(
    server: ZooKeeperServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads end, and its session does not stay."""
    make, connecting, go_on = socket.create_connection, threading.Event(), threading.Event()

    def slow(*arguments: Any, **keywords: Any) -> socket.socket:
        connecting.set()
        assert go_on.wait(PATIENCE)
        return make(*arguments, **keywords)

    client = connect(server.url)
    before = {*threading.enumerate()}
    monkeypatch.setattr(socket, "create_connection", slow)
    with suppress(lockkit.BackendUnavailable):
        client.lock("slow", ttl=LONG).acquire(timeout=0.5)
    assert connecting.wait(PATIENCE)
    client.close()
    go_on.set()

    wait_until(lambda: None if {*threading.enumerate()} <= before else "threads are left", timeout=PATIENCE / 2)
