"""
Permits of semaphores: each is a key with the number of its slot, attached to the etcd lease of its holder.

First come, first served: those who wait have a key each, and only the oldest of them may take a slot::

    if no key below the prefix:  put slot 0                                          -> granted
    else:                        read the slots and the newest waiter, put ours      -> waits

    if ours is the oldest waiter, and no slot was taken since the slots were read:
                                 delete ours, put the lowest slot that was free      -> granted

So at the moment of the grant, no more slots are taken than were read: fewer than the request's own limit. Requests with
different limits mix.

The oldest waiter watches all slots, every other one the waiter in front: a release wakes one client and nobody else.

A request that may not wait (``timeout=0``) has no key of its own: it takes a slot if no one waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockkit.backend import Busy
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd import transactions, values
from lockkit.backends.etcd.connection import TXN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockkit.backends.etcd.cluster import Cluster
    from lockkit.backends.etcd.session import Contender

__all__ = ["PermitQueue", "create_permit", "lowest_free"]


def create_permit(contender: Contender, lease_id: int, *, queue: bool) -> rpc.TxnRequest:
    """
    Take slot 0 if the semaphore is not in use; else look at it, and with `queue` take a place behind the others.

    Must be sent once: a second one, executed after the grant, would put a key that nobody waits with.
    """
    contender.slot_key = values.slot_key(contender.prefix, 0)
    put_slot = rpc.PutRequest(key=contender.slot_key, value=contender.value, lease=lease_id)
    request = rpc.TxnRequest()
    request.compare.append(transactions.none_in((contender.prefix, transactions.end(contender.prefix))))
    request.success.add(request_put=put_slot)
    request.failure.extend(_look(contender))
    if queue:
        put = rpc.PutRequest(key=contender.key, value=contender.value, lease=lease_id)
        request.failure.add(request_put=put)
    return request


def lowest_free(slots: Sequence[int | None]) -> int:
    """Return the lowest number that is not among these."""
    taken = set(slots)
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)


def _look(contender: Contender) -> list[rpc.RequestOp]:
    """Read the waiter in front, the slots that are taken, and the oldest holder."""
    in_front = transactions.newest_in(values.waiters_of(contender.prefix), keys_only=True)
    if contender.create_revision:
        in_front.max_create_revision = contender.create_revision - 1
    slots = values.slots_of(contender.prefix)
    taken = rpc.RangeRequest(key=slots[0], range_end=slots[1], keys_only=True)
    return [rpc.RequestOp(request_range=one) for one in (in_front, taken, transactions.oldest_in(slots))]


def _look_again(contender: Contender) -> rpc.TxnRequest:
    """Look at a semaphore; fail if the key is gone with which the contender waits."""
    compare = [contender.compare_revision] if contender.create_revision else []
    return rpc.TxnRequest(compare=compare, success=_look(contender))


def _take(contender: Contender, lease_id: int, revision: int) -> rpc.TxnRequest:
    """Take the slot that was free at a revision; else read it: the answer to an equal request may have been lost."""
    waiters = values.waiters_of(contender.prefix)
    slots = values.slots_of(contender.prefix)
    request = rpc.TxnRequest()
    request.compare.add(
        target=rpc.Compare.CREATE,
        result=rpc.Compare.LESS,
        key=slots[0],
        range_end=slots[1],
        create_revision=revision + 1,
    )
    if contender.create_revision:
        request.compare.append(contender.compare_revision)
        request.compare.add(
            target=rpc.Compare.CREATE,
            result=rpc.Compare.GREATER,
            key=waiters[0],
            range_end=waiters[1],
            create_revision=contender.create_revision - 1,
        )
        request.success.add(request_delete_range=rpc.DeleteRangeRequest(key=contender.key))
    else:
        request.compare.append(transactions.none_in(waiters))
    put = rpc.PutRequest(key=contender.slot_key, value=contender.value, lease=lease_id)
    request.success.add(request_put=put)
    request.failure.add(request_range=rpc.RangeRequest(key=contender.slot_key))
    return request


@dataclass(frozen=True, slots=True)
class _Seen:
    """
    A look at a semaphore.

    Attributes:
        revision: At which it was.
        in_front: Key of the waiter in front; empty if there is none.
        taken: The slots.
        owner: Of the oldest permit.
    """

    revision: int
    in_front: bytes
    taken: Sequence[int | None]
    owner: str | None

    @classmethod
    def from_answer(cls, answer: rpc.TxnResponse) -> _Seen:
        """Read the answer to `_look`."""
        in_front, taken, oldest = (one.response_range.kvs for one in answer.responses[:3])
        return cls(
            answer.header.revision,
            in_front[0].key if in_front else b"",
            [values.slot_of(kv.key) for kv in taken],
            values.owner_and_metadata(oldest[0])[0] if oldest else None,
        )


class PermitQueue:
    """Takes permits, for one client."""

    def __init__(self, cluster: Cluster) -> None:
        """Use a cluster."""
        self._cluster = cluster

    async def enter(self, contender: Contender, limit: int, answer: Any, answer_by: float) -> Busy | None:  # noqa: ANN401 - a message
        """
        Read the answer to `create_permit`, and go on from there.

        Returns:
            None: the permit was granted, or the key is gone with which the contender waits (`Contender.slot`).

        Raises:
            LockError: No answer.
        """
        if answer.succeeded:
            contender.takes_slot(0, answer.header.revision)
            return None
        contender.slot_key = b""
        seen = _Seen.from_answer(answer)
        if len(answer.responses) > 3:  # noqa: PLR2004 - with a place in the queue
            contender.set_revision(answer.header.revision)
        return await self._go_on(contender, limit, seen, answer_by)

    async def check(self, contender: Contender, limit: int, answer_by: float) -> Busy | None:
        """Look whether the permit can be taken now, and take it. As `enter`."""
        answer = await self._cluster.call(TXN, _look_again(contender), resend=True, answer_by=answer_by)
        if not answer.succeeded:
            return None
        return await self._go_on(contender, limit, _Seen.from_answer(answer), answer_by)

    async def _go_on(self, contender: Contender, limit: int, seen: _Seen, answer_by: float) -> Busy | None:
        if seen.in_front:
            contender.waits_for(seen.in_front)
            return Busy(owner=seen.owner)
        if len(seen.taken) >= limit:
            contender.waits_for(*values.slots_of(contender.prefix))
            return Busy(owner=seen.owner)
        slot = lowest_free(seen.taken)
        contender.slot_key = values.slot_key(contender.prefix, slot)
        session = contender.session
        assert session is not None
        answer = await self._cluster.call(
            TXN,
            _take(contender, session.id, seen.revision),
            # Twice does no harm if it has a key, which the first one deletes.
            resend=contender.create_revision > 0,
            on_unknown=contender.set_may_come_late if not contender.create_revision else lambda: None,
            answer_by=answer_by,
        )
        if answer.succeeded:
            contender.takes_slot(slot, answer.header.revision)
            return None
        found = answer.responses[0].response_range.kvs
        if found and found[0].value == contender.value:
            contender.takes_slot(slot, found[0].create_revision)
            return None
        # Another one was faster, or the key is gone.
        contender.slot_key = b""
        return await self.check(contender, limit, answer_by)
