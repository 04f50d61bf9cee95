"""
A kazoo client for a session of lockkit's own, and how to wait for its answers.

kazoo connects, keeps the session alive and reads answers in a thread for each client. Here connecting gets shorter
timeouts and an end that nobody waits for, and kazoo's log carries no passwords. What needs kazoo's private parts is in
`lockkit.backends.zookeeper.quirks`.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakMethod

from kazoo.exceptions import ConnectionLoss, KazooException
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.retry import KazooRetry

from lockkit.backends.zookeeper.quirks import (
    Answer,
    InterruptibleClient,
    OneThreadHandler,
    end_with_connection,
    release_lock,
)
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, Runtime

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
    waited = False
    try:
        await _wait(runtime, result, max(0.0, seconds))
        waited = True
        return result.get_nowait()
    except (KazooException, KazooTimeoutError):
        raise
    except BaseException as error:
        if not isinstance(result, Answer):
            release_lock(result)
        if not waited or not isinstance(error, Exception):
            raise  # it struck the caller: an interrupt, or a time limit that a signal handler raises
        # kazoo passes on any exception of its thread: of an answer that it could not read, for example.
        message = f"kazoo failed to read the answer: {error!r}"
        raise ConnectionLoss(message) from error


async def _wait(runtime: Runtime, result: Any, seconds: float) -> None:  # noqa: ANN401 - kazoo has no types
    if isinstance(result, Answer):
        if not result.done:
            event = (runtime if can_wait(runtime) else BlockingRuntime()).event()  # kazoo's thread still answers
            result.when_done(event.set)
            await event.wait(seconds)
    elif runtime.kind == "blocking" or not can_wait(runtime):  # kazoo's threads still answer
        result.wait(seconds)
    else:
        done = runtime.event()
        when_done(result, done.set)
        await done.wait(seconds)


def when_done(result: Any, callback: Callable[[], None]) -> None:  # noqa: ANN401 - kazoo has no types
    """Call back in a thread of kazoo's, or now, when a request has been answered or has failed."""
    if isinstance(result, Answer):
        result.when_done(callback)
    else:
        result.rawlink(lambda _: callback())


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


class Connection(OneThreadHandler):
    """
    A kazoo client that lockkit starts and stops, and its thread, with shorter timeouts.

    Attributes:
        client: kazoo's.
        answer_seconds: Longest wait for each answer during the login.
        ended: To be called in kazoo's connection thread when that ends.
        last_error: Why the last attempt to connect failed; None after one that succeeded.
        refusal: With what a member closed the last connection, if it did not begin a session.
        session_seconds: Session timeout that the server granted; 0 before the first connection.
    """

    answer_seconds = ANSWER_SECONDS

    def __init__(
        self,
        arguments: Mapping[str, Any],
        session_seconds: float,
        round_failed: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        """Make it; nothing is sent."""
        super().__init__()
        self._round_failed = round_failed
        self.ended = ended
        self._pause = threading.Event()
        self._socket: socket.socket | None = None
        self._connect_again: Callable[[], socket.socket] | None = None
        self.last_error: BaseException | None = None
        self.refusal: BaseException | None = None
        self.session_seconds = 0.0
        retry = {"delay": 0.05, "backoff": 2, "max_delay": RECONNECT_PAUSE_SECONDS_MAX, "sleep_func": self.sleep_func}
        self.client: Any = InterruptibleClient(
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

    def expect_end(self) -> None:
        """Have kazoo's thread end with the connection, instead of making another one."""
        end_with_connection(self.client)

    def end(self) -> None:
        """
        Have kazoo's thread end; returns at once.

        The server does not know: it ends the session after its timeout, unless it was asked to end it before.
        """
        self.expect_end()
        self._pause.set()
        self.hang_up()

    def drop(self, process: int) -> None:
        """Do the same as `end` for a client that was not closed; nothing in a child of the process that made it."""
        if os.getpid() == process:
            self.end()

    # -- connecting, in kazoo's thread -----------------------------------------------------------------------------

    def sleep_func(self, seconds: float) -> None:
        """Pause between two rounds over the members: kazoo calls it when a connection broke, or none could be made."""
        if self.last_error is not None:
            self._round_failed()
        self._pause.wait(seconds)

    def create_connection(
        self, address: tuple[str, int], hostname: str = "", timeout: float = CONNECT_SECONDS, **tls: Any
    ) -> socket.socket:
        """Connect within a few seconds instead of the session timeout, and close the socket if that fails."""
        self._connect_again = partial(self.create_connection, address, hostname, timeout, **tls)
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

    def connect_again(self) -> socket.socket:
        """Make another connection to the member that was last connected to."""
        assert self._connect_again is not None
        return self._connect_again()


def _encrypted(plain: socket.socket, hostname: str, tls: Mapping[str, Any]) -> socket.socket:
    """Begin TLS, with kazoo's options for it; the socket is closed if that fails."""
    try:
        context = ssl.create_default_context(cafile=tls.get("ca"))
        context.check_hostname = tls.get("check_hostname", False)
        context.verify_mode = ssl.CERT_REQUIRED if tls.get("verify_certs", True) else ssl.CERT_NONE
        if tls.get("certfile"):
            context.load_cert_chain(tls["certfile"], tls.get("keyfile"), tls.get("keyfile_password"))
        plain.getpeername()  # wrap_socket leaves the socket open if the peer has reset it meanwhile
        return context.wrap_socket(plain, server_hostname=hostname)
    except BaseException:
        plain.close()
        raise
