"""
A session at ZooKeeper over one connection after the other: callers send, and a thread reads and keeps it alive.

kazoo gives requests and answers their form (`kazoo.protocol.serialization`). Its client is not used: a call of it hands
each request to a thread, and blocks if that hangs in a name lookup (python-zk/kazoo#577, #582); it waits for a hung
member as long as the session timeout (#756); and it never gets over an ensemble that lost its data (#42).
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from math import ceil
from typing import Any

from kazoo import exceptions as kazoo
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.serialization import SASL, Auth, Close, Connect, Ping, Watch

from lockkit.backend import unsent
from lockkit.backends.tls import client_context
from lockkit.runtime import BlockingRuntime, Runtime, monotonic
from lockkit.units import Instant, Seconds

CONNECT_SECONDS = 2.0
"""For a TCP connection. Longer delays callers and the change to another member."""

ANSWER_SECONDS = 2.5
"""For an answer. Longer delays callers while a member hangs; shorter gives up on a member that is only busy."""

PAUSE_SECONDS = 0.05, 1.0
"""First and longest pause between two rounds over all members. Longer notices later that they are back; shorter loads
those that come back."""

TLS_FILES = ("ca", "certfile", "keyfile")

Address = tuple[Any, ...]  # of either family

_LENGTH = struct.Struct("!i")
_XID_AND_TYPE = struct.Struct("!ii")
_HEADER = struct.Struct("!iqi")  # of an answer: xid, zxid, error code
_WATCH_XID, _PING_XID, _AUTH_XID = -1, -2, -4
_XID_MAX = 2**31 - 1
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

log = logging.getLogger("lockkit")


class Answer:
    """
    The answer to a request, with those methods of kazoo's ``AsyncResult`` that `outcome` calls.

    It calls back in the thread that read it. It has no lock that an interrupt (Ctrl-C) of the caller could leave taken:
    that thread would wait for it, and send no heartbeat.
    """

    __slots__ = ("_callback", "_done", "_error", "_value", "session_id")

    def __init__(self, session_id: int = 0) -> None:
        self.session_id = session_id  # of the session in which the request was sent
        self._callback: Callable[[Answer], object] | None = None
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def ready(self) -> bool:
        return self._done

    def finish(self, value: object = None, error: BaseException | None = None) -> None:
        self._value, self._error = value, error
        self._done = True
        if self._callback is not None:
            self._callback(self)

    def rawlink(self, callback: Callable[[Answer], object]) -> None:
        """Call back when it is answered, in the thread that reads; if that is just now, perhaps twice."""
        self._callback = callback
        if self._done:
            callback(self)

    def get_nowait(self) -> Any:  # noqa: ANN401 - of the kind that the request has
        if not self._done:
            raise KazooTimeoutError
        if self._error is not None:
            raise self._error
        return self._value


async def outcome(runtime: Runtime, result: Any, seconds: Seconds = ANSWER_SECONDS) -> Any:  # noqa: ANN401 - an `Answer` or kazoo's
    """Wait for the answer to a request."""
    if not result.ready():
        # At the interpreter's exit no event loop runs any more; the thread that reads still does.
        answered = (BlockingRuntime() if runtime.loop_has_ended() else runtime).event()
        result.rawlink(lambda _: answered.set())
        await answered.wait(max(0.0, seconds))
    try:
        return result.get_nowait()
    except (kazoo.KazooException, KazooTimeoutError):
        raise
    except Exception as error:
        raise kazoo.ConnectionLoss(f"the answer could not be read: {error!r}") from error


class Connection:
    """
    A session, and the connection that it has just now, if any. Requests are answered in their order.

    What begins with ``_on_`` is called in the thread, and must not delay it: no heartbeat is sent meanwhile.
    """

    def __init__(self, arguments: Mapping[str, Any], session_seconds: Seconds, runtime: Runtime) -> None:
        """Connect to nothing yet."""
        self._arguments = arguments
        self._label: str = arguments["hosts"]
        self._runtime = runtime
        self._requested_ms = int(session_seconds * 1000)
        self._mutex = runtime.mutex()
        self._stopped = threading.Event()  # to connect no more, once this connection ends
        self.usable = False  # whether there is a connection just now
        self.id = 0  # the server's name for the session; 0 before the first connection, and after its end
        self.granted_seconds = 0.0  # session timeout that the server granted; 0 before the first connection
        self.ended = False  # the thread has ended, or will: nothing is sent any more
        self._failed_rounds_count = 0  # over all members, in vain
        self._last_error: BaseException | None = None  # why the last attempt to connect failed, unless it succeeded
        self._password = bytes(16)
        self._last_zxid = 0
        self._has_logged_in = False
        self._socket: socket.socket | None = None
        self._heard_at = 0.0
        # Under the mutex, from here on:
        self._xid = 0
        self._pending: dict[int, tuple[Any, Answer, Instant]] = {}  # by xid: and when it was sent
        self._out = bytearray()  # what the socket has not taken yet
        self._sent_at = 0.0

    def _on_change(self) -> None:
        """Learn of a new connection, that all members were tried in vain, or that the thread has ended."""

    def _on_connection(self) -> None:
        """Learn that there is a connection, or that it has ended: the session may live or not."""

    def _on_expired(self) -> None:
        """Learn that the session has ended: the next connection begins another one."""

    def _on_event(self, kind: int, path: str) -> None:
        """Learn that something happened to what is watched."""

    # -- by callers ------------------------------------------------------------------------------------------------

    def send(self, *requests: Any) -> list[Answer]:
        """Send requests in one message, without waiting."""
        bodies = [request.serialize() for request in requests]
        with self._mutex:
            if not self.usable:
                raise unsent(f"no connection to {self._label}") from kazoo.ConnectionLoss()
            answers = [Answer(self.id) for _ in requests]
            self._sent_at = monotonic()
            try:
                for request, body, answer in zip(requests, bodies, answers, strict=True):
                    self._xid = self._xid % _XID_MAX + 1
                    self._pending[self._xid] = request, answer, self._sent_at
                    self._out += _message(self._xid, request.type, body)
                self._flush()
            except BaseException:  # interrupted: nobody knows how much was sent
                self._hang_up()
                raise
        return answers

    def _hang_up(self) -> None:
        """Break the connection, so that the thread connects to another member. The session stays."""
        if (connected := self._socket) is not None:
            with suppress(OSError):  # it has ended already
                # Not that of SSLSocket, which sends in clear text from then on.
                socket.socket.shutdown(connected, socket.SHUT_RDWR)

    def _silent_seconds(self) -> Seconds:
        """For how long no answer has come, though requests wait for one."""
        with self._mutex:
            oldest = next(iter(self._pending.values()), None)
            return 0.0 if oldest is None else monotonic() - max(self._heard_at, oldest[2])

    def _end(self, process: int | None = None) -> None:
        """
        Have the thread end; returns at once. Nothing happens in a child of the process that is given.

        The server does not know: it ends the session after its timeout, unless it was asked to end it before.
        """
        if process in {None, os.getpid()}:
            self._stopped.set()
            self._hang_up()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_seconds, longest = PAUSE_SECONDS
        try:
            while not self._stopped.is_set():
                for host, address in self._addresses():
                    if self._connect(host, address):
                        pause_seconds, _ = PAUSE_SECONDS
                    if self._stopped.is_set():
                        return
                if self._last_error is not None:
                    self._failed_rounds_count += 1
                    self._on_change()
                self._stopped.wait(pause_seconds * self._runtime.random.uniform(0.6, 1.4))
                pause_seconds = min(2 * pause_seconds, longest)
        except kazoo.AuthFailedError as error:
            self._last_error = error
        except Exception as error:
            log.exception("the thread of a connection to %s has ended", self._label)
            self._last_error = error
        finally:
            self._disconnect()
            self._lose_session()
            self.ended = True
            self._on_change()

    def _addresses(self) -> list[tuple[str, Address]]:
        """Look up the members; give the name and address of each."""
        found = []
        for member in self._label.split(","):
            host, _, port = member.rpartition(":")
            host = host.strip("[]")
            try:
                found += [(host, one[4]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
            except (OSError, ValueError) as error:  # an impossible name is a UnicodeError
                self._last_error = OSError(f"the host name {host} is not known: {error}")
        if self._arguments.get("randomize_hosts", True):
            self._runtime.random.shuffle(found)
        return found

    def _connect(self, host: str, address: Address) -> bool:
        """Connect to a member, and stay as long as that lasts; tell whether it came to that."""
        try:
            self._begin(host, address)
        except kazoo.SessionExpiredError:
            self._disconnect()
            self._lose_session()
            return self._connect(host, address)
        except (OSError, ValueError, kazoo.KazooException, struct.error) as error:
            if isinstance(error, kazoo.AuthFailedError) and not self._has_logged_in:
                raise
            self._last_error = error
            return False
        else:
            self._last_error = None
            self._on_connection()
            self._on_change()
            try:
                self._serve()
            except (OSError, KeyError, struct.error) as error:
                log.debug("a connection to %s has ended: %r", host, error)
            return True
        finally:
            self._disconnect()

    def _begin(self, host: str, address: Address) -> None:
        """Connect, begin or continue the session, and log in: each answer is awaited for `ANSWER_SECONDS`."""
        self._socket = _connected(host, address, self._arguments)
        try:
            granted = self._ask_for_session(self.id, self._password, self._last_zxid)
        except OSError as error:
            if self.id and not isinstance(error, TimeoutError) and self._ensemble_lost_data(host, address):
                message = "the ensemble came back with older data than this session has seen"
                raise kazoo.SessionExpiredError(message) from None
            raise
        if granted.time_out <= 0:
            raise (kazoo.SessionExpiredError if self.id else ConnectionRefusedError("the server grants no session"))
        self.id, self._password = granted.session_id, granted.passwd
        self.granted_seconds = granted.time_out / 1000
        self._log_in(host)
        self._has_logged_in = True
        self._socket.setblocking(False)  # noqa: FBT003
        with self._mutex:
            self._out.clear()
            self._heard_at = self._sent_at = monotonic()
            if self._stopped.is_set():
                raise ConnectionAbortedError("stopped while connecting")
            self.usable = True

    def _ask_for_session(self, session_id: int, password: bytes, last_zxid: int) -> Connect:
        request = Connect(0, last_zxid, self._requested_ms, session_id, password, read_only=False).serialize()
        return Connect.deserialize(self._exchange(_LENGTH.pack(len(request)) + request), 0)[0]

    def _ensemble_lost_data(self, host: str, address: Address) -> bool:
        """
        Tell whether the ensemble, which refuses this client, has lost transactions that this client has seen.

        A server closes the connection of a client that has seen a later transaction than the server
        (``ZooKeeperServer.processConnectRequest``). It may only lag behind, or it was restarted empty or from an older
        snapshot and will refuse for ever. A new session needs the majority and is the latest transaction when its
        member answers. So if that comes before what this client has seen, the majority has lost it.
        """
        self._disconnect()
        self._socket = _connected(host, address, self._arguments)
        try:
            self._ask_for_session(0, bytes(16), 0)
            _, zxid, _ = _HEADER.unpack_from(self._exchange(_message(_PING_XID, Ping.type)))
            self._socket.sendall(_message(1, Close.type))
        except OSError:
            return False
        return bool(0 < zxid < self._last_zxid)

    def _log_in(self, host: str) -> None:
        if self._arguments.get("sasl_options") is not None:
            self._log_in_by_sasl(host, {"service": "zookeeper", **self._arguments["sasl_options"]})
        for scheme, credential in self._arguments.get("auth_data", ()):
            self._answered(_AUTH_XID, Auth(0, scheme, credential))

    def _log_in_by_sasl(self, host: str, options: dict[str, Any]) -> None:
        # ZooKeeper has one name for all of its servers (SecurityUtils.java, createSaslClient).
        name = "zk-sasl-md5" if options["mechanism"] == "DIGEST-MD5" else host
        login = import_module("puresasl.client").SASLClient(host=name, **options)  # who uses it has installed it
        challenge = response = None
        xid = 0
        try:
            while not login.complete:
                response = login.process(challenge=challenge)
                if login.complete and not response:
                    break
                xid += 1
                challenge, _ = SASL.deserialize(self._answered(xid, SASL(response or b"")), _HEADER.size)
        except Exception as error:  # of pure-sasl, or the server has closed the connection
            if isinstance(error, TimeoutError) or (isinstance(error, OSError) and not response):
                raise  # it hangs, or has been shown nothing yet: that says nothing about the password
            raise kazoo.AuthFailedError(str(error)) from error
        login.dispose()

    def _answered(self, xid: int, request: Any) -> bytes:  # noqa: ANN401 - kazoo's
        """Send a request of a login; give the answer."""
        answer = self._exchange(_message(xid, request.type, request.serialize()))
        if (error := _header(answer)[2]) is not None:
            raise error
        return answer

    def _exchange(self, message: bytes) -> bytes:
        """Send a message while a connection begins; give the answer."""
        assert self._socket is not None
        self._socket.sendall(message)
        answer = bytearray()
        length = _LENGTH.size
        while len(answer) < length:
            data = self._socket.recv(length - len(answer))
            if not data:
                raise ConnectionResetError("the server has closed the connection")
            answer += data
            if len(answer) == length == _LENGTH.size:
                length += _LENGTH.unpack(answer)[0]
        return bytes(answer[_LENGTH.size :])

    def _serve(self) -> None:
        """Read what comes, and send heartbeats, until the connection ends."""
        member, poll, received = self._socket, select.poll(), bytearray()
        assert member is not None
        while True:
            poll.register(member, select.POLLIN | (select.POLLOUT if self._out else 0))
            dead_at = self._heard_at + self.granted_seconds * 2 / 3
            wake_at = min(self._sent_at + self.granted_seconds / 3, dead_at)
            ready = poll.poll(max(0, ceil((wake_at - monotonic()) * 1000)))
            data = None
            with self._mutex:  # also to read: two threads must not be in one TLS connection
                if not self._out and monotonic() >= self._sent_at + self.granted_seconds / 3:
                    self._out += _message(_PING_XID, Ping.type)
                    self._sent_at = monotonic()
                self._flush()
                if ready:
                    with suppress(*_NOT_NOW):
                        data = member.recv(65_536)
            if data == b"":
                raise ConnectionResetError("the server has closed the connection")
            if data is None:
                if monotonic() >= dead_at:
                    raise TimeoutError("heartbeats were not answered")
                continue
            self._heard_at = monotonic()
            received += data
            while len(received) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
                if len(received) < end:
                    break
                message = bytes(received[_LENGTH.size : end])
                del received[:end]
                self._take(message)

    def _flush(self) -> None:
        """
        Send what the socket takes now. Under the mutex.

        The thread sends the rest: it wakes up, as there are answers to what the socket has taken.
        """
        assert self._socket is not None
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except _NOT_NOW:
            return
        except OSError:
            self._hang_up()  # the thread notices

    def _take(self, message: bytes) -> None:
        xid, zxid, error = _header(message)
        if xid == _WATCH_XID:
            watch, _ = Watch.deserialize(message, _HEADER.size)
            self._on_event(watch.type, watch.path)
        if xid < 0:
            return
        self._last_zxid = max(self._last_zxid, zxid)
        with self._mutex:
            request, answer, _ = self._pending.pop(xid)
        found = None
        if request.type == Close.type:
            self._stopped.set()
            self.id = 0
        elif error is None:
            try:
                found = request.deserialize(message, _HEADER.size)
            except Exception as failure:  # noqa: BLE001 - whoever waits for it gets it
                error = failure
        answer.finish(found, error)

    def _disconnect(self) -> None:
        """Close the connection, if there is one: nothing is sent any more, and what was is not answered."""
        with self._mutex:
            was_usable, self.usable = self.usable, False
            former, self._socket = self._socket, None
            pending, self._pending = self._pending, {}
        if former is not None:
            former.close()
        for _, answer, _ in pending.values():
            answer.finish(error=kazoo.ConnectionLoss())
        if was_usable:
            self._on_connection()

    def _lose_session(self) -> None:
        """Begin another session with the next connection: the server has ended this one."""
        self.id, self._password, self._last_zxid = 0, bytes(16), 0
        self._on_expired()


def _message(xid: int, kind: int, body: bytes = b"") -> bytes:
    return _LENGTH.pack(_XID_AND_TYPE.size + len(body)) + _XID_AND_TYPE.pack(xid, kind) + body


def _header(answer: bytes) -> tuple[int, int, Exception | None]:
    """Give the xid, the zxid, and the error if it is one."""
    xid, zxid, code = _HEADER.unpack_from(answer)
    return xid, zxid, kazoo.EXCEPTIONS.get(code, lambda: kazoo.ZookeeperError(f"error {code}"))() if code else None


def _connected(host: str, address: Address, arguments: Mapping[str, Any]) -> socket.socket:
    """Connect to a member, by TLS if that is asked for."""
    context = tls_context(arguments) if arguments.get("use_ssl") else None
    plain = socket.create_connection(address[:2], CONNECT_SECONDS)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.settimeout(ANSWER_SECONDS)
        if context is None:
            return plain
        plain.getpeername()  # fails if the server has reset it; SSLSocket then would fail too, and stay open
        return context.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise


def tls_context(arguments: Mapping[str, Any]) -> ssl.SSLContext:
    """Read the files, each time: they may have been replaced. A `ValueError` says which are of no use."""
    context = client_context({name: arguments.get(name) for name in TLS_FILES}, arguments.get("keyfile_password"))
    context.check_hostname = arguments.get("check_hostname", False)
    context.verify_mode = ssl.CERT_REQUIRED if arguments.get("verify_certs", True) else ssl.CERT_NONE
    return context
