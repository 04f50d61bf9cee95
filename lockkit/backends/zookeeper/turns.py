"""
Whose turn it is in the queue of a lock. Pure: it decides from one listing of the queue.

Numbers only grow, so those ahead of a contender can only leave. Each rule stays true when one of them leaves: what one
listing grants, no later one takes back.

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
from itertools import takewhile

from lockkit.backend import Request
from lockkit.backends.zookeeper.path import Contender


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
