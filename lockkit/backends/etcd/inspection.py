"""
Who holds a lock on etcd, how to free it without being the holder, and the notes on it.

A note is the key ``PREFIX+note/NAME``, attached to an etcd lease of its own, which is not kept alive and ends it. When
another member becomes the leader, the leases of notes start again: a note may live longer than it should, never
shorter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lockkit.backend import CALL_SECONDS, Gone, Holder, Note, decode_metadata, since_stored
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd import transactions, values
from lockkit.backends.etcd.cluster import Cluster
from lockkit.backends.etcd.connection import GRANT, RANGE, REVOKE, TIME_TO_LIVE, TXN
from lockkit.backends.etcd.contender import Contender
from lockkit.errors import ConfigurationError, LockError
from lockkit.runtime import Runtime
from lockkit.units import Instant


class UnprovenKey(Exception):
    """A key below the prefix of a lock may be data of an application."""


log = logging.getLogger("lockkit")

MARK_SECONDS = 600
"""How long the mark of a lock that was broken stays. Longer keeps more of them; with shorter ones, a holder with a long
ttl looks at its key too late, and gets the reason `gone`."""


class Inspection:
    """Looks at the locks and semaphores of one cluster."""

    def __init__(self, runtime: Runtime, cluster: Cluster) -> None:
        self._runtime = runtime
        self._cluster = cluster

    async def holders(self, prefix: bytes, *, is_semaphore: bool) -> Sequence[Holder]:
        """List the holders of a lock, or the permits of a semaphore, with the prefix of its keys."""
        answer_by = self._runtime.now() + CALL_SECONDS
        kvs, waiters_count = await self._held_keys(prefix, answer_by, is_semaphore=is_semaphore)
        lives: dict[int, float | None] = {0: None}
        for lease in dict.fromkeys(kv.lease for kv in kvs if kv.lease):
            ask = rpc.LeaseTimeToLiveRequest(ID=lease)
            answer = await self._cluster.call(TIME_TO_LIVE, ask, resend=True, answer_by=answer_by)
            lives[lease] = max(0.0, float(answer.TTL))
        found = []
        for kv in kvs:
            owner, metadata = values.owner_and_metadata(kv)
            mode = "permit" if is_semaphore else values.mode_of(kv, prefix)
            slot = values.slot_of(kv.key) if is_semaphore else None
            about, since = since_stored(decode_metadata(metadata))
            found.append(Holder(owner, kv.create_revision, lives[kv.lease], about, waiters_count, mode, slot, since))
        return found

    async def break_lock(
        self, prefix: bytes, marks: bytes, *, is_semaphore: bool, slot: int | None = None, proven: bool = True
    ) -> bool:
        """
        Free a lock, a semaphore, or its permit `slot`: delete the keys that hold it now. False if none does.

        Each deletion writes a mark below `marks`, which tells the holder why its key is gone, unless this user has no
        rights there.
        """
        answer_by = self._runtime.now() + CALL_SECONDS
        kvs, _ = await self._held_keys(prefix, answer_by, is_semaphore=is_semaphore)
        if slot is not None:
            kvs = [kv for kv in kvs if values.slot_of(kv.key) == slot]
        if not kvs:
            return False
        foreign = next((kv.key for kv in kvs if proven and not values.is_contender(kv, prefix)), None)
        if foreign is not None:
            raise UnprovenKey(foreign.decode("utf-8", "replace"))
        grant = rpc.LeaseGrantRequest(TTL=MARK_SECONDS)
        lease_id = (await self._cluster.call(GRANT, grant, resend=True, answer_by=answer_by)).ID
        broken = False
        for batch in transactions.batches(kvs):
            request = transactions.break_keys(batch, marks, lease_id)
            try:
                answer = await self._cluster.call(TXN, request, resend=False, answer_by=answer_by)
            except ConfigurationError:
                request = transactions.break_keys(batch, marks, None)
                answer = await self._cluster.call(TXN, request, resend=False, answer_by=answer_by)
            broken = broken or any(one.response_txn.succeeded for one in answer.responses)
        return broken

    async def why_gone(self, marks: Sequence[bytes]) -> Sequence[Gone]:
        """Return why keys are gone; `marks` are the keys of the marks that `break_lock` writes."""
        found: list[Gone] = []
        for batch in transactions.batches(marks):
            try:
                answer = await self._cluster.call(TXN, transactions.read_keys(batch), resend=True)
            except LockError as error:
                log.debug("cannot find out why keys at etcd are gone: %s", error)
                break
            found += (Gone("broken" if one.response_range.kvs else "gone") for one in answer.responses)
        return [*found, *[Gone("gone")] * (len(marks) - len(found))]

    async def _held_keys(
        self, prefix: bytes, answer_by: float, *, is_semaphore: bool
    ) -> tuple[Sequence[rpc.KeyValue], int]:
        """Read the keys that hold, the oldest first, and count those that wait."""
        if is_semaphore:
            slots, waiters = values.slots_of(prefix), values.waiters_of(prefix)
            request = rpc.TxnRequest()
            request.success.add(request_range=rpc.RangeRequest(key=slots[0], range_end=slots[1]))
            request.success.add(request_range=transactions.in_order(waiters, newest=True, keys_only=True))
            both = await self._cluster.call(TXN, request, resend=True, answer_by=answer_by)
            held, waiting = (one.response_range for one in both.responses)
            return held.kvs, waiting.count
        answer = await self._cluster.call(RANGE, transactions.first_key(prefix), resend=True, answer_by=answer_by)
        if answer.kvs and values.mode_of(answer.kvs[0], prefix) == "shared":
            everything = transactions.in_order((prefix, transactions.end(prefix)), limit=0)
            answer = await self._cluster.call(RANGE, everything, resend=True, answer_by=answer_by)
        kvs = answer.kvs
        modes = [values.mode_of(kv, prefix) for kv in kvs]
        # A writer waits for all in front of it, and stops the readers behind it.
        held_count = modes.index("exclusive") if "exclusive" in modes else len(kvs)
        held_count = max(1, held_count) if kvs else 0
        return kvs[:held_count], answer.count - held_count

    # -- notes -------------------------------------------------------------------------------------------------------

    async def read_note(self, key: bytes) -> Note | None:
        answer = await self._cluster.call(RANGE, rpc.RangeRequest(key=key), resend=True)
        return Note(answer.kvs[0].value.decode("utf-8", "replace"), None) if answer.kvs else None

    async def write_note(self, contender: Contender, key: bytes, text: str, ttl: int, answer_by: Instant) -> bool:
        """See `LockBackend.write_note`."""
        grant = rpc.LeaseGrantRequest(TTL=ttl)
        lease_id = (await self._cluster.call(GRANT, grant, resend=True, answer_by=answer_by)).ID
        put = rpc.PutRequest(key=key, value=text.encode(), lease=lease_id, prev_kv=True)
        request = rpc.TxnRequest(compare=[contender.compare_revision], success=[rpc.RequestOp(request_put=put)])
        answer = await self._cluster.call(TXN, request, resend=True, answer_by=answer_by)
        if not answer.succeeded:
            await self._revoke(lease_id, answer_by)
            return False
        former_id = answer.responses[0].response_put.prev_kv.lease
        if former_id not in {0, lease_id}:  # not of this request, whose first answer was lost
            await self._revoke(former_id, answer_by)
        return True

    async def _revoke(self, lease_id: int, answer_by: Instant) -> None:
        """End an etcd lease in which there is no note; if that fails, its ttl ends it."""
        try:
            request = rpc.LeaseRevokeRequest(ID=lease_id)
            await self._cluster.call(REVOKE, request, resend=True, answer_by=answer_by)
        except LockError as error:
            log.debug("the lease %x of a note is left to its ttl: %s", lease_id, error)
