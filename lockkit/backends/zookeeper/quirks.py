"""
What reaches into kazoo's private parts, checked with kazoo 2.11.0.

kazoo has no public way to do any of this. Each entry says what it changes and why, names kazoo's issue (where one is
known), and the test that fails without it: in ``tests/backends/zookeeper/test_quirks.py`` unless another file is named.
If a later kazoo changes one of these parts, that test fails, or importing this module or opening a client does.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Any

from kazoo.client import CLOSED_STATES, KazooClient
from kazoo.exceptions import ConnectionClosedError, ConnectionDropped, SessionExpiredError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.connection import PING_XID, ConnectionHandler
from kazoo.protocol.serialization import Close, CloseInstance, Connect, Create2, GetChildren, PingInstance, Sync
from kazoo.security import OPEN_ACL_UNSAFE

from lockkit.units import Seconds

EPHEMERAL, SEQUENCE, CONTAINER = 1, 2, 4
"""ZooKeeper's ``CreateMode`` flags."""

WAKE_UPS_MAX = 65_536
"""Bytes in the socket pair that wakes kazoo's thread, at most: they are read at once."""

_LENGTH = struct.Struct("!i")
_XID_AND_TYPE = struct.Struct("!ii")


# -- requests without a method in kazoo, or in one message with another -----------------------------------------------


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


def create_and_list(client: Any, path: str, data: bytes) -> list[Any]:  # noqa: ANN401 - kazoo has no types
    """Create a sequential ephemeral node, and list its directory."""
    create = Create2(path, data, _acl(client), EPHEMERAL | SEQUENCE)
    return client.hand_over(create, GetChildren(path.rpartition("/")[0], None))  # type: ignore[no-any-return]


def sync_and_list(client: Any, path: str, watch: Callable[[Any], None] | None) -> Any:  # noqa: ANN401 - kazoo's
    """Have the member catch up, as `sync` does, and list a directory; give the result of the second."""
    return client.hand_over(Sync("/"), GetChildren(path, watch))[1]


def create_directory(client: Any, path: str, *, container: bool) -> Any:  # noqa: ANN401 - kazoo has no types
    """Create an empty persistent node, or a container node."""
    kind, flags = (_CreateContainer, CONTAINER) if container else (Create2, 0)
    return client.hand_over(kind(path, b"", _acl(client), flags))[0]


def _acl(client: Any) -> Any:  # noqa: ANN401 - kazoo has no types
    return client.default_acl or OPEN_ACL_UNSAFE


def sync(client: Any) -> Any:  # noqa: ANN401 - kazoo has no types
    """Have the member that the client is connected to catch up with its leader. Only the leader answers."""
    return client.hand_over(Sync("/"))[0]  # ZooKeeper ignores the path


def end_session(client: Any) -> Any:  # noqa: ANN401 - kazoo has no types
    """Ask the server to end the session. Test: ``test_end_of_a_session_is_answered``."""
    return client.hand_over(_EndSession())[0]


# -- the client --------------------------------------------------------------------------------------------------------


def login_of(client: Any) -> dict[str, Any]:  # noqa: ANN401 - kazoo has no types
    """
    Give the SASL options of an application's client, which kazoo keeps in a private part.

    Test: ``test_backend.py::TestAdopted::test_login_is_the_client_s``.
    """
    options = client._connection.sasl_options  # noqa: SLF001 - see above
    return {} if options is None else {"sasl_options": options}


class BoundedClient(KazooClient):  # type: ignore[misc]  # kazoo has no types
    """kazoo's client, with a `BoundedConnectionHandler`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        kazoos_own = self._connection
        self._connection: Any = BoundedConnectionHandler(
            self, kazoos_own.retry_sleeper, logger=self.logger, sasl_options=kazoos_own.sasl_options
        )

    def _call(self, request: Any, async_object: Any) -> None:  # noqa: ANN401 - kazoo's
        self._hand_over([(request, async_object)])

    def hand_over(self, *requests: Any) -> list[Any]:
        """Have requests sent, in one message; give their results."""
        entries = [(request, self.handler.async_result()) for request in requests]
        self._hand_over(entries)
        return [result for _, result in entries]

    def _hand_over(self, entries: Sequence[tuple[Any, Any]]) -> None:
        if self.client_state in CLOSED_STATES:
            for entry in entries:
                super()._call(*entry)
            return
        self._queue.extend(entries)
        try:
            self._connection.wake()
        except (OSError, AttributeError):  # closed meanwhile, and then None
            for _, result in entries:
                result.set_exception(ConnectionClosedError("Connection has been closed"))

    def end_with_connection(self) -> None:
        """
        Have kazoo's thread end when the connection ends, instead of making another one. Returns at once.

        ``KazooClient.stop`` waits until its threads have ended, and one may hang in a name lookup (python-zk/kazoo#582,
        #147). Test: ``test_sessions.py::TestKazoosThread::test_thread_that_hangs_in_a_name_lookup_delays_nobody``.
        """
        self._stopped.set()


class BoundedConnectionHandler(ConnectionHandler):  # type: ignore[misc]  # kazoo has no types
    """
    kazoo's connection and its thread, bounded where a lock needs it.

    - It tells the session timeout that the server granted, which kazoo only logs (python-zk/kazoo#769).
      Test: ``test_sessions.py::TestManySessions``.
    - Each answer during the login is awaited for a few seconds, not for the session timeout: a member that hangs must
      not cost the session that another member would have kept (python-zk/kazoo#756). Test: ``test_login_is_bounded``.
    - Handing over a request never blocks: kazoo wakes its thread through a socket pair that holds some hundred bytes,
      one for each request (python-zk/kazoo#577). Here one byte has the thread send all requests. So a Ctrl-C between
      queue and socket pair delays a request until the next one; with kazoo each later answer would be one request late.
      Test: ``test_sessions.py::TestKazoosThread::test_thread_that_hangs_in_a_name_lookup_delays_nobody``.
    - The thread cleans up and reports its end, whatever the cause. kazoo leaves its sockets behind.
      Test: ``test_sessions.py::TestKazoosThread::test_thread_that_died_costs_its_leases_and_no_more``.
    - An unknown host name is an error to report. kazoo only logs it.
      Test: ``test_sessions.py::TestKazoosThread::test_unknown_host_is_an_error_that_says_so``.
    - An ensemble that came back with older data refuses every client that has seen newer data, for ever
      (python-zk/kazoo#42): that ends the session. Test: the fault suite's ``test_restart_without_data``.
    - A client that was stopped while it connected does not keep that connection.
      Test: ``test_client_stopped_while_connecting_does_not_connect``.

    It reports to its handler, `lockkit.backends.zookeeper.connection.Connection`.
    """

    _xid: Any
    _socket: Any

    def zk_loop(self) -> None:
        """Run, in kazoo's thread. Afterwards close the socket pair."""
        try:
            super().zk_loop()
        except Exception as error:  # noqa: BLE001 - kazoo has logged it, and reported to its listeners that it is closed
            self.handler.last_error = error
        finally:
            self.handler.stop()
            self.close()
            self.handler.ended()

    def wake(self) -> None:
        """Have the thread look at the queue. Raises OSError or AttributeError when the socket pair is closed."""
        try:
            self._write_sock.send(b"\0", socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # enough wake-ups are there

    def _send_request(self, read_timeout: Seconds, connect_timeout: Seconds) -> None:
        """Send all that is in the queue, in kazoo's thread, which was woken."""
        del read_timeout
        queue, pending = self.client._queue, self.client._pending  # noqa: SLF001 - kazoo's own classes do
        self._read_sock.recv(WAKE_UPS_MAX)  # first: what comes from now on wakes the thread again
        frames, count = bytearray(), len(queue)
        for request, result in [queue[index] for index in range(count)]:
            self._xid = self._xid % 2147483647 + 1
            frame = _XID_AND_TYPE.pack(self._xid, request.type) + request.serialize()
            frames += _LENGTH.pack(len(frame)) + frame
            pending.append((request, result, self._xid))
        for _ in range(count):
            queue.popleft()
        self._write(bytes(frames), connect_timeout)

    def _read_socket(self, read_timeout: Seconds) -> Any:  # noqa: ANN401 - kazoo's
        """Read an answer, and those that came in the same record of TLS: `select` does not see them."""
        response = super()._read_socket(read_timeout)
        while response is None and isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            response = super()._read_socket(read_timeout)
        return response

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
            if isinstance(request, Connect):
                self.handler.refusal = error
                if self.client.last_zxid > 0 and self._ensemble_lost_data():
                    message = "the ensemble came back with older data than this session has seen"
                    raise SessionExpiredError(message) from None
            raise
        if isinstance(request, Connect):
            self.handler.session_seconds = max(0, answer[0].time_out) / 1000
        return answer

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

    def _connect(self, host: str, hostip: str, port: int) -> Any:  # noqa: ANN401 - kazoo's
        timeouts = super()._connect(host, hostip, port)
        if self.client._stopped.is_set():  # noqa: SLF001 - kazoo looks at it between connections only
            raise ConnectionDropped("stopped while connecting")
        self.handler.refusal = None
        return timeouts
