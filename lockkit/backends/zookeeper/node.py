"""
The node that lockkit creates for a request: its place in the queue of a lock, then what holds the lock.

Each change of a node names it by its path, which has the random owner of the request in it: if the node is gone,
nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from kazoo.exceptions import NoNodeError

from lockkit.backend import with_since
from lockkit.backends.zookeeper.session import Session
from lockkit.units import Instant


@dataclass(slots=True, eq=False)
class LockNode:
    """
    A sequential ephemeral node, from the request that creates it until the server has confirmed that it is gone.

    Times are the client's monotonic clock.
    """

    session: Session
    owner: str  # of the request, and of the lease
    directory: str  # path of the lock's directory
    # The session's id when the node was created: the session gets another one when the server has ended it.
    session_id: int = field(init=False)
    name: str | None = None  # None until the server has said that it created the node
    data: bytes = b""  # with which it was created, or that it was last told to have: the metadata
    mark: str | None = None  # end of the name of its mark (`lockkit.backends.zookeeper.path`), once that may exist
    slot: int | None = None  # of a permit that was granted
    token: int = 0  # its ``czxid``; 0 before
    # When the session was alive for certain, if that was before the attempt that found this node to be first.
    asked_at: float | None = None
    ttl: float = 0.0  # of the lease, as granted
    remove_at: float = inf  # when `lockkit.backends.zookeeper.short_leases` removes it, unless it is renewed
    joined_at: float = inf  # when it was created
    since: float | None = None  # when the lease was granted, Unix time; None if that is when the server created it
    missed_at: float | None = None  # when it was first looked for by its owner and not found

    def __post_init__(self) -> None:
        self.session_id = self.session.id

    @property
    def path(self) -> str:
        """Its path. Only once it has a name."""
        assert self.name is not None
        return f"{self.directory}/{self.name}"

    @property
    def session_lives(self) -> bool:
        """
        Whether the server may still have it: it removes the nodes of a session that ends.

        If the session ends while the request that creates it is handed over, kazoo sends that in the next one.
        """
        return not self.session.ended and (self.name is None or self.session.id == self.session_id)

    def described(self, metadata: str) -> bytes:
        """Give the data that it is to have."""
        return (metadata if self.since is None else with_since(metadata, self.since)).encode()

    def send_data(self, data: bytes | None, send: Callable[[bytes], Any]) -> Any:  # noqa: ANN401 - kazoo's
        """
        Hand over a request that writes its data, and so wakes those that watch it; give what `send` gives.

        Requests are sent in the order of these calls: none brings back older data.
        """
        with self.session.mutex:
            if data is not None:
                self.data = data
            return send(self.data)

    async def replace_data(self, data: bytes, until: Instant) -> bool:
        """Replace its data; False if it is gone. Raises as `Session.answer`."""
        await self.session.connected(until, patient=True)
        result = self.send_data(data, partial(self.session.client.set_async, self.path))
        try:
            await self.session.answer(result, until)
        except NoNodeError:
            return False
        return self.session_lives

    async def create_mark(self, end: str, until: Instant, *, behind: str | None = None) -> bool:
        """Create its mark, and wake those that watch it. Again, it changes nothing."""
        session = self.session
        await session.connected(until, patient=True)
        self.mark = end
        transaction = session.client.transaction()
        checks = 0 if behind is None else 1
        if behind is not None:
            transaction.check(behind, -1)

        def send(data: bytes) -> Any:  # noqa: ANN401 - kazoo has no types
            transaction.set_data(self.path, data)
            transaction.create(f"{self.path}{end}", ephemeral=True)
            return transaction.commit_async()

        failed = await session.committed(self.send_data(None, send), until)
        if failed is None or failed == checks + 1:  # it was created before, and the answer was lost
            return self.session_lives
        self.mark = None
        return False
