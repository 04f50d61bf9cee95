"""
What reaches into kazoo's private parts, checked with kazoo 2.11.0.

kazoo has no public way to do any of this. Each entry says what it changes and why, names kazoo's issue (where one is
known), and the test that fails without it: in ``tests/backends/zookeeper/test_quirks.py`` unless another file is named.
If a later kazoo changes one of these parts, that test fails, or importing this module or opening a client does.
"""

from __future__ import annotations

import logging
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from operator import call
from typing import Any

from kazoo.client import CLOSED_STATES, KazooClient
from kazoo.exceptions import ConnectionClosedError, ConnectionDropped, SessionExpiredError
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.connection import CLOSE_RESPONSE, PING_XID, ConnectionHandler
from kazoo.protocol.serialization import (
    Auth,
    Close,
    CloseInstance,
    Connect,
    Create2,
    GetChildren,
    PingInstance,
    Sync,
)
from kazoo.protocol.states import KeeperState
from kazoo.security import OPEN_ACL_UNSAFE

from lockkit.runtime import let_go
from lockkit.units import Seconds

log = logging.getLogger("lockkit.kazoo")

EPHEMERAL, SEQUENCE, CONTAINER = 1, 2, 4
"""ZooKeeper's ``CreateMode`` flags."""

DIRECT_BYTES_MAX = 16_384
"""What a thread sends itself, at most. More would often find no room in the socket; less leaves more to kazoo's thread,
which can wait for room."""

READ_BYTES = 65_536
"""What is read at once. Fewer need more system calls when many answers come together; more needs more memory."""

_LENGTH = struct.Struct("!i")
_XID_AND_TYPE = struct.Struct("!ii")


# -- requests ----------------------------------------------------------------------------------------------------------


class _CreateContainer(Create2):  # type: ignore[misc]  # kazoo has no types
    """ZooKeeper's request ``createContainer`` (since 3.5.3), which kazoo lacks."""

    type = 19


class _EndSession(Close):  # type: ignore[misc]  # kazoo has no types
    """ZooKeeper's request ``closeSession``, whose answer one can wait for."""

    def __bool__(self) -> bool:
        """Be true: kazoo's own request is an empty tuple, and kazoo delivers no answer to a request that is false."""
        return True

    @classmethod
    def deserialize(cls, data: bytes, offset: int) -> bool:
        """Read the answer, which is empty."""
        del data, offset
        return True


def _submit(client: Any, *requests: Any) -> list[Any]:  # noqa: ANN401 - kazoo has no types
    """
    Send requests, in one message where lockkit made the client, else as every method of the client does; give results.

    Some requests have no method in kazoo (containers, closing with an answer). The methods for others take a detour
    through another of its threads, which costs a waiter time. Tests: all of ``test_backend.py``.
    """
    entries = [(request, client.handler.async_result()) for request in requests]
    if isinstance(client, InterruptibleClient):
        client.hand_over(entries)
    else:
        for entry in entries:
            client._call(*entry)  # noqa: SLF001 - see above
    return [result for _, result in entries]


def create_and_list(client: Any, path: str, data: bytes) -> list[Any]:  # noqa: ANN401 - kazoo has no types
    """Create a sequential ephemeral node, and list its directory."""
    path = client.chroot + path
    create = Create2(path, data, _acl(client), EPHEMERAL | SEQUENCE)
    return _submit(client, create, GetChildren(path.rpartition("/")[0], None))


def sync_and_list(client: Any, path: str, watch: Callable[[Any], None] | None) -> Any:  # noqa: ANN401 - kazoo's
    """Have the member catch up, as `sync` does, and list a directory; give the result of the second."""
    return _submit(client, Sync("/"), GetChildren(client.chroot + path, watch))[1]


def create_directory(client: Any, path: str, *, container: bool) -> Any:  # noqa: ANN401 - kazoo has no types
    """Create an empty persistent node, or a container node; the path begins with the client's chroot."""
    kind, flags = (_CreateContainer, CONTAINER) if container else (Create2, 0)
    return _submit(client, kind(path, b"", _acl(client), flags))[0]


def _acl(client: Any) -> Any:  # noqa: ANN401 - kazoo has no types
    return client.default_acl or OPEN_ACL_UNSAFE


def sync(client: Any) -> Any:  # noqa: ANN401 - kazoo has no types
    """Have the member that the client is connected to catch up with its leader. Only the leader answers."""
    return _submit(client, Sync("/"))[0]  # ZooKeeper ignores the path


def end_session(client: Any) -> Any:  # noqa: ANN401 - kazoo has no types
    """
    Ask the server to end the session; give kazoo's result, unlike ``KazooClient.stop``.

    Test: ``test_end_of_a_session_is_answered``.
    """
    return _submit(client, _EndSession())[0]


# -- the client --------------------------------------------------------------------------------------------------------


def requested_timeout(client: Any) -> float:  # noqa: ANN401 - kazoo has no types
    """
    Give the session timeout that a client asks for, seconds.

    kazoo keeps its own argument private. Test: ``test_backend.py::TestAdopted::test_session_stays_the_application_s``.
    """
    milliseconds: int = client._session_timeout  # noqa: SLF001 - see above
    return milliseconds / 1000


def release_lock(result: Any) -> None:  # noqa: ANN401 - kazoo has no types
    """
    Release the lock of a result that an interrupt (Ctrl-C) in ``result.get`` may have left locked.

    kazoo's connection thread needs it to deliver the answer, and would send no heartbeat until it gets it.
    Test: ``test_interrupted_wait_leaves_no_lock_taken``.
    """
    let_go(result._condition)  # noqa: SLF001 - see above


def end_with_connection(client: Any) -> None:  # noqa: ANN401 - kazoo has no types
    """
    Have kazoo's threads end when the connection ends, instead of making another one. Returns at once.

    ``KazooClient.stop`` waits until the threads have ended, and one may hang in a name lookup (python-zk/kazoo#582,
    #147). Test: ``test_outages.py::TestKazoosThreads::test_thread_that_hangs_in_a_name_lookup_delays_nobody``.
    """
    client._stopped.set()  # noqa: SLF001 - see above


class Answer:
    """
    The result of a request, in place of kazoo's ``AsyncResult``.

    kazoo's calls back in a thread of its own, one more change of threads for an answer under asyncio. This one calls
    back in the thread that read the answer. It has no lock that an interrupt may leave taken.
    Test: ``test_session_has_one_thread``.

    Attributes:
        done: Whether it was answered.
    """

    __slots__ = ("_callbacks", "_error", "_value", "done")

    def __init__(self) -> None:
        """Begin without an answer."""
        self.done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def set(self, value: Any = None) -> None:  # noqa: ANN401 - kazoo's
        """Note the answer. kazoo calls this."""
        self._value = value
        self._finish()

    def set_exception(self, error: BaseException) -> None:
        """Note why there is no answer. kazoo calls this."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self.done = True
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread has it, see `when_done`
                return
            callback()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back once, when it is answered, in kazoo's thread; or now."""
        self._callbacks.append(callback)
        if self.done:  # looked at again: kazoo's thread may have missed the callback
            self._finish()

    def get_nowait(self) -> Any:  # noqa: ANN401 - kazoo's
        """Give the answer, as kazoo's result does."""
        if not self.done:
            raise KazooTimeoutError
        if self._error is not None:
            raise self._error
        return self._value


class InterruptibleClient(KazooClient):  # type: ignore[misc]  # kazoo has no types
    """
    kazoo's client, which Ctrl-C may interrupt while it hands over a request.

    kazoo's ``_call`` takes a KeyboardInterrupt for a failed send, so the interrupt is lost. If it strikes between queue
    and pipe, kazoo's thread sends one request fewer than were handed over, and each later answer is one request late.
    Test: ``test_interrupt_while_a_request_is_handed_over``.
    """

    def __init__(self, **arguments: Any) -> None:
        """Make it, with a `BoundedConnectionHandler`; nothing is sent."""
        super().__init__(**arguments)
        kazoos_own = self._connection
        self._connection: Any = BoundedConnectionHandler(
            self, kazoos_own.retry_sleeper, logger=self.logger, sasl_options=kazoos_own.sasl_options
        )

    def _call(self, request: Any, async_object: Any) -> None:  # noqa: ANN401 - kazoo's
        self.hand_over([(request, async_object)])

    def hand_over(self, entries: Sequence[tuple[Any, Any]]) -> None:
        """Send requests, in one message if nothing prevents that. Each comes with its result."""
        if self.client_state in CLOSED_STATES:
            for entry in entries:
                super()._call(*entry)
            return
        try:
            self._queue.extend(entries)
            if not self._connection.send_queued():
                self._wake_thread(entries)
        except BaseException:
            self._wake_thread(entries)  # twice does no harm
            raise

    def _wake_thread(self, entries: Sequence[tuple[Any, Any]]) -> None:
        try:
            self._connection.wake(len(entries))
        except (OSError, AttributeError):  # closed meanwhile, and then None
            for _, result in entries:
                result.set_exception(ConnectionClosedError("Connection has been closed"))

    def _session_callback(self, state: Any) -> None:  # noqa: ANN401 - kazoo's
        """Note a new state. kazoo calls this in its thread, when a connection ends before it closes the socket."""
        if state not in {KeeperState.CONNECTED, KeeperState.CONNECTED_RO}:
            self._connection.leave_to_thread()
        super()._session_callback(state)


class OneThreadHandler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """
    kazoo's connection thread, without its other two.

    Those call back: one for watches, one for answers. Each costs a waiter a change of threads, and
    ``SequentialThreadingHandler.stop`` joins them (python-zk/kazoo#147, #426). lockkit's callbacks neither block nor
    wait for an answer, so the thread that reads calls them. It also waits by one system call instead of five.
    Test: ``test_session_has_one_thread``.
    """

    def start(self) -> None:
        """Start no thread: the connection has its own."""
        self._running = True

    def stop(self) -> None:
        self._running = False

    def async_result(self) -> Answer:
        """Make the result of a request."""
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
        """Wait as `select.select` does. kazoo makes a selector for each call."""
        poll = select.poll()
        for one in readers:
            poll.register(one, select.POLLIN)
        for one in writers:
            poll.register(one, select.POLLOUT)
        found = {fd for fd, _ in poll.poll(None if timeout is None else ceil(timeout * 1000))}
        return [one for one in readers if one.fileno() in found], [one for one in writers if one.fileno() in found], []


class BoundedConnectionHandler(ConnectionHandler):  # type: ignore[misc]  # kazoo has no types
    """
    kazoo's connection and its thread, bounded where a lock needs it, and with fewer changes of threads.

    - It tells the session timeout that the server granted, which kazoo only logs (python-zk/kazoo#769).
      Test: ``test_backend.py::TestSessionTimeout``.
    - Each answer during the login is awaited for a few seconds, not for the session timeout: a member that hangs must
      not cost the session that another member would have kept (python-zk/kazoo#756). Test: ``test_login_is_bounded``.
    - Handing over a request never blocks: kazoo wakes its thread through a socket pair that holds some hundred bytes,
      one for each request (python-zk/kazoo#577).
      Test: ``test_outages.py::TestKazoosThreads::test_thread_that_hangs_in_a_name_lookup_delays_nobody``.
    - The thread cleans up and reports its end, whatever the cause. kazoo leaves its sockets behind.
      Test: ``test_outages.py::TestKazoosThreads::test_thread_that_died_costs_its_leases_and_no_more``.
    - An unknown host name is an error to report. kazoo only logs it.
      Test: ``test_outages.py::TestKazoosThreads::test_unknown_host_is_an_error_that_says_so``.
    - An ensemble that came back with older data refuses every client that has seen newer data, for ever
      (python-zk/kazoo#42): that ends the session. Test: ``test_outages.py::TestOlderData``.
    - A client that was stopped while it connected does not keep that connection.
      Test: ``test_client_stopped_while_connecting_does_not_connect``.
    - The thread that hands over a request sends it: kazoo wakes its own thread for that. Over TLS kazoo's thread does,
      since a TLS connection cannot be read and written at once, and where the socket has no room.
      Test: ``test_requests_are_sent_by_the_thread_that_makes_them``.
    - It reads all answers that have come with one system call, where kazoo needs ten for each.
      Test: ``test_answers_that_come_in_pieces``.

    It reports to its handler, `lockkit.backends.zookeeper.connection.Connection`.
    """

    _socket: Any
    _xid: Any
    _refused = False
    _pipe_is_full = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Make it, without a connection."""
        super().__init__(*arguments, **keywords)
        self._sending = threading.Lock()
        self._sends_directly = False
        self._received = b""
        self._reads_ahead = False

    def zk_loop(self) -> None:
        """Run, in kazoo's thread. Afterwards close the socket pair."""
        try:
            super().zk_loop()
        except Exception as error:  # noqa: BLE001 - kazoo has logged it, and reported to its listeners that it is closed
            self.handler.last_error = error
        finally:
            self.leave_to_thread()
            self.handler.stop()
            self.close()
            self.handler.ended()

    # -- sending ---------------------------------------------------------------------------------------------------

    def wake(self, requests_count: int = 1) -> None:
        """Have the thread look at the queue. Raises OSError or AttributeError when the socket pair is closed."""
        try:
            self._write_sock.send(bytes(requests_count), socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._pipe_is_full = True  # kazoo takes one request from the queue for each byte: see below

    def leave_to_thread(self) -> None:
        """Have kazoo's thread alone send from now on, until `_let_others_send`."""
        with self._sending:
            self._sends_directly = False

    def _let_others_send(self) -> None:
        """Let each thread send its own requests, if nothing is left that must be sent before."""
        with self._sending:
            self._sends_directly = not (self.client._queue or isinstance(self._socket, ssl.SSLSocket))  # noqa: SLF001

    def send_queued(self) -> bool:
        """Send what is in the queue, without waiting; False if kazoo's thread has to."""
        client = self.client
        with self._sending:
            entries = [*client._queue] if self._sends_directly else []  # noqa: SLF001 - kazoo's own classes do
            if not entries:
                return self._sends_directly
            frames, pending = bytearray(), []
            for request, result in entries:
                xid = self._xid % 2147483647 + 1
                self._xid = xid
                frame = _XID_AND_TYPE.pack(xid, request.type) + request.serialize()
                frames += _LENGTH.pack(len(frame)) + frame
                pending.append((request, result, xid))
            self._sends_directly = len(frames) <= DIRECT_BYTES_MAX and all(one[0].type != Auth.type for one in pending)
            if self._sends_directly:
                self._send(frames, pending)
            return self._sends_directly

    def _send(self, frames: bytearray, pending: Sequence[tuple[Any, Any, int]]) -> None:
        """
        Send requests that are first in the queue, and expect their answers.

        One call into C does it all: Python runs signal handlers (Ctrl-C) between its own instructions only. Were the
        requests sent and not noted as sent, or the reverse, then each later answer would be taken for another's.
        """
        client = self.client
        steps = [
            partial(client._pending.extend, pending),  # noqa: SLF001 - first: the answer may come at once
            partial(self._socket.send, frames, socket.MSG_DONTWAIT),
            *[client._queue.popleft] * len(pending),  # noqa: SLF001
        ]
        undo = map(call, [client._pending.pop] * len(pending))  # noqa: SLF001
        undone: list[Any] = []
        try:
            sent_bytes = [*map(call, steps)][1]
        except OSError:  # no room, or the connection has broken: kazoo's thread finds out
            undone += undo
            self._sends_directly = False
            return
        if sent_bytes != len(frames):  # a member that has left so much unread hangs
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _send_request(self, read_timeout: Seconds, connect_timeout: Seconds) -> None:
        """Send what is in the queue, in kazoo's thread."""
        if self.send_queued():
            # One byte and no more: another thread may just have found no room for a request, and left it to this one.
            self._read_sock.recv(1)
            return
        super()._send_request(read_timeout, connect_timeout)
        if self._pipe_is_full:
            self._pipe_is_full = False
            if self.client._queue:  # noqa: SLF001 - kazoo's own classes do
                self._pipe_is_full = True
                self.wake()
        self._let_others_send()

    def _send_ping(self, connect_timeout: Seconds) -> None:
        """Send a heartbeat, in kazoo's thread."""
        self.leave_to_thread()
        super()._send_ping(connect_timeout)
        self._let_others_send()

    # -- receiving -------------------------------------------------------------------------------------------------

    def _read_socket(self, read_timeout: Seconds) -> Any:  # noqa: ANN401 - kazoo's
        """Read all that has come. kazoo calls it when the socket is readable, and needs to be told of the end."""
        self._reads_ahead = True
        try:
            response = super()._read_socket(read_timeout)
            while response != CLOSE_RESPONSE and self._has_more():
                response = super()._read_socket(read_timeout)
        finally:
            self._reads_ahead = False
        return response

    def _has_more(self) -> bool:
        """Whether there is another answer, or part of one, of which select would not tell."""
        return bool(self._received) or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0)

    def _read(self, length: int, timeout: Seconds) -> bytes:
        """Read so many bytes, and more if they are there."""
        while len(self._received) < length:
            missing = length - len(self._received)
            with self._socket_error_handling():
                try:
                    received = self._socket.recv(max(missing, READ_BYTES) if self._reads_ahead else missing)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if not self.handler.select([self._socket], [], [], timeout)[0]:
                        message = "socket time-out during read"
                        raise KazooTimeoutError(message) from None
                    continue
            if not received:
                message = "socket connection broken"
                raise ConnectionDropped(message)
            self._received += received
        found, self._received = self._received[:length], self._received[length:]
        return found

    # -- connecting ------------------------------------------------------------------------------------------------

    def _expand_client_hosts(self) -> Any:  # noqa: ANN401 - kazoo's
        found = super()._expand_client_hosts()
        if not found:
            self.handler.last_error = OSError("none of the host names is known")
        return found

    def _invoke(self, timeout: Seconds, request: Any, xid: int | None = None) -> Any:  # noqa: ANN401 - kazoo's
        """Send one of the requests with which a connection begins, and read its answer."""
        try:
            answer = super()._invoke(min(timeout, self.handler.answer_seconds), request, xid)
        except ConnectionDropped as error:
            self._refused = isinstance(request, Connect)
            if self._refused:
                self.handler.refusal = error
            raise
        if isinstance(request, Connect):
            self.handler.session_seconds = max(0, answer[0].time_out) / 1000
        return answer

    def _connect(self, host: str, hostip: str, port: int) -> Any:  # noqa: ANN401 - kazoo's
        self._refused = False
        self._received = b""
        try:
            timeouts = super()._connect(host, hostip, port)
        except ConnectionDropped:
            if self._refused and self.client.last_zxid > 0 and self._ensemble_lost_data():
                message = "the ensemble came back with older data than this session has seen"
                raise SessionExpiredError(message) from None
            raise
        if self.client._stopped.is_set():  # noqa: SLF001 - kazoo looks at it between connections only
            message = "stopped while connecting"
            raise ConnectionDropped(message)
        self.handler.refusal = None
        self._let_others_send()
        return timeouts

    def _ensemble_lost_data(self) -> bool:
        """
        Tell whether the ensemble, which refuses this client, has lost transactions that this client has seen.

        A server closes the connection of a client that has seen a later transaction than the server
        (``ZooKeeperServer.processConnectRequest``). It may only lag behind, or it was restarted empty or from an older
        snapshot and will refuse for ever. A new session needs the majority and is the latest transaction when its
        member answers. So if that comes before what this client has seen, the majority has lost it.
        """
        client, seconds = self.client, self.handler.answer_seconds
        self._socket.close()
        self._received = b""
        try:
            with self._socket_error_handling():
                self._socket = self.handler.connect_again()
            self._socket.settimeout(0)
            begin = Connect(0, 0, client._session_timeout, 0, bytes(16), False)  # noqa: SLF001, FBT003 - as kazoo does
            super()._invoke(seconds, begin)
            self._submit(PingInstance, seconds, PING_XID)
            header, _, _ = self._read_header(seconds)
            self._submit(CloseInstance, seconds, 1)
        except (ConnectionDropped, KazooTimeoutError):
            return False
        return bool(0 < header.zxid < client.last_zxid)
