"""
kazoo's client, tightened where a lock needs it: bounded connecting, the negotiated session, no secrets in logs.

kazoo connects, keeps the session alive and calls back in threads of its own, three for each client. What it does not
offer is set here:

- Connecting and logging in take a few seconds at most, not a whole session: a member that is stopped must not cost the
  session that another member would have kept.
- The server may change the session timeout that was asked for, and kazoo only logs the answer.
- A member that does not answer is left at once (`Driver.hang_up`), not after two thirds of the session.
- Ctrl-C in the thread that asks is not lost, and leaves kazoo's queue in order.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kazoo.client import CLOSED_STATES, KazooClient
from kazoo.exceptions import ConnectionClosedError
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import Connect
from kazoo.retry import KazooRetry

from lockkit.runtime import let_go

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lockkit.runtime import Runtime

__all__ = ["ANSWER_SECONDS", "CONNECT_SECONDS", "Driver", "outcome"]

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


async def outcome(runtime: Runtime, result: Any) -> Any:  # noqa: ANN401 - kazoo has no types
    """
    Wait for what comes of a request of kazoo's, for `ANSWER_SECONDS`.

    Raises:
        KazooTimeoutError: No answer came.
        KazooException: It is an error.
    """
    if runtime.kind == "blocking":
        try:
            return result.get(timeout=ANSWER_SECONDS)
        except BaseException:
            let_go(result._condition)  # noqa: SLF001 - kazoo's thread takes it to bring the answer, heartbeats and all
            raise
    done = runtime.event()
    result.rawlink(lambda _: done.set())
    if not await done.wait(ANSWER_SECONDS):
        raise KazooTimeoutError
    return result.get_nowait()


class Driver:
    """
    A client of kazoo's that is ours.

    Attributes:
        client: kazoo's.
        last_error: What the last attempt to connect ended in; None after one that succeeded.
    """

    def __init__(self, arguments: Mapping[str, Any], session_seconds: float, round_failed: Callable[[], None]) -> None:
        """
        Make it; nothing is sent.

        Args:
            arguments: For `KazooClient`. **Hold the password.**
            session_seconds: Session timeout to ask for.
            round_failed: Called in kazoo's thread whenever no member could be reached.

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
        """End the session. Blocks: up to the session timeout if the server does not answer."""
        self.client.stop()
        self.client.close()


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
        """Wake kazoo's thread through its pipe."""
        pipe = self._connection._write_sock  # noqa: SLF001 - kazoo's own classes do
        try:
            pipe.send(b"\0")
        except (OSError, AttributeError):  # closed meanwhile, and then None
            async_object.set_exception(ConnectionClosedError("Connection has been closed"))


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's threads, with shorter patience and a memory of what went wrong."""

    def __init__(self, round_failed: Callable[[], None]) -> None:
        super().__init__()
        self._round_failed = round_failed
        self._pause = threading.Event()
        self._socket: socket.socket | None = None
        self.last_error: BaseException | None = None

    def sleep_func(self, seconds: float) -> None:
        """Pause between two rounds over the members: kazoo calls it when a connection broke, or none could be made."""
        if self.last_error is not None:
            self._round_failed()
        self._pause.wait(seconds)

    def create_connection(
        self, address: tuple[str, int], hostname: str = "", timeout: float = CONNECT_SECONDS, **tls: Any
    ) -> socket.socket:
        """Connect, in a few seconds rather than within the session timeout. kazoo's own leaves sockets open."""
        try:
            plain = socket.create_connection(address, min(timeout, CONNECT_SECONDS))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = _encrypted(plain, hostname, tls) if tls.get("use_ssl") else plain
        except OSError as error:
            self.last_error = error
            raise
        self.last_error = None
        return self._socket

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
    """kazoo's connection, which tells what was negotiated."""

    session_seconds = 0.0

    def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:  # noqa: ANN401 - kazoo's
        """Send one of the requests with which a connection begins, and read its answer."""
        answer = super()._invoke(min(timeout, ANSWER_SECONDS), request, xid)
        if isinstance(request, Connect):
            self.session_seconds = max(0, answer[0].time_out) / 1000
        return answer
