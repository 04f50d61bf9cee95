"""
A kazoo client for a session of lockkit's own, and how to wait for its answers.

kazoo connects, keeps the session alive and reads answers in a thread for each client. Here connecting gets shorter
timeouts and an end that nobody waits for, and kazoo's log carries no passwords. What needs kazoo's private parts is in
`lockkit.backends.zookeeper.quirks`.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from typing import Any
from weakref import WeakMethod

from kazoo.exceptions import ConnectionLoss, KazooException
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.retry import KazooRetry

from lockkit.backends.zookeeper.quirks import BoundedClient
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, Runtime
from lockkit.units import Seconds

CONNECT_SECONDS = 2.0
"""For a TCP connection. Longer delays callers and the change to another member."""

ANSWER_SECONDS = 2.5
"""For an answer. Longer delays callers while a member hangs; shorter gives up on a member that is only busy."""

RECONNECT_PAUSE_SECONDS_MAX = 1.0
"""Longest pause between two rounds over all members. Longer notices later that they are back; kazoo's own goes up to an
hour."""

log = logging.getLogger("lockkit.kazoo")


def _filter_log(record: logging.LogRecord) -> bool:
    """Keep passwords out of the log, and outages quiet: lockkit itself logs what they mean for locks."""
    if record.levelno < logging.INFO:
        return False  # every request, also those that carry a password
    if record.levelno <= logging.WARNING:
        # Several for each attempt of each client to connect.
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
    return log.isEnabledFor(record.levelno)


log.addFilter(_filter_log)


async def outcome(runtime: Runtime, result: Any, seconds: float = ANSWER_SECONDS) -> Any:  # noqa: ANN401 - kazoo's
    """Wait for the result of a request to kazoo."""
    if not result.ready():
        answered = (runtime if can_wait(runtime) else BlockingRuntime()).event()  # kazoo's thread still answers
        result.rawlink(lambda _: answered.set())
        await answered.wait(max(0.0, seconds))
    try:
        return result.get_nowait()
    except (KazooException, KazooTimeoutError):
        raise
    except Exception as error:
        # kazoo passes on any exception of its thread: of an answer that it could not read, for example.
        message = f"kazoo failed to read the answer: {error!r}"
        raise ConnectionLoss(message) from error


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """
    Give a function that calls a method for as long as its object lives.

    kazoo's thread lives as long as the connection. With the method itself it would keep a client that was dropped, and
    with it the connection and the session, to the end of the process.
    """
    reference = WeakMethod(method)

    def call(*arguments: Any) -> None:
        found = reference()
        if found is not None:
            found(*arguments)

    return call


def can_wait(runtime: Runtime) -> bool:
    """Tell whether the runtime can wait: no event loop runs any more when the interpreter exits."""
    return not isinstance(runtime, AsyncioRuntime) or (runtime.loop is not None and runtime.loop.is_running())


class Answer:
    """
    The result of a request, with those methods of kazoo's ``AsyncResult`` that kazoo's connection and lockkit call.

    It calls back in the thread that read the answer. It has no lock that an interrupt (Ctrl-C) of the caller could
    leave taken: kazoo's thread would wait for it, and send no heartbeat.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_value")

    def __init__(self) -> None:
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Answer], None]] = []

    def ready(self) -> bool:
        return self._done

    def set(self, value: Any = None) -> None:  # noqa: ANN401 - kazoo's
        self._value = value
        self._finish()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._done = True
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread has it, see `rawlink`
                return
            callback(self)

    def rawlink(self, callback: Callable[[Answer], None]) -> None:
        """Call back once, when it is answered, in kazoo's thread; or now."""
        self._callbacks.append(callback)
        if self._done:  # looked at again: kazoo's thread may have missed the callback
            self._finish()

    def get_nowait(self) -> Any:  # noqa: ANN401 - kazoo's
        if not self._done:
            raise KazooTimeoutError
        if self._error is not None:
            raise self._error
        return self._value


class Connection(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """
    A kazoo client that lockkit starts and stops, and its only thread, with shorter timeouts.

    kazoo's own handler has two more threads, which call back, and joins them when it stops (python-zk/kazoo#147, #426).
    lockkit's callbacks neither block nor wait for an answer, so the thread that reads calls them.
    """

    answer_seconds = ANSWER_SECONDS  # longest wait for each answer during the login

    def __init__(
        self,
        arguments: Mapping[str, Any],
        session_seconds: float,
        round_failed: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        """Make it; nothing is sent. Both functions are called in kazoo's thread, `ended` at its end."""
        super().__init__()
        self._round_failed = round_failed
        self.ended = ended
        self._pause = threading.Event()
        self._socket: socket.socket | None = None
        self.connect_again: Callable[[], socket.socket]  # makes another connection to the same member
        self.last_error: BaseException | None = None  # why the last attempt to connect failed, unless it succeeded
        self.refusal: BaseException | None = None  # with what a member closed a connection in place of a session
        self.session_seconds = 0.0  # session timeout that the server granted; 0 before the first connection
        retry = {"delay": 0.05, "backoff": 2, "max_delay": RECONNECT_PAUSE_SECONDS_MAX, "sleep_func": self.sleep_func}
        self.client: Any = BoundedClient(
            timeout=session_seconds,
            handler=self,
            connection_retry=KazooRetry(max_tries=-1, **retry),
            command_retry=KazooRetry(max_tries=1, **retry),
            logger=log,
            **arguments,
        )

    # -- ending ----------------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Break the connection, so that kazoo connects to another member. The session stays."""
        if self._socket is not None:
            with suppress(OSError):  # it has ended already
                self._socket.shutdown(socket.SHUT_RDWR)  # kazoo's thread closes it

    def end(self) -> None:
        """
        Have kazoo's thread end; returns at once.

        The server does not know: it ends the session after its timeout, unless it was asked to end it before.
        """
        self.client.end_with_connection()
        self._pause.set()
        self.hang_up()

    def drop(self, process: int) -> None:
        """Do the same as `end` for a client that was not closed; nothing in a child of the process that made it."""
        if os.getpid() == process:
            self.end()

    # -- what kazoo calls ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start no thread: the connection has its own."""
        self._running = True

    def stop(self) -> None:
        self._running = False

    def async_result(self) -> Answer:
        return Answer()

    def dispatch_callback(self, callback: Any) -> None:  # noqa: ANN401 - kazoo's
        """Call what watches a node, in kazoo's connection thread."""
        try:
            callback.func(*callback.args)
        except Exception:
            log.exception("a callback of lockkit failed")

    def select(
        self, readers: Sequence[Any], writers: Sequence[Any], _: Sequence[Any], timeout: Seconds | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Wait as `select.select` does. kazoo's own makes a selector each time, which takes longer than a request."""
        poll = select.poll()
        for one in readers:
            poll.register(one, select.POLLIN)
        for one in writers:
            poll.register(one, select.POLLOUT)
        ready = {fd for fd, _ in poll.poll(None if timeout is None else ceil(timeout * 1000))}
        return [one for one in readers if one.fileno() in ready], [one for one in writers if one.fileno() in ready], []

    def sleep_func(self, seconds: float) -> None:
        """Pause between two rounds over the members: kazoo calls it when a connection broke, or none could be made."""
        if self.last_error is not None:
            self._round_failed()
        self._pause.wait(seconds)

    def create_connection(
        self, address: tuple[str, int], hostname: str = "", timeout: float = CONNECT_SECONDS, **tls: Any
    ) -> socket.socket:
        """Connect within a few seconds instead of the session timeout, and close the socket if that fails."""
        self.connect_again = partial(self.create_connection, address, hostname, timeout, **tls)
        try:
            plain = socket.create_connection(address, min(timeout, CONNECT_SECONDS))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = _encrypted(plain, hostname, tls) if tls.get("use_ssl") else plain
        except OSError as error:
            self.last_error = error
            raise
        except ValueError as error:  # an impossible host name: kazoo's thread would end
            self.last_error = error
            raise OSError(str(error)) from error
        self.last_error = None
        return self._socket


def _encrypted(plain: socket.socket, hostname: str, tls: Mapping[str, Any]) -> socket.socket:
    """Begin TLS, with kazoo's options for it; the socket is closed if that fails."""
    try:
        context = ssl.create_default_context(cafile=tls.get("ca"))
        context.check_hostname = tls.get("check_hostname", False)
        context.verify_mode = ssl.CERT_REQUIRED if tls.get("verify_certs", True) else ssl.CERT_NONE
        if tls.get("certfile"):
            context.load_cert_chain(tls["certfile"], tls.get("keyfile"), tls.get("keyfile_password"))
        return context.wrap_socket(plain, server_hostname=hostname)
    except BaseException:
        plain.close()
        raise
