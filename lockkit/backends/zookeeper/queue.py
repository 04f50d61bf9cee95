"""One request in the queue of its lock: it creates a node, and is first, or watches the node before its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kazoo.exceptions import NoNodeError

from lockkit.backend import Busy
from lockkit.backends.zookeeper.path import contenders, node_prefix
from lockkit.backends.zookeeper.quirks import create_queue_node
from lockkit.backends.zookeeper.session import LockNode
from lockkit.errors import BackendUnavailable, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockkit.backend import Request
    from lockkit.backends.zookeeper.directories import LockDirectories
    from lockkit.backends.zookeeper.path import Contender
    from lockkit.backends.zookeeper.session import Session

__all__ = ["LockQueue"]

JOINS_MAX = 5
"""How often a node that another client removed is created anew in one attempt."""


class LockQueue:
    """The queue of a lock, for one attempt of a request, whose `LockNode` is in ``request.state``."""

    def __init__(self, directories: LockDirectories, request: Request, session: Session, until: float) -> None:
        """
        Send nothing.

        Args:
            directories: Where the lock is.
            request: What wants the lock.
            session: Where a node is created if the request has none in it.
            until: When answers must have come, client monotonic clock.
        """
        self._directories = directories
        self._directory = directories.path(request.name)
        self._request = request
        self._session = session
        self._until = until

    async def attempt(self) -> LockNode | Busy:
        """
        Take or keep the place in the queue.

        Returns:
            The request's node if it is the first, else who holds the lock.

        Raises:
            LockError: There was no usable answer.
        """
        request = self._request
        node: LockNode | None = request.state
        children: Sequence[str] = ()
        if node is not None:
            children, node.asked_at = await self._session.children_when_woken(self._directory, request, self._until)
        elif not request.queue:
            # Looking costs the ensemble much less than a node that is created in vain.
            children = await self._session.children_unsynced(self._directory, self._until)
            if queue := contenders(children):
                return Busy(owner=queue[0].owner)
        for _ in range(JOINS_MAX):
            node = request.state
            if node is None or node.session is not self._session or node.session_id != self._session.id:
                self._leave()
                node, children = await self._join()
            queue = contenders(children)
            position = next((index for index, one in enumerate(queue) if one.node == node.name), None)
            if position == 0:
                return node
            if position is None:
                self._leave()  # another client removed the node, or its session has ended: back to the end of the queue
            elif not request.queue or await self._watch(node, queue[position - 1]):
                return Busy(owner=queue[0].owner)
            else:
                children = await self._session.children(self._directory, self._until)
        message = f"another client removes the place in the queue for lock {request.name!r} as often as it is taken"
        raise BackendUnavailable(message)

    def _leave(self) -> None:
        """Give up a node that the server has removed, or that it removes with its session."""
        node: LockNode | None = self._request.state
        if node is not None:
            node.session.watches.stop_waking(node, self._request)
            self._request.state = None

    async def _join(self) -> tuple[LockNode, Sequence[str]]:
        """Create the node, and list the queue behind it in the same round trip."""
        session, request = self._session, self._request
        node = request.state = LockNode(session, request.owner, self._directory)
        path, data = f"{self._directory}/{node_prefix(request.owner)}", request.metadata.encode()

        async def create() -> tuple[Any, list[str]]:
            created = create_queue_node(session.client, path, data)
            listed = session.client.get_children_async(self._directory)
            created_path, stat = await session.answer(created, self._until)
            node.name = created_path.rpartition("/")[2]
            return stat, await session.answer(listed, self._until)

        try:
            stat, children = await self._directories.create_in(session, self._directory, create, self._until)
            name = node.name
        except ConfigurationError:
            if node.name is None:
                request.state = None  # refused: there is nothing to remove
            raise
        except BackendUnavailable:
            # "Protected" creation: it may have been created, and the owner in its name tells.
            found = await self._find()
            if found is None:
                raise
            name, stat, children = found
        if stat.ephemeralOwner != node.session_id:
            # The connection was lost, and with it the session: the node that was found is about to vanish.
            message = f"the session in which lock {request.name!r} was requested has ended"
            raise BackendUnavailable(message)
        node.name = name
        node.token = stat.czxid
        return node, children

    async def _find(self) -> tuple[str, Any, list[str]] | None:
        """Look for a node that may have been created; give its name, its ``ZnodeStat``, and the queue."""
        session = self._session
        children = await session.children(self._directory, self._until)
        for name in children:
            if name.startswith(node_prefix(self._request.owner)):
                path = f"{self._directory}/{name}"
                stat = await session.read(partial(session.client.exists_async, path), self._until)
                if stat is not None:
                    return name, stat, children
        return None

    async def _watch(self, node: LockNode, predecessor: Contender) -> bool:
        """Have the request woken when the node before its own goes away; False if that is gone already."""
        path, watches = f"{self._directory}/{predecessor.node}", node.session.watches
        if watches.wakes(node, path, self._request):
            return True
        try:
            await self._session.read(partial(watches.watch_predecessor, node, path, self._request), self._until)
        except NoNodeError:
            return False
        return True
