"""What lockkit changes in kazoo's private parts is needed: each test fails without it."""

from __future__ import annotations

import gc
import socket
import struct
import threading
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from kazoo.protocol.states import Callback

import lockkit
from lockkit.backends.zookeeper.connection import _encrypted, outcome
from lockkit.backends.zookeeper.quirks import UnjoinedThreadsHandler, end_session
from lockkit.runtime import BlockingRuntime, drive, monotonic
from lockkit.testing.servers import wait_until
from tests.backends.zookeeper.support import PATIENCE, sessions_of

if TYPE_CHECKING:
    from lockkit.testing.servers import ZooKeeperServer
    from tests.backends.zookeeper.support import Connect

LONG = 60.0


class InterruptedSocket:
    """One end of kazoo's socket pair: Ctrl-C strikes before its first byte is sent."""

    def __init__(self, inner: socket.socket) -> None:
        """Pass everything else on."""
        self._inner = inner
        self._interrupted = False

    def send(self, *arguments: Any) -> int:
        """See `socket.socket.send`."""
        if not self._interrupted:
            self._interrupted = True
            raise KeyboardInterrupt
        return self._inner.send(*arguments)

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


def test_interrupt_while_a_request_is_handed_over(server: ZooKeeperServer, connect: Connect) -> None:
    """It reaches the caller, and later requests get their answers."""
    client = connect(server.url)
    client.ping()
    (session,) = sessions_of(client)
    connection = session.client._connection
    connection._write_sock = InterruptedSocket(connection._write_sock)

    with pytest.raises(KeyboardInterrupt):
        client.ping()

    client.ping()


def test_end_of_a_session_is_answered(server: ZooKeeperServer, connect: Connect) -> None:
    """So that `close()` returns when the locks are free."""
    client = connect(server.url)
    client.ping()
    (session,) = sessions_of(client)

    assert end_session(session.client).get(timeout=PATIENCE / 4) is True


def test_interrupted_wait_leaves_no_lock_taken() -> None:
    """Kazoo's thread can deliver the answer."""
    result = UnjoinedThreadsHandler().async_result()
    result._condition = InterruptedCondition()
    with pytest.raises(KeyboardInterrupt):
        drive(outcome(BlockingRuntime(), result))

    delivery = threading.Thread(target=result.set, args=("answer",), daemon=True)
    delivery.start()
    delivery.join(PATIENCE / 4)

    assert not delivery.is_alive()
    assert drive(outcome(BlockingRuntime(), result)) == "answer"


def test_callback_that_hangs_does_not_delay_stopping() -> None:
    """The threads end when it returns."""
    handler, go_on, called = UnjoinedThreadsHandler(), threading.Event(), threading.Event()

    def hang() -> None:
        called.set()
        go_on.wait(PATIENCE)

    handler.start()
    workers = [*handler._workers]
    handler.dispatch_callback(Callback("watch", hang, ()))
    assert called.wait(PATIENCE)

    stopping = threading.Thread(target=handler.stop, daemon=True)
    stopping.start()
    stopping.join(PATIENCE / 4)

    assert not stopping.is_alive()
    go_on.set()
    for worker in workers:
        worker.join(PATIENCE)
        assert not worker.is_alive()


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
    assert connecting.is_set()
    client.close()
    go_on.set()

    wait_until(lambda: None if {*threading.enumerate()} <= before else "threads are left", timeout=PATIENCE / 2)


def test_socket_that_the_server_resets_before_the_handshake_is_closed() -> None:
    """Without a warning about a socket that was left open."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plain = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        wait_until(lambda: None if was_reset(plain) else "not reset yet", timeout=PATIENCE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(OSError):  # noqa: PT011 - which one depends on the system
                _encrypted(plain, "localhost", {})
            gc.collect()

    assert [warning for warning in caught if warning.category is ResourceWarning] == []


def was_reset(connection: socket.socket) -> bool:
    """Whether the other end has reset it."""
    try:
        connection.getpeername()
    except OSError:
        return True
    return False
