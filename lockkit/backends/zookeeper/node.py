"""The node that lockkit creates for a request: its place in the queue of a lock, then what holds the lock."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockkit.backends.zookeeper.session import Session

__all__ = ["LockNode"]


@dataclass(slots=True, eq=False)
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

    session: Session
    owner: str
    directory: str
    session_id: int = field(init=False)
    name: str | None = None
    token: int = 0
    watched_path: str | None = None
    asked_at: float | None = None
    ttl: float = 0.0
    remove_at: float = inf
    missed_at: float | None = None
    watched_over: int = -1

    def __post_init__(self) -> None:
        """Begin in the session as it is now."""
        self.session_id = self.session.id

    @property
    def path(self) -> str:
        """Its path. Only once it has a name."""
        assert self.name is not None
        return f"{self.directory}/{self.name}"

    @property
    def session_lives(self) -> bool:
        """Whether the server may still have it: it removes the nodes of a session that ends."""
        return self.session.id == self.session_id and not self.session.ended
