"""What lockkit changes in kazoo's private parts is needed: each test fails without it."""

from __future__ import annotations

import gc
import signal
import socket
import struct
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from kazoo.handlers.threading import SequentialThreadingHandler

import lockkit
from lockkit.backends.zookeeper.connection import _encrypted, outcome
from lockkit.backends.zookeeper.quirks import (
    DIRECT_BYTES_MAX,
    Answer,
    BoundedConnectionHandler,
    InterruptibleClient,
    end_session,
    sync_and_list,
)
from lockkit.runtime import BlockingRuntime, drive, monotonic
from lockkit_tools.servers import ZooKeeperServer, wait_until
from tests.backends.zookeeper.support import PATIENCE, Connect, answer, sessions_of
from tests.interrupts import CallStrike, elsewhere

LONG = 60.0


class PiecewiseSocket:
    """A socket of which some bytes can be read at a time, and on which everything or nothing can be sent."""

    def __init__(self, inner: socket.socket, *, room: bool = True) -> None:
        """Pass everything else on."""
        self._inner = inner
        self.room = room

    def recv(self, length: int) -> bytes:
        """See `socket.socket.recv`."""
        return self._inner.recv(min(length, 7))

    def send(self, data: bytes, *flags: int) -> int:
        """See `socket.socket.send`."""
        if flags and not self.room:
            raise BlockingIOError
        return self._inner.send(data, *flags)

    def fileno(self) -> int:
        """See `socket.socket.fileno`."""
        return self._inner.fileno()

    def close(self) -> None:
        """See `socket.socket.close`."""
        self._inner.close()


class InterruptedCondition(threading.Condition):
    """Ctrl-C strikes when it has been locked, and before the ``with`` statement has begun that would unlock it."""

    interrupted = False

    def __enter__(self) -> bool:
        """Lock it."""
        locked = super().__enter__()
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return locked


HANDING_OVER = (
    InterruptibleClient.hand_over,
    InterruptibleClient._wake_thread,
    BoundedConnectionHandler.send_queued,
    BoundedConnectionHandler._send,
    BoundedConnectionHandler.wake,
)


@pytest.mark.parametrize("room", [True, False], ids=["sent at once", "no room in the socket"])
def test_interrupt_while_a_request_is_handed_over(server: ZooKeeperServer, connect: Connect, *, room: bool) -> None:
    """At each instant it reaches the caller, and later requests get their answers, over the same connection."""
    client = connect(server.url)
    client.lock("warm").acquire(timeout=PATIENCE).release()
    (session,) = sessions_of(client)
    kazoos = session.client
    number = missed = 0
    while missed < 3:  # in single tries kazoo's thread is faster, and leaves fewer instants
        kazoos._connection._socket = PiecewiseSocket(kazoos._connection._socket, room=room)
        strike = CallStrike(number, *(function.__code__ for function in HANDING_OVER))
        strike.during(lambda: sync_and_list(kazoos, "/", None))

        assert elsewhere(client.ping), f"instant {number}"
        kazoos._connection._socket = kazoos._connection._socket._inner
        if strike.struck:
            number, missed = number + 1, 0
        else:
            missed += 1

    assert number > 5
    assert session.watches.connections_count == 1
    assert not kazoos._pending


def test_requests_are_sent_by_the_thread_that_makes_them(
    server: ZooKeeperServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless there is no room in the socket, or they are large: then kazoo's thread waits for room."""
    client = connect(server.url)
    client.lock("warm").acquire(timeout=PATIENCE).release()
    (session,) = sessions_of(client)
    connection = session.client._connection
    woken: list[int] = []
    wake = connection.wake

    def note_and_wake(requests_count: int = 1) -> None:
        woken.append(requests_count)
        wake(requests_count)

    monkeypatch.setattr(connection, "wake", note_and_wake)

    client.lock("small").acquire(timeout=PATIENCE).release()
    assert woken == []

    answer(session.client.set_async("/lockkit", b"x" * DIRECT_BYTES_MAX))
    answer(session.client.set_async("/lockkit", b""))
    assert woken == [1]
    connection._socket = PiecewiseSocket(connection._socket, room=False)
    client.lock("small").acquire(timeout=PATIENCE).release()
    assert woken == [1, 2, 1]


def test_answers_that_come_in_pieces(server: ZooKeeperServer, connect: Connect) -> None:
    """However many bytes of how many answers are read at once."""
    client = connect(server.url)
    client.ping()
    (session,) = sessions_of(client)
    connection = session.client._connection
    connection._socket = PiecewiseSocket(connection._socket)

    with client.lock("pieces", metadata={"text": "x" * 100}, timeout=PATIENCE):
        (holder,) = client.holders("pieces")

    assert holder.metadata["text"] == "x" * 100


def test_session_has_one_thread(server: ZooKeeperServer, connect: Connect) -> None:
    """That of the connection, which also calls back."""
    before = {*threading.enumerate()}
    client = connect(server.url)
    client.ping()

    assert len({*threading.enumerate()} - before) == 1


def test_end_of_a_session_is_answered(server: ZooKeeperServer, connect: Connect) -> None:
    """So that `close()` returns when the locks are free."""
    client = connect(server.url)
    client.ping()
    (session,) = sessions_of(client)

    assert answer(end_session(session.client), PATIENCE / 4) is True


def test_interrupted_wait_leaves_no_lock_taken() -> None:
    """Kazoo's thread can deliver the answer."""
    result = SequentialThreadingHandler().async_result()
    result._condition = InterruptedCondition()
    with pytest.raises(KeyboardInterrupt):
        drive(outcome(BlockingRuntime(), result))

    delivery = threading.Thread(target=result.set, args=("answer",), daemon=True)
    delivery.start()
    delivery.join(PATIENCE / 4)

    assert not delivery.is_alive()
    assert drive(outcome(BlockingRuntime(), result)) == "answer"


@pytest.mark.parametrize("make", [Answer, lambda: SequentialThreadingHandler().async_result()])
def test_error_of_a_signal_handler_is_no_answer(make: Callable[[], Any]) -> None:
    """A time limit, as Celery and RQ raise it, strikes the wait: it ends the call, which is not tried again."""

    class TimeLimitError(Exception):
        """Of the application."""

    def strike(signum: int, frame: object) -> None:
        del signum, frame
        raise TimeLimitError

    def wait() -> None:
        timer.start()
        drive(outcome(BlockingRuntime(), make(), PATIENCE))

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


def test_socket_that_the_server_resets_before_the_handshake_is_closed() -> None:
    """Without a warning about a socket that was left open."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plain = socket.create_connection(listener.getsockname())
        own = f"laddr={plain.getsockname()}"
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        wait_until(lambda: None if was_reset(plain) else "not reset yet", timeout=PATIENCE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(OSError):  # noqa: PT011 - which one depends on the system
                _encrypted(plain, "localhost", {})
            gc.collect()

    # Only about this one: the garbage collector finds what other tests have left, too.
    assert [str(warning.message) for warning in caught if own in str(warning.message)] == []


def was_reset(connection: socket.socket) -> bool:
    """Whether the other end has reset it."""
    try:
        connection.getpeername()
    except OSError:
        return True
    return False
