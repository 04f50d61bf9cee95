"""The node that lockkit creates for a request: its place in the queue of a lock, then what holds the lock."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockkit.backends.zookeeper.session import Session

__all__ = ["LockNode"]


class LockNode:
    """
    A sequential ephemeral node, from the request that creates it until the server has confirmed that it is gone.

    Attributes:
        session: In which it is created.
        session_id: The session's id then: it gets another one when the server has ended it.
        owner: Of the request, and of the lease.
        directory: Path of the lock's directory.
        name: Its name there; None until the server has said that it created it.
        token: Its ``czxid``; 0 before.
        watched_path: Path of the node before it in the queue, if the server was asked to tell when that goes away.
        asked_at: Client monotonic time before the request whose answer says that it is first, if that request was sent
            before `try_acquire`.
        ttl: Of the lease, as granted, seconds.
        remove_at: When `lockkit.backends.zookeeper.short_leases` removes it, unless it is renewed, client monotonic
            clock.
        missed_at: When it was first looked for by its owner and not found, client monotonic clock; None before.
        watched_over: Number of the connection over which the server was asked to tell when it goes away.
    """

    __slots__ = (
        "asked_at",
        "directory",
        "missed_at",
        "name",
        "owner",
        "remove_at",
        "session",
        "session_id",
        "token",
        "ttl",
        "watched_over",
        "watched_path",
    )

    def __init__(self, session: Session, owner: str, directory: str) -> None:
        """Begin in the session as it is now; not created yet."""
        self.session = session
        self.session_id = session.id
        self.owner = owner
        self.directory = directory
        self.name: str | None = None
        self.token = 0
        self.watched_path: str | None = None
        self.asked_at: float | None = None
        self.ttl = 0.0
        self.remove_at = inf
        self.missed_at: float | None = None
        self.watched_over = -1

    @property
    def path(self) -> str:
        """Its path. Only once it has a name."""
        assert self.name is not None
        return f"{self.directory}/{self.name}"

    @property
    def session_lives(self) -> bool:
        """Whether the server may still have it: it removes the nodes of a session that ends."""
        return self.session.id == self.session_id and not self.session.ended
