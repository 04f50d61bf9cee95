"""What the tests of ZooKeeper share: an independent view of the tree, waiters, and access to a client's sessions."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

import lockkit
from lockkit import Lease, aio
from lockkit.backends.zookeeper.backend import ZooKeeperBackend
from lockkit.backends.zookeeper.connection import outcome
from lockkit.backends.zookeeper.session import Session
from lockkit.runtime import BlockingRuntime, drive
from lockkit.sync import Client, Lock
from lockkit_tools.servers import ZooKeeperServer, wait_until

PATIENCE = 60.0


@contextmanager
def kazoo_client(address: str, **options: Any) -> Iterator[KazooClient]:
    """A kazoo client, like that of an operator or another program."""
    client = KazooClient(address, **options)
    client.start(PATIENCE)
    try:
        yield client
    finally:
        client.stop()
        client.close()


@contextmanager
def holding(locks: Iterable[Lock]) -> Iterator[list[Lease]]:
    """Hold free locks, and release them at the end, also if only some of them were granted, or one was lost."""
    with ExitStack() as held:
        leases = []
        for lock in locks:
            leases.append(lock.acquire(PATIENCE))
            held.enter_context(suppress(lockkit.LockLost))
            held.callback(leases[-1].release)
        yield leases


def backend_of(client: Client | aio.Client) -> ZooKeeperBackend:
    """The backend of a client."""
    backend = client._engine.client.backend
    assert isinstance(backend, ZooKeeperBackend)
    return backend


def sessions_of(client: Client | aio.Client) -> list[Session]:
    """The sessions of a client."""
    return [session for session in backend_of(client)._sessions.all() if not session.failed]


def answer(result: object, seconds: float = PATIENCE) -> Any:  # noqa: ANN401 - of the kind that the request has
    """Wait for the answer to a request that was sent over a session of lockkit's."""
    return drive(outcome(BlockingRuntime(), result, seconds))


class Tree:
    """The nodes at the server, as another client sees them."""

    def __init__(self, client: KazooClient) -> None:
        """Use a client."""
        self.client = client

    def nodes(self, directory: str) -> list[str]:
        """The children of a node; none if there is no such node."""
        try:
            return sorted(self.client.get_children(directory))
        except NoNodeError:
            return []

    def until_empty(self, directory: str) -> None:
        """Wait until the queue is empty."""
        self.until_waiting(directory, 0)

    def until_waiting(self, directory: str, count: int) -> None:
        """Wait until the queue has that many nodes, including the holder's."""

        def problem() -> str | None:
            found = self.nodes(directory)
            return None if len(found) == count else f"{found} and not {count} nodes are in the queue"

        wait_until(problem, timeout=PATIENCE)


def packets_count(server: ZooKeeperServer) -> int:
    """How many packets the server has received from clients, this question not counted."""
    lines = (line.split("\t") for line in server.four_letters("mntr").splitlines())
    return int(dict(lines)["zk_packets_received"])


def end_session(server: ZooKeeperServer, client: Client | Session) -> None:
    """
    Have the server end a session, or the only one of a client, as it does when no packet came for too long.

    Connecting to it and ending it are sent together: the client loses its connection by the first, connects again, and
    would take the session back before a second packet came.
    """
    session = client if isinstance(client, Session) else sessions_of(client)[0]
    number, password = session.id, session._password
    connect = struct.pack(f">iqiqi{len(password)}sx", 0, 0, 30_000, number, len(password), password)
    close = struct.pack(">ii", 1, -11)
    with socket.create_connection((server.host, server.port), PATIENCE) as connection:
        connection.sendall(b"".join(struct.pack(">i", len(packet)) + packet for packet in (connect, close)))
        while connection.recv(4096):
            pass
