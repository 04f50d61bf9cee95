"""
One request in the queue of its lock: it creates a node, and holds the lock, or watches what it waits for.

Whose turn it is follows from one listing of the queue. Numbers only grow, so those ahead of a contender can only leave.
Each rule stays true when one of them leaves: what one listing grants, no later one takes back.

=========  ================================  ==================================  =====================================
mode       granted when ahead of it are      meanwhile it watches                source
=========  ================================  ==================================  =====================================
exclusive  nobody                            the one before it                   ZooKeeper Recipes, "Locks"
shared     readers only                      the nearest writer before it        ZooKeeper Recipes, "Shared Locks"
permit     holders only, and fewer than its  the directory if only holders are   Curator's ``InterProcessSemaphoreV2``:
           limit                             ahead, else the one before it       one waiter watches what is held
=========  ================================  ==================================  =====================================

The queue of a semaphore is: holders, then waiters. A permit is held by the first contender of all, in slot 0, and by
each that has a mark, in the slot of the mark. Only the first waiter may create its mark, for the lowest slot that its
listing shows to be free. Meanwhile no other contender can take that slot, and the number of holders can only fall.

When all before the first waiter have left, it is the first contender, and holds slot 0. A mark that is still on its way
would give it another slot. So it creates the mark in one transaction with a check that the one before it exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from kazoo.exceptions import NoNodeError

from lockkit.backend import Busy, Request
from lockkit.backends.zookeeper.directories import LockDirectories
from lockkit.backends.zookeeper.node import LockNode
from lockkit.backends.zookeeper.path import Contender, contenders, is_of_owner, node_prefix, slot_mark
from lockkit.backends.zookeeper.quirks import create_and_list
from lockkit.backends.zookeeper.session import EXPECTED, Session
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

JOINS_MAX = 5
"""How often a node that another client removed is created anew in one attempt."""

LOOKS_MAX = 10
"""How often a single try for a permit looks without news at those ahead of it, who may be about to get theirs. More
keeps a caller waiting behind one that waits because of a lower limit; fewer tells callers that come together that it is
busy, although there is a permit for each."""


class LockQueue:
    """The queue of a lock, for one attempt of a request, whose `LockNode` is in ``request.state``."""

    def __init__(self, directories: LockDirectories, request: Request, session: Session, until: float) -> None:
        self._directories = directories
        self._directory = directories.path(request.name)
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
            children, node.asked_at = await self._session.children_when_woken(self._directory, request, self._until)
        elif not request.queue:
            # Looking costs the ensemble much less than a node that is created in vain.
            children = await self._session.children_unsynced(self._directory, self._until)
            if would_wait(queue := contenders(children), request):
                return Busy(owner=queue[0].owner)
        joins_count = 0
        while True:
            node = request.state
            if node is None or node.session is not self._session or node.session_id != self._session.id:
                self._leave()
                if joins_count >= JOINS_MAX:
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
        if self._request.mode == "permit":
            return await self._decide_permit(node, queue, position)
        ahead = blocker(queue, position)
        return node if ahead is None else await self._wait_for(node, queue, ahead)

    async def _decide_permit(self, node: LockNode, queue: Sequence[Contender], position: int) -> LockNode | Busy | None:
        """The same as `_decide`, for a permit: see `lockkit.backends.zookeeper.queue`."""
        own, holders = queue[position], held(queue)
        node.slot = own.slot
        if position > len(holders):
            if self._may_get_permit(position, len(holders)):
                return None
            return await self._wait_for(node, queue, queue[position - 1])
        if position == len(holders):  # the first that waits
            if position >= self._request.limit:
                return await self._wait_for_holders(node, queue, position)
            node.session.watches.stop_waking(self._request)  # its own mark is no news
            node.slot = lowest_free_slot(holders)
            behind = f"{self._directory}/{queue[position - 1].node}"
            return node if await node.create_mark(slot_mark(node.slot), self._until, behind=behind) else None
        if own.mark is None and len(holders) < len(queue):
            # First without a mark. The next may have seen it wait behind another one, and watches it.
            return node if await node.create_mark(slot_mark(0), self._until) else None
        return node

    def _may_get_permit(self, position: int, holders_count: int) -> bool:
        """Tell whether a single try should look again: those ahead get their permits one after the other."""
        if self._request.queue or position >= self._request.limit:
            return False
        ahead = position, holders_count
        self._looks = self._looks + 1 if ahead == self._ahead else 1
        self._ahead = ahead
        return self._looks < LOOKS_MAX

    async def _wait_for(self, node: LockNode, queue: Sequence[Contender], ahead: Contender) -> Busy | None:
        if not self._request.queue or await self._watch(node, ahead):
            return Busy(owner=queue[0].owner)
        return None

    async def _wait_for_holders(self, node: LockNode, queue: Sequence[Contender], position: int) -> Busy | None:
        """Have the request woken when any of those that hold a permit leaves."""
        request, watches, directory = self._request, node.session.watches, self._directory
        if request.queue and not watches.wakes(directory, request):
            children = await self._session.read(partial(watches.watch_directory, directory, request), self._until)
            now = contenders(children)
            if position >= len(now) or now[position].node != node.name:
                return None
        return Busy(owner=queue[0].owner)

    def _leave(self) -> None:
        """Give up a node that the server has removed, or that it removes with its session."""
        node: LockNode | None = self._request.state
        if node is not None:
            node.session.watches.stop_waking(self._request)
            self._request.state = None

    async def _join(self) -> tuple[LockNode, Sequence[str]]:
        """Create the node, and list the queue behind it in the same round trip."""
        session, request = self._session, self._request
        data = request.metadata.encode()
        node = request.state = LockNode(session, request.owner, self._directory, data=data, joined_at=session.now)
        path = f"{self._directory}/{node_prefix(request.owner, request.mode)}"

        async def create() -> tuple[Any, list[str]]:
            asked_at = session.now
            created, listed = create_and_list(session.client, path, data)
            children: list[str] = []
            problem: Exception | None = None
            try:
                # The later answer first: when it is there, so is the other, and this thread or task wakes up once.
                children = await session.answer(listed, self._until)
            except (*EXPECTED, LockError) as error:
                problem = error
            created_path, stat = await session.answer(created, self._until)
            node.name = created_path.rpartition("/")[2]
            session.leader_answered(asked_at)
            if problem is not None:
                raise problem
            return stat, children

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
        node.name = name
        if stat.ephemeralOwner != node.session_id:
            # The session has ended. The node is about to vanish with it, or it was created in the next one.
            node.session_id = stat.ephemeralOwner
            message = f"the session in which lock {request.name!r} was requested has ended"
            raise BackendUnavailable(message)
        node.token = stat.czxid
        return node, children

    async def _find(self) -> tuple[str, Any, list[str]] | None:
        """Look for a node that may have been created; give its name, its ``ZnodeStat``, and the queue."""
        session = self._session
        children = await session.children(self._directory, self._until)
        for name in children:
            if is_of_owner(name, self._request.owner):
                path = f"{self._directory}/{name}"
                stat = await session.read(partial(session.client.exists_async, path), self._until)
                if stat is not None:
                    return name, stat, children
        return None

    async def _watch(self, node: LockNode, predecessor: Contender) -> bool:
        """Have the request woken when the node that it waits for changes or goes; False to look again."""
        path, watches = f"{self._directory}/{predecessor.node}", node.session.watches
        if watches.wakes(path, self._request):
            return True
        try:
            send = partial(watches.watch_predecessor, path, self._request)
            _, stat = await self._session.read(send, self._until)
        except NoNodeError:
            return False
        # A changed node may have got its mark after the queue was listed, and before it was watched. To a writer that
        # makes no difference.
        return self._request.mode == "exclusive" or stat.version == 0


# -- whose turn it is: pure functions of one listing of the queue ----------------------------------------------------


def held(queue: Sequence[Contender]) -> Sequence[Contender]:
    """Give those of a queue that hold the lock: its head."""
    if queue and queue[0].mode == "exclusive":
        return queue[:1]
    return [*takewhile(lambda one: one.mode == "shared" or one.slot is not None, queue)]


def would_wait(queue: Sequence[Contender], request: Request) -> bool:
    """Tell whether a request that joined this queue now would have to wait; for a permit, whether it surely would."""
    if request.mode == "exclusive":
        return bool(queue)
    if request.mode == "shared":
        return any(one.mode != "shared" for one in queue)
    # Those without a permit may wait because of a lower limit, or be about to create their marks.
    return len(queue) >= request.limit


def blocker(queue: Sequence[Contender], position: int) -> Contender | None:
    """Give the contender for which the one at that position, no permit, waits; None if it holds the lock."""
    if queue[position].mode == "exclusive":
        return queue[position - 1] if position else None
    return next((one for one in reversed(queue[:position]) if one.mode != "shared"), None)


def lowest_free_slot(holders: Sequence[Contender]) -> int:
    """Give the lowest slot that none of these has."""
    taken = {one.slot for one in holders}
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)
