"""
Permits of semaphores: each is a key with the number of its slot, attached to the etcd lease of its holder.

First come, first served: those who wait have a key each, and only the oldest of them may take a slot::

    if no key below the prefix:        put slot 0                                          -> granted
    else:                              read the slots and the newest waiter
         if nobody waits, and all slots that are taken are among the first `FIRST_SLOTS`,
         and below the limit:          put the lowest that is free                         -> granted
         else:                         put ours                                            -> waits

    if ours is the oldest waiter, and no slot was taken since the slots were read:
                                       delete ours, put the lowest slot that was free      -> granted

So at the moment of the grant, fewer slots are taken than the request's own limit. Requests with different limits mix.

The oldest waiter watches all slots, every other one the waiter in front: a release wakes one client and nobody else.

A request that may not wait (``timeout=0``) has no key of its own: it takes a slot if nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from lockkit.backend import Busy, Request
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd import transactions, values
from lockkit.backends.etcd.cluster import Cluster
from lockkit.backends.etcd.connection import TXN
from lockkit.backends.etcd.contender import Contender
from lockkit.errors import BackendUnavailable

FIRST_SLOTS = 8
"""Slots of which the first transaction takes the lowest free one. More make it longer (120 bytes each); with fewer, a
semaphore of which more permits are held costs a second transaction."""


def create_permit(contender: Contender, lease_id: int, asked: Request) -> rpc.TxnRequest:
    """
    Take a slot if nobody waits; else look at the semaphore, and take a place behind the others if it may wait.

    Must be sent once: a second one, executed after the grant, would take another slot.
    """
    slots = [values.slot_key(contender.prefix, slot) for slot in range(min(asked.limit, FIRST_SLOTS))]
    contender.slot_keys = tuple(slots)
    request = rpc.TxnRequest()
    request.compare.append(transactions.none_in((contender.prefix, transactions.end(contender.prefix))))
    request.success.append(_put(contender, slots[0], lease_id))
    request.failure.extend(_look(contender))
    otherwise = [_put(contender, contender.key, lease_id)] if asked.queue else []
    behind = values.slot_key(contender.prefix, len(slots)), values.slots_of(contender.prefix)[1]
    compare = [transactions.none_in(values.waiters_of(contender.prefix)), transactions.none_in(behind)]
    request.failure.add(
        request_txn=rpc.TxnRequest(
            compare=compare, success=_put_first_free(contender, slots, lease_id, otherwise), failure=otherwise
        )
    )
    return request


def _put(contender: Contender, key: bytes, lease_id: int) -> rpc.RequestOp:
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=contender.value, lease=lease_id))


def _put_first_free(
    contender: Contender, slots: Sequence[bytes], lease_id: int, otherwise: Sequence[rpc.RequestOp]
) -> Sequence[rpc.RequestOp]:
    """Put the first of these keys that is not there: a transaction for each, in the failure of the one before."""
    for key in reversed(slots):
        is_free = rpc.Compare(target=rpc.Compare.CREATE, key=key, create_revision=0)
        take = rpc.TxnRequest(compare=[is_free], success=[_put(contender, key, lease_id)], failure=otherwise)
        otherwise = [rpc.RequestOp(request_txn=take)]
    return otherwise


def _slot_taken(answer: rpc.TxnResponse) -> int | None:
    """Read from the answer to `create_permit` which slot was taken."""
    if answer.succeeded:
        return 0
    nested = answer.responses[3].response_txn
    if not nested.succeeded:
        return None
    slot = 0
    nested = nested.responses[0].response_txn
    while not nested.succeeded:
        if not nested.responses or not nested.responses[0].HasField("response_txn"):
            return None
        nested = nested.responses[0].response_txn
        slot += 1
    return slot


def lowest_free(slots: Sequence[int | None]) -> int:
    """Return the lowest number that is not among these."""
    taken = set(slots)
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)


def _look(contender: Contender) -> list[rpc.RequestOp]:
    """Read the waiter in front, the slots that are taken, and the oldest holder."""
    in_front = transactions.in_order(values.waiters_of(contender.prefix), newest=True, keys_only=True)
    if contender.create_revision:
        in_front.max_create_revision = contender.create_revision - 1
    slots = values.slots_of(contender.prefix)
    taken = rpc.RangeRequest(key=slots[0], range_end=slots[1], keys_only=True)
    return [rpc.RequestOp(request_range=one) for one in (in_front, taken, transactions.in_order(slots))]


def _take(contender: Contender, lease_id: int, revision: int) -> rpc.TxnRequest:
    """Take the slot that was free at a revision; else read it: the answer to an equal request may have been lost."""
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
        # It was the oldest waiter, so it still is.
        request.compare.append(contender.compare_revision)
        request.success.add(request_delete_range=rpc.DeleteRangeRequest(key=contender.key))
    else:
        request.compare.append(transactions.none_in(values.waiters_of(contender.prefix)))
    (slot_key,) = contender.slot_keys
    request.success.append(_put(contender, slot_key, lease_id))
    request.failure.add(request_range=rpc.RangeRequest(key=slot_key))
    return request


async def enter(
    cluster: Cluster, contender: Contender, asked: Request, answer: rpc.TxnResponse, answer_by: float
) -> Busy | None:
    """Read the answer to `create_permit`, and go on from there."""
    slot = _slot_taken(answer)
    if slot is not None:
        contender.takes_slot(slot, answer.header.revision)
        return None
    contender.slot_keys = ()
    if asked.queue:
        contender.set_revision(answer.header.revision)
    return await _go_on(cluster, contender, asked, answer, answer_by)


async def check(cluster: Cluster, contender: Contender, asked: Request, answer_by: float) -> Busy | None:
    """Look whether the permit can be taken now, and take it. As `enter`."""
    # It fails if the key is gone with which the contender waits.
    compare = [contender.compare_revision] if contender.create_revision else []
    request = rpc.TxnRequest(compare=compare, success=_look(contender))
    answer = await cluster.call(TXN, request, resend=True, answer_by=answer_by)
    return await _go_on(cluster, contender, asked, answer, answer_by) if answer.succeeded else None


async def _go_on(
    cluster: Cluster, contender: Contender, asked: Request, answer: rpc.TxnResponse, answer_by: float
) -> Busy | None:
    """Go on from the answer to `_look`: wait, or take the lowest slot that was free."""
    revision = answer.header.revision
    in_front, taken, oldest = (one.response_range.kvs for one in answer.responses[:3])
    if in_front or len(taken) >= asked.limit:
        keys = (in_front[0].key,) if in_front else values.slots_of(contender.prefix)
        contender.waits_for(revision, *keys)
        return Busy(owner=values.owner_and_metadata(oldest[0])[0] if oldest else None)
    if contender.wanted_until == -inf:
        raise BackendUnavailable("the request was given up")
    slot = lowest_free([values.slot_of(kv.key) for kv in taken])
    contender.slot_keys = (values.slot_key(contender.prefix, slot),)
    session = contender.session
    assert session is not None
    answer = await cluster.call(
        TXN,
        _take(contender, session.id, revision),
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
    contender.slot_keys = ()
    return await check(cluster, contender, asked, answer_by)
