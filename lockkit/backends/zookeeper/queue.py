"""One request in the queue of its lock: it creates a node, and holds the lock, or watches what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import Create2, GetChildren, GetData

from lockkit.backend import Busy, Request
from lockkit.backends.lock_state import lowest_free
from lockkit.backends.zookeeper.nodes import ATTEMPTS_MAX, EPHEMERAL, SEQUENCE, LockNode, LockNodes
from lockkit.backends.zookeeper.path import (
    Contender,
    blocker,
    contenders,
    held,
    node_prefix,
    slot_mark,
    would_wait,
)
from lockkit.backends.zookeeper.session import Session
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.units import Instant

LOOKS_MAX = 10
"""How often a single try for a permit looks without news at those ahead of it, who may be about to get theirs. More
keeps a caller waiting behind one that waits because of a lower limit; fewer tells callers that come together that it is
busy, although there is a permit for each."""


class LockQueue:
    """The queue of a lock, for one attempt of a request, whose `LockNode` is in ``request.state``."""

    def __init__(self, nodes: LockNodes, request: Request, session: Session, until: Instant) -> None:
        self._nodes = nodes
        self._directory = nodes.directory(request.name)
        self._request = request
        self._session = session
        self._until = until
        self._ahead: tuple[int, int] | None = None
        self._looks = 0

    async def attempt(self) -> LockNode | Busy:
        """Take or keep the place in the queue."""
        request = self._request
        node: LockNode | None = request.state
        children: Sequence[str] = ()
        if node is not None:
            children = await self._session.children(self._directory, self._until)
        elif not request.queue:
            # Looking costs the ensemble much less than a node that is created in vain.
            children = await self._session.children(self._directory, self._until, synced=False)
            if would_wait(queue := contenders(children), request):
                return Busy(owner=queue[0].owner)
        joins_count = 0
        while True:
            node = request.state
            if node is None or node.session is not self._session or node.session_id != self._session.id:
                self._leave()
                if joins_count >= ATTEMPTS_MAX:
                    break
                joins_count += 1
                node, children = await self._join()
            queue = contenders(children)
            position = next((index for index, one in enumerate(queue) if one.node == node.name), None)
            if position is None:
                self._leave()  # another client removed the node, or its session has ended: back to the end of the queue
                continue
            found = await self._decide(node, queue, position)
            if found is not None:
                return found
            children = await self._session.children(self._directory, self._until)
        message = f"another client removes the place in the queue for lock {request.name!r} as often as it is taken"
        raise BackendUnavailable(message)

    async def _decide(self, node: LockNode, queue: Sequence[Contender], position: int) -> LockNode | Busy | None:
        """Give the node if it holds the lock, or who holds it; None to look again, for the queue has changed."""
        if self._request.mode != "permit":
            ahead = blocker(queue, position)
            return node if ahead is None else await self._wait_for(queue, ahead)
        own, holders = queue[position], held(queue)
        node.slot = own.slot
        if position > len(holders):
            if self._may_get_permit(position, len(holders)):
                return None
            return await self._wait_for(queue, queue[position - 1])
        if position == len(holders):  # the first that waits
            if position >= self._request.limit:
                return await self._wait_for_holders(node, queue, position)
            self._session.stop_waking(self._request)  # its own mark is no news
            node.slot = lowest_free(one.slot for one in holders)
            behind = f"{self._directory}/{queue[position - 1].node}"
            marked = await node.create_mark(slot_mark(node.slot), self._until, behind=behind)
        else:
            # First without a mark. The next may have seen it wait behind another one, and watches it.
            unmarked = own.mark is None and len(holders) < len(queue)
            marked = not unmarked or await node.create_mark(slot_mark(0), self._until)
        return node if marked else None

    def _may_get_permit(self, position: int, holders_count: int) -> bool:
        """Tell whether a single try should look again: those ahead get their permits one after the other."""
        if self._request.queue or position >= self._request.limit:
            return False
        ahead = position, holders_count
        self._looks = self._looks + 1 if ahead == self._ahead else 1
        self._ahead = ahead
        return self._looks < LOOKS_MAX

    async def _wait_for(self, queue: Sequence[Contender], ahead: Contender) -> Busy | None:
        """Have the request woken when the node that it waits for changes or goes; None to look again."""
        request, path = self._request, f"{self._directory}/{ahead.node}"
        if request.queue and not self._session.wakes(path, request):
            try:
                _, stat = await self._session.read(GetData(path, watcher=True), until=self._until, waiter=request)
            except NoNodeError:
                return None
            # A changed node may have got its mark after the queue was listed, and before it was watched. To a writer
            # that makes no difference.
            if request.mode != "exclusive" and stat.version != 0:
                return None
        return Busy(owner=queue[0].owner)

    async def _wait_for_holders(self, node: LockNode, queue: Sequence[Contender], position: int) -> Busy | None:
        """Have the request woken when any of those that hold a permit leaves; None to look again."""
        request = self._request
        if request.queue and not self._session.wakes(self._directory, request):
            children = await self._session.children(self._directory, self._until, synced=False, waiter=request)
            now = contenders(children)
            if position >= len(now) or now[position].node != node.name:
                return None
        return Busy(owner=queue[0].owner)

    def _leave(self) -> None:
        """Give up a node that the server has removed, or that it removes with its session."""
        node: LockNode | None = self._request.state
        if node is not None:
            node.session.stop_waking(self._request)
            self._request.state = None

    async def _join(self) -> tuple[LockNode, Sequence[str]]:
        """Create the node, and list the queue behind it in the same round trip."""
        session, request, until = self._session, self._request, self._until
        node = LockNode(session, session.id, request.owner, self._directory, request.metadata.encode())
        node.joined_at = session.now
        path = f"{self._directory}/{node_prefix(request.owner, request.mode)}"
        requests = Create2(path, node.data, session.acl, EPHEMERAL | SEQUENCE), GetChildren(self._directory, None)

        async def create() -> tuple[Any, list[str]]:
            created, listed = session.send(*requests)
            node.session_id = created.session_id
            created_path, stat = await session.answer(created, until)
            node.name = created_path.rpartition("/")[2]
            return stat, await session.answer(listed, until)

        request.state = node  # first: an interrupt may come after it was sent
        try:
            stat, children = await self._nodes.create_in(session, self._directory, create, until)
        except ConfigurationError:
            if node.name is None:
                request.state = None  # refused: there is nothing to remove
            raise
        except BackendUnavailable as error:
            # "Protected" creation: it may have been created, and the owner in its name tells.
            found = await self._find() if error.sent else None
            if found is None:
                if not error.sent:
                    request.state = None
                raise
            node.name, stat, children = found
        if stat.ephemeralOwner != node.session_id:
            raise BackendUnavailable(f"the session in which lock {request.name!r} was requested has ended")
        node.token = stat.czxid
        return node, children

    async def _find(self) -> tuple[str, Any, list[str]] | None:
        """Look for a node that may have been created; give its name, its ``ZnodeStat``, and the queue."""
        children = await self._session.children(self._directory, self._until)
        for name in children:
            if name.startswith(f"{self._request.owner}__"):
                request = GetData(f"{self._directory}/{name}", None)
                with suppress(NoNodeError):
                    _, stat = await self._session.read(request, until=self._until)
                    return name, stat, children
        return None
