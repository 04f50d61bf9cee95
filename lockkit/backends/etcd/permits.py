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
from lockkit.backends.etcd import keys
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.cluster import TXN, Cluster
from lockkit.backends.etcd.keys import Contender
from lockkit.backends.lock_state import lowest_free
from lockkit.errors import BackendUnavailable

FIRST_SLOTS = 8
"""Slots of which the first transaction takes the lowest free one. More make it longer (120 bytes each); with fewer, a
semaphore of which more permits are held costs a second transaction."""


def create_permit(contender: Contender, lease_id: int, asked: Request) -> rpc.TxnRequest:
    """
    Take a slot if nobody waits; else look at the semaphore, and take a place behind the others if it may wait.

    Must be sent once: a second one, executed after the grant, would take another slot.
    """
    prefix = contender.prefix
    slots = contender.slot_keys = tuple(keys.slot_key(prefix, slot) for slot in range(min(asked.limit, FIRST_SLOTS)))
    otherwise = [contender.put(contender.key, lease_id)] if asked.queue else []
    free = otherwise
    # Put the first slot that is not there: a transaction for each, in the failure of the one before.
    for key in reversed(slots):
        put = contender.put(key, lease_id)
        take = rpc.TxnRequest(compare=[keys.none_in((key, b""))], success=[put], failure=free)
        free = [rpc.RequestOp(request_txn=take)]
    behind = keys.slot_key(prefix, len(slots)), keys.beginning_with(prefix + keys.SLOT)[1]
    nobody = [keys.none_in(keys.beginning_with(prefix + keys.WAITER)), keys.none_in(behind)]
    # Read last, the newest permit is ours if one was put.
    newest = rpc.RequestOp(request_range=keys.in_order(keys.beginning_with(prefix + keys.SLOT), newest=True))
    request = rpc.TxnRequest(compare=[keys.none_in(keys.beginning_with(prefix))])
    request.success.extend([contender.put(slots[0], lease_id), newest])
    request.failure.extend(_look(contender))
    request.failure.add(request_txn=rpc.TxnRequest(compare=nobody, success=free, failure=otherwise))
    request.failure.append(newest)
    return request


def _look(contender: Contender) -> list[rpc.RequestOp]:
    """Read the waiter in front, the slots that are taken, and the oldest holder."""
    in_front = keys.in_order(keys.beginning_with(contender.prefix + keys.WAITER), newest=True, keys_only=True)
    if contender.create_revision:
        in_front.max_create_revision = contender.create_revision - 1
    slots = keys.beginning_with(contender.prefix + keys.SLOT)
    taken = rpc.RangeRequest(key=slots[0], range_end=slots[1], keys_only=True)
    return [rpc.RequestOp(request_range=one) for one in (in_front, taken, keys.in_order(slots))]


def _take(contender: Contender, lease_id: int, revision: int) -> rpc.TxnRequest:
    """Take the slot that was free at a revision; and read it: the answer to an equal request may have been lost."""
    slots, (slot_key,) = keys.beginning_with(contender.prefix + keys.SLOT), contender.slot_keys
    less, create = rpc.Compare.LESS, rpc.Compare.CREATE
    request = rpc.TxnRequest()
    request.compare.add(target=create, result=less, key=slots[0], range_end=slots[1], create_revision=revision + 1)
    if contender.create_revision:
        # It was the oldest waiter, so it still is.
        request.compare.append(contender.compare_revision)
        request.success.add(request_delete_range=rpc.DeleteRangeRequest(key=contender.key))
    else:
        request.compare.append(keys.none_in(keys.beginning_with(contender.prefix + keys.WAITER)))
    read = rpc.RequestOp(request_range=rpc.RangeRequest(key=slot_key))
    request.success.extend([contender.put(slot_key, lease_id), read])
    request.failure.append(read)
    return request


def _has_slot(contender: Contender, kvs: Sequence[rpc.KeyValue]) -> bool:
    """Tell whether a contender has a permit: the one that was read is its own."""
    if not kvs or kvs[0].value != contender.value:
        return False
    contender.key, contender.slot_keys, contender.slot = kvs[0].key, (), keys.slot_of(kvs[0].key)
    contender.set_revision(kvs[0].create_revision)
    return True


async def enter(
    cluster: Cluster, contender: Contender, asked: Request, answer: rpc.TxnResponse, answer_by: float
) -> Busy | None:
    """Go on from the answer to `create_permit`. None: it has a slot, or its key is gone."""
    if _has_slot(contender, answer.responses[-1].response_range.kvs):
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
        watched = (in_front[0].key,) if in_front else keys.beginning_with(contender.prefix + keys.SLOT)
        contender.waits_for(revision, *watched)
        return Busy(owner=keys.owner_and_metadata(oldest[0])[0] if oldest else None)
    if contender.wanted_until == -inf:
        raise BackendUnavailable("the request was given up")
    slot = lowest_free([keys.slot_of(kv.key) for kv in taken])
    contender.slot_keys = (keys.slot_key(contender.prefix, slot),)
    answer = await cluster.call(
        TXN,
        _take(contender, contender.session.id, revision),
        # Twice does no harm if it has a key, which the first one deletes.
        resend=contender.create_revision > 0,
        on_unknown=contender.set_may_come_late if not contender.create_revision else lambda: None,
        answer_by=answer_by,
    )
    if _has_slot(contender, answer.responses[-1].response_range.kvs):
        return None
    # Another one was faster, or the key is gone.
    contender.slot_keys = ()
    return await check(cluster, contender, asked, answer_by)
