"""
Notes on locks: the key ``PREFIX+note/NAME``, attached to an etcd lease of its own, which is not kept alive and ends it.

When another member becomes the leader, the leases of notes start again: a note may live longer than it should, never
shorter.

The client chooses the id of the lease. So a request that is sent again, because its answer was lost, finds the lease of
the first one, and none stays without a note for the days for which that would have been kept.
"""

from __future__ import annotations

import logging

from lockkit.backend import Note
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.cluster import Cluster
from lockkit.backends.etcd.connection import GRANT, KEEP_ALIVE, RANGE, REVOKE, TXN
from lockkit.backends.etcd.contender import Contender
from lockkit.backends.etcd.errors import LeaseExists
from lockkit.errors import LockError
from lockkit.runtime import Runtime
from lockkit.units import Instant

log = logging.getLogger("lockkit")


class LockNotes:
    """The notes on the locks of one client."""

    def __init__(self, runtime: Runtime, cluster: Cluster) -> None:
        """Use a cluster."""
        self._runtime = runtime
        self._cluster = cluster

    async def read(self, key: bytes) -> Note | None:
        answer = await self._cluster.call(RANGE, rpc.RangeRequest(key=key), resend=True)
        return Note(answer.kvs[0].value.decode("utf-8", "replace"), None) if answer.kvs else None

    async def write(self, contender: Contender, key: bytes, text: str, ttl: int, answer_by: Instant) -> bool:
        """See `LockBackend.write_note`."""
        lease_id = contender.note_leases.setdefault(ttl, int(self._runtime.owner()[:15], 16) + 1)
        await self._grant(lease_id, ttl, answer_by)
        put = rpc.PutRequest(key=key, value=text.encode(), lease=lease_id, prev_kv=True)
        request = rpc.TxnRequest(compare=[contender.compare_revision], success=[rpc.RequestOp(request_put=put)])
        answer = await self._cluster.call(TXN, request, resend=True, answer_by=answer_by)
        contender.note_leases.clear()
        if not answer.succeeded:
            await self._revoke(lease_id, answer_by)
            return False
        former_id = answer.responses[0].response_put.prev_kv.lease
        if former_id not in {0, lease_id}:
            await self._revoke(former_id, answer_by)
        return True

    async def _grant(self, lease_id: int, ttl: int, answer_by: Instant) -> None:
        """Have an etcd lease whose ttl begins now, also if an earlier request for it was executed."""
        while True:
            try:
                wanted = rpc.LeaseGrantRequest(TTL=ttl, ID=lease_id)
                await self._cluster.call(GRANT, wanted, resend=True, answer_by=answer_by)
            except LeaseExists:
                beat = rpc.LeaseKeepAliveRequest(ID=lease_id)
                kept = await self._cluster.call(KEEP_ALIVE, beat, resend=True, answer_by=answer_by)
                if kept.TTL <= 0:
                    continue  # it has just ended
            return

    async def _revoke(self, lease_id: int, answer_by: Instant) -> None:
        """End an etcd lease in which there is no note; if that fails, its ttl ends it."""
        try:
            request = rpc.LeaseRevokeRequest(ID=lease_id)
            await self._cluster.call(REVOKE, request, resend=True, answer_by=answer_by)
        except LockError as error:
            log.debug("the lease %x of a note is left to its ttl: %s", lease_id, error)
