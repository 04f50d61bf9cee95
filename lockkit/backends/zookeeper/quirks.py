"""
What reaches into kazoo's private parts, checked with kazoo 2.11.0.

kazoo has no public way to do any of this. Each entry says what it changes and why, names kazoo's issue (where one is
known), and the test that fails without it: in ``tests/backends/zookeeper/test_quirks.py`` unless another file is named.
If a later kazoo changes one of these parts, that test fails, or importing this module or opening a client does.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from kazoo.client import CLOSED_STATES, KazooClient
from kazoo.exceptions import ConnectionClosedError, ConnectionDropped, SessionExpiredError
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.connection import PING_XID, ConnectionHandler
from kazoo.protocol.serialization import Close, CloseInstance, Connect, Create2, PingInstance, Sync
from kazoo.security import OPEN_ACL_UNSAFE

from lockkit.runtime import let_go

if TYPE_CHECKING:
    from lockkit.units import Seconds

__all__ = [
    "BoundedConnectionHandler",
    "InterruptibleClient",
    "UnjoinedThreadsHandler",
    "create_directory",
    "create_queue_node",
    "end_session",
    "end_with_connection",
    "release_lock",
    "requested_timeout",
    "sync",
]

EPHEMERAL, SEQUENCE, CONTAINER = 1, 2, 4
"""ZooKeeper's ``CreateMode`` flags."""


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


def _submit(client: Any, request: Any) -> Any:  # noqa: ANN401 - kazoo has no types
    """
    Send a request through ``KazooClient._call``, which every method of the client uses.

    Some requests have no method in kazoo (containers, closing with an answer). The methods for others take a detour
    through another of its threads, which costs a waiter time. Tests: all of ``test_backend.py``.
    """
    result = client.handler.async_result()
    client._call(request, result)  # noqa: SLF001 - see above
    return result


def create_queue_node(client: Any, path: str, data: bytes) -> Any:  # noqa: ANN401 - kazoo has no types
    """Create a sequential ephemeral node; the answer is its path and its ``ZnodeStat``."""
    return _submit(client, Create2(client.chroot + path, data, _acl(client), EPHEMERAL | SEQUENCE))


def create_directory(client: Any, path: str, *, container: bool) -> Any:  # noqa: ANN401 - kazoo has no types
    """Create an empty persistent node, or a container node."""
    if container:
        return _submit(client, _CreateContainer(client.chroot + path, b"", _acl(client), CONTAINER))
    return _submit(client, Create2(client.chroot + path, b"", _acl(client), 0))


def _acl(client: Any) -> Any:  # noqa: ANN401 - kazoo has no types
    return client.default_acl or OPEN_ACL_UNSAFE


def sync(client: Any) -> Any:  # noqa: ANN401 - kazoo has no types
    """Have the member that the client is connected to catch up with its leader. Only the leader answers."""
    return _submit(client, Sync("/"))  # ZooKeeper ignores the path


def end_session(client: Any) -> Any:  # noqa: ANN401 - kazoo has no types
    """
    Ask the server to end the session; give kazoo's result, unlike ``KazooClient.stop``.

    Test: ``test_end_of_a_session_is_answered``.
    """
    return _submit(client, _EndSession())


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

    def _call(self, request: Any, async_object: Any) -> Any:  # noqa: ANN401 - kazoo's
        if self.client_state in CLOSED_STATES:
            return super()._call(request, async_object)
        self._queue.append((request, async_object))
        try:
            self._wake_thread(async_object)
        except BaseException:
            self._wake_thread(async_object)  # twice does no harm
            raise
        return None

    def _wake_thread(self, async_object: Any) -> None:  # noqa: ANN401 - kazoo's
        try:
            self._connection.wake()
        except (OSError, AttributeError):  # closed meanwhile, and then None
            async_object.set_exception(ConnectionClosedError("Connection has been closed"))


class UnjoinedThreadsHandler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """
    kazoo's threads, whose end nobody waits for.

    ``SequentialThreadingHandler.stop`` joins the worker threads, and one may hang in a callback of the application
    (python-zk/kazoo#147, #426). Test: ``test_callback_that_hangs_does_not_delay_stopping``.
    """

    def stop(self) -> None:
        """Have the worker threads end."""
        self._workers.clear()
        super().stop()


class BoundedConnectionHandler(ConnectionHandler):  # type: ignore[misc]  # kazoo has no types
    """
    kazoo's connection and its thread, bounded where a lock needs it.

    - It tells the session timeout that the server granted, which kazoo only logs (python-zk/kazoo#769).
      Test: ``test_backend.py::TestSessionTimeout``.
    - Each answer during the login is awaited for a few seconds, not for the session timeout: a member that hangs must
      not cost the session that another member would have kept (python-zk/kazoo#756). Test: ``test_login_is_bounded``.
    - Handing over a request never blocks: kazoo wakes its thread through a socket pair that holds some hundred bytes,
      one for each request (python-zk/kazoo#577).
      Test: ``test_outages.py::TestKazoosThreads::test_thread_that_hangs_in_a_name_lookup_delays_nobody``.
    - The thread cleans up and reports its end, whatever the cause. kazoo leaves its workers and sockets behind.
      Test: ``test_outages.py::TestKazoosThreads::test_thread_that_died_costs_its_leases_and_no_more``.
    - An unknown host name is an error to report. kazoo only logs it.
      Test: ``test_outages.py::TestKazoosThreads::test_unknown_host_is_an_error_that_says_so``.
    - An ensemble that came back with older data refuses every client that has seen newer data, for ever
      (python-zk/kazoo#42): that ends the session. Test: ``test_outages.py::TestOlderData``.
    - A client that was stopped while it connected does not keep that connection.
      Test: ``test_client_stopped_while_connecting_does_not_connect``.

    It reports to its handler, `lockkit.backends.zookeeper.connection.Handler`.
    """

    _socket: Any
    _refused = False
    _pipe_is_full = False

    def zk_loop(self) -> None:
        """Run, in kazoo's thread. Afterwards end kazoo's other threads and close the socket pair."""
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
            self._pipe_is_full = True  # kazoo takes one request from the queue for each byte: see below

    def _send_request(self, read_timeout: Seconds, connect_timeout: Seconds) -> None:
        super()._send_request(read_timeout, connect_timeout)
        if self._pipe_is_full:
            self._pipe_is_full = False
            if self.client._queue:  # noqa: SLF001 - kazoo's own classes do
                self._pipe_is_full = True
                self.wake()

    def _expand_client_hosts(self) -> Any:  # noqa: ANN401 - kazoo's
        found = super()._expand_client_hosts()
        if not found:
            self.handler.last_error = OSError("none of the host names is known")
        return found

    def _invoke(self, timeout: Seconds, request: Any, xid: int | None = None) -> Any:  # noqa: ANN401 - kazoo's
        """Send one of the requests with which a connection begins, and read its answer."""
        try:
            answer = super()._invoke(min(timeout, self.handler.answer_seconds), request, xid)
        except ConnectionDropped:
            self._refused = isinstance(request, Connect)
            raise
        if isinstance(request, Connect):
            self.handler.session_seconds = max(0, answer[0].time_out) / 1000
        return answer

    def _connect(self, host: str, hostip: str, port: int) -> Any:  # noqa: ANN401 - kazoo's
        self._refused = False
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
