"""
kazoo's client, tightened where a lock needs it: bounded connecting, the negotiated session, no secrets in logs.

kazoo connects, keeps the session alive and calls back in threads of its own, three for each client. What it does not
offer is set here:

- Connecting and logging in take a few seconds at most, not a whole session: a member that is stopped must not cost the
  session that another member would have kept.
- The server may change the session timeout that was asked for, and kazoo only logs the answer.
- A member that does not answer is left at once (`Driver.hang_up`), not after two thirds of the session.
- Ctrl-C in the thread that asks is not lost, and leaves kazoo's queue in order.
- Handing over a request never blocks, and stopping waits for no thread: kazoo's own may stand still in a name look-up.
- An ensemble that came back with older data refuses every client that has seen newer: its session is over.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kazoo.client import CLOSED_STATES, KazooClient
from kazoo.exceptions import (
    ConnectionClosedError,
    ConnectionDropped,
    ConnectionLoss,
    KazooException,
    SessionExpiredError,
)
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.connection import PING_XID, ConnectionHandler
from kazoo.protocol.serialization import CloseInstance, Connect, PingInstance
from kazoo.retry import KazooRetry

from lockkit.runtime import AsyncioRuntime, let_go

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lockkit.runtime import Runtime

__all__ = ["ANSWER_SECONDS", "CONNECT_SECONDS", "Driver", "can_wait", "outcome"]

CONNECT_SECONDS = 2.0
"""For a TCP connection, and for waiting until there is one. Longer holds up callers, and leaves a dead member later."""

ANSWER_SECONDS = 2.5
"""For an answer. Longer holds up callers of a member that hangs; shorter takes a busy one for dead. With
`CONNECT_SECONDS` a call stays below five seconds."""

RECONNECT_PAUSE_MAX = 1.0
"""Longest pause between two rounds over all members, seconds. Longer notices later that they are back; kazoo's own
goes up to an hour."""

log = logging.getLogger("lockkit.kazoo")


def _tidy(record: logging.LogRecord) -> bool:
    """Keep passwords out of the log, and outages quiet: what they mean for locks is logged by lockkit."""
    if record.levelno == logging.WARNING:
        # One for each attempt of each client to connect.
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
    # At DEBUG kazoo logs every request, also those that carry a password.
    return record.levelno >= logging.INFO


log.addFilter(_tidy)


async def outcome(runtime: Runtime, result: Any, seconds: float = ANSWER_SECONDS) -> Any:  # noqa: ANN401 - kazoo's
    """
    Wait for what comes of a request of kazoo's.

    Raises:
        KazooTimeoutError: No answer came within `seconds`.
        KazooException: It is an error.
    """
    try:
        return await _outcome(runtime, result, seconds)
    except (KazooException, KazooTimeoutError):
        raise
    except Exception as error:
        # kazoo hands over whatever struck its thread there: of an answer that it could not read, for example.
        message = f"kazoo failed to read the answer: {error!r}"
        raise ConnectionLoss(message) from error


async def _outcome(runtime: Runtime, result: Any, seconds: float) -> Any:  # noqa: ANN401 - kazoo has no types
    if runtime.kind == "blocking" or not can_wait(runtime):  # kazoo's threads still answer
        try:
            return result.get(timeout=max(0.0, seconds))
        except BaseException:
            let_go(result._condition)  # noqa: SLF001 - kazoo's thread takes it to bring the answer, heartbeats and all
            raise
    done = runtime.event()
    result.rawlink(lambda _: done.set())
    if not await done.wait(max(0.0, seconds)):
        raise KazooTimeoutError
    return result.get_nowait()


def can_wait(runtime: Runtime) -> bool:
    """Tell whether there is something to wait in: no event loop runs any more when the interpreter exits."""
    return not isinstance(runtime, AsyncioRuntime) or (runtime.loop is not None and runtime.loop.is_running())


class Driver:
    """
    A client of kazoo's that is ours.

    Attributes:
        client: kazoo's.
        last_error: What the last attempt to connect ended in; None after one that succeeded.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        session_seconds: float,
        round_failed: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        """
        Make it; nothing is sent.

        Args:
            arguments: For `KazooClient`. **Hold the password.**
            session_seconds: Session timeout to ask for.
            round_failed: Called in kazoo's thread whenever no member could be reached.
            ended: Called in kazoo's thread when that ends, also of an error.

        Raises:
            TypeError: kazoo does not take one of the arguments.
            ValueError: As before.
        """
        handler = self._handler = _Handler(round_failed)
        patience = {"delay": 0.05, "backoff": 2, "max_delay": RECONNECT_PAUSE_MAX, "sleep_func": handler.sleep_func}
        self.client: Any = _Client(
            timeout=session_seconds,
            handler=handler,
            connection_retry=KazooRetry(max_tries=-1, **patience),
            command_retry=KazooRetry(max_tries=1, **patience),
            logger=log,
            **arguments,
        )
        former = self.client._connection  # noqa: SLF001 - kazoo has no other way to what is negotiated
        self._connection = _Connection(self.client, former.retry_sleeper, logger=log, sasl_options=former.sasl_options)
        self._connection.ended = ended
        self.client._connection = self._connection  # noqa: SLF001

    @property
    def last_error(self) -> BaseException | None:
        """See the class."""
        return self._handler.last_error

    @property
    def session_seconds(self) -> float:
        """Session timeout that the server granted; 0 before the first connection."""
        return self._connection.session_seconds

    def hang_up(self) -> None:
        """Break the connection off, so that kazoo goes on to another member. The session stays."""
        self._handler.hang_up()

    def stop(self) -> None:
        """
        Have kazoo's threads end; returns at once.

        The server hears nothing of it: it ends the session after its timeout, unless it was asked to do so before.
        """
        self.expect_end()
        self._handler.end_pause()
        self.hang_up()

    def expect_end(self) -> None:
        """Have kazoo's threads end with this connection, instead of making another one."""
        self.client._stopped.set()  # noqa: SLF001 - kazoo's stop() blocks until its threads have ended


class _Client(KazooClient):  # type: ignore[misc]  # kazoo has no types
    """kazoo's client, which can be interrupted by Ctrl-C while a request is handed over."""

    def _call(self, request: Any, async_object: Any) -> Any:  # noqa: ANN401 - kazoo's
        # kazoo's own takes a KeyboardInterrupt for a failed send, so the interrupt is lost; and if it comes between
        # queue and pipe, kazoo's thread is told of one request less than there are, and answers lag behind for good.
        if self.client_state in CLOSED_STATES:
            return super()._call(request, async_object)
        self._queue.append((request, async_object))
        try:
            self._tell(async_object)
        except BaseException:
            self._tell(async_object)  # twice does no harm
            raise
        return None

    def _tell(self, async_object: Any) -> None:  # noqa: ANN401 - kazoo's
        """Wake kazoo's thread through its pipe, which holds some hundred bytes: without waiting for room."""
        try:
            self._connection.wake()
        except (OSError, AttributeError):  # closed meanwhile, and then None
            async_object.set_exception(ConnectionClosedError("Connection has been closed"))


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's threads, with shorter patience and a memory of what went wrong."""

    def __init__(self, round_failed: Callable[[], None]) -> None:
        super().__init__()
        self._round_failed = round_failed
        self._pause = threading.Event()
        self._socket: socket.socket | None = None
        self._again: Callable[[], socket.socket] | None = None
        self.last_error: BaseException | None = None

    def stop(self) -> None:
        """Have the worker threads end. kazoo's own waits for them, and one may stand still in a callback."""
        self._workers.clear()
        super().stop()

    def sleep_func(self, seconds: float) -> None:
        """Pause between two rounds over the members: kazoo calls it when a connection broke, or none could be made."""
        if self.last_error is not None:
            self._round_failed()
        self._pause.wait(seconds)

    def end_pause(self) -> None:
        """Do not pause any more."""
        self._pause.set()

    def create_connection(
        self, address: tuple[str, int], hostname: str = "", timeout: float = CONNECT_SECONDS, **tls: Any
    ) -> socket.socket:
        """Connect, in a few seconds rather than within the session timeout. kazoo's own leaves sockets open."""
        self._again = partial(self.create_connection, address, hostname, timeout, **tls)
        try:
            plain = socket.create_connection(address, min(timeout, CONNECT_SECONDS))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = _encrypted(plain, hostname, tls) if tls.get("use_ssl") else plain
        except OSError as error:
            self.last_error = error
            raise
        except ValueError as error:  # a host name that cannot be one: kazoo's thread would end
            self.last_error = error
            raise OSError(str(error)) from error
        self.last_error = None
        return self._socket

    def connect_again(self) -> socket.socket:
        """Make another connection to the member that was last connected to."""
        assert self._again is not None
        return self._again()

    def hang_up(self) -> None:
        """See `Driver.hang_up`. kazoo closes the socket itself, in its own thread."""
        if self._socket is not None:
            with suppress(OSError):  # it has ended already
                self._socket.shutdown(socket.SHUT_RDWR)


def _encrypted(plain: socket.socket, hostname: str, tls: Mapping[str, Any]) -> socket.socket:
    """Begin TLS, with kazoo's options for it; the socket is closed if that fails."""
    try:
        context = ssl.create_default_context(cafile=tls.get("ca"))
        context.check_hostname = tls.get("check_hostname", False)
        context.verify_mode = ssl.CERT_REQUIRED if tls.get("verify_certs", True) else ssl.CERT_NONE
        if tls.get("certfile"):
            context.load_cert_chain(tls["certfile"], tls.get("keyfile"), tls.get("keyfile_password"))
        plain.getpeername()  # of a socket that was reset meanwhile wrap_socket makes one that it does not close
        return context.wrap_socket(plain, server_hostname=hostname)
    except BaseException:
        plain.close()
        raise


class _Connection(ConnectionHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's connection: tells what was negotiated, never blocks who asks, and cleans up after its thread."""

    ended: Callable[[], None]
    _socket: Any
    session_seconds = 0.0
    _refused = False
    _overfull = False

    def zk_loop(self) -> None:
        """Run, in kazoo's thread; with it the others end, and the pipe is closed, whatever it ended of."""
        try:
            super().zk_loop()
        except Exception as error:  # noqa: BLE001 - kazoo has logged it, and told its listeners that it is closed
            self.handler.last_error = error
        finally:
            self.handler.stop()
            self.close()
            self.ended()

    def wake(self) -> None:
        """Have the thread look at the queue. Raises OSError or AttributeError when the pipe is closed."""
        try:
            self._write_sock.send(b"\0", socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._overfull = True  # kazoo takes one request for each byte: see below

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        super()._send_request(read_timeout, connect_timeout)
        if self._overfull:
            self._overfull = False
            if self.client._queue:  # noqa: SLF001 - kazoo's own classes do
                self._overfull = True
                self.wake()

    def _expand_client_hosts(self) -> Any:  # noqa: ANN401 - kazoo's
        found = super()._expand_client_hosts()
        if not found:
            self.handler.last_error = OSError("none of the host names is known")
        return found

    def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:  # noqa: ANN401 - kazoo's
        """Send one of the requests with which a connection begins, and read its answer."""
        try:
            answer = super()._invoke(min(timeout, ANSWER_SECONDS), request, xid)
        except ConnectionDropped:
            self._refused = isinstance(request, Connect)
            raise
        if isinstance(request, Connect):
            self.session_seconds = max(0, answer[0].time_out) / 1000
        return answer

    def _connect(self, host: str, hostip: str, port: int) -> Any:  # noqa: ANN401 - kazoo's
        self._refused = False
        try:
            timeouts = super()._connect(host, hostip, port)
        except ConnectionDropped:
            if self._refused and self.client.last_zxid > 0 and self._lost_its_data():
                message = "the ensemble came back with older data than this session has seen"
                raise SessionExpiredError(message) from None
            raise
        if self.client._stopped.is_set():  # noqa: SLF001 - kazoo looks at it between connections only
            message = "stopped while connecting"
            raise ConnectionDropped(message)
        return timeouts

    def _lost_its_data(self) -> bool:
        """
        Tell whether the ensemble, which refuses us, has gone back behind what we have seen.

        A server closes the connection of a client that has seen a later transaction than itself
        (``ZooKeeperServer.processConnectRequest``), whether it only lags behind or was restarted empty or from an older
        snapshot: then for ever. A new session needs the majority and is the latest transaction when its member answers,
        so if that comes before what we have seen, the majority has lost it.
        """
        client = self.client
        self._socket.close()
        try:
            with self._socket_error_handling():
                self._socket = self.handler.connect_again()
            self._socket.settimeout(0)
            begin = Connect(0, 0, client._session_timeout, 0, bytes(16), False)  # noqa: SLF001, FBT003 - as kazoo does
            super()._invoke(ANSWER_SECONDS, begin)
            self._submit(PingInstance, ANSWER_SECONDS, PING_XID)
            header, _, _ = self._read_header(ANSWER_SECONDS)
            self._submit(CloseInstance, ANSWER_SECONDS, 1)
        except (ConnectionDropped, KazooTimeoutError):
            return False
        return bool(0 < header.zxid < client.last_zxid)
