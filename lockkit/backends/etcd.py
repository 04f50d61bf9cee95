"""
Locks on etcd 3.4 or later: one member, or a cluster.

Algorithm: everybody who wants the lock has a key ``PREFIX/NAME/<lease id in hexadecimal>`` that hangs on an etcd lease,
and the key with the lowest ``create_revision`` holds. So do ``etcdctl lock`` and the ``concurrency`` package of etcd's
Go client (``client/v3/concurrency/mutex.go``), which therefore exclude with lockkit on the same key, in order of
arrival. The value is ``OWNER METADATA``.

==================  ===============================================================================================
acquire             one transaction: create the key; granted if there was no other below the prefix
wait                watch the key in front (`lockkit.backends._etcd_watch`), then look for one in front again
renew               keep the leases alive, and see in one transaction for 128 keys that each is still there
release             delete the key, if it still has the ``create_revision`` of the grant
token               the ``create_revision``
==================  ===============================================================================================

Why one round trip grants: the transaction compares the ``create_revision`` of *all* keys below the prefix with 0, which
is true only if there are none (a comparison over a range: etcd 3.3).

Leases of etcd are shared by the locks of a client that have the same ttl (`lockkit.backends._etcd_session`).

What the server must offer: etcd 3.4 (watch ids chosen by the client), a user with read and write rights below the
prefix.

What it cannot promise: tokens higher than before when the cluster comes back without its data.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from lockkit import values
from lockkit.backend import (
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    Host,
    LockBackend,
    Option,
    Renewal,
    Renewed,
    Request,
    Unknown,
    decode_metadata,
)
from lockkit.backends import _etcd_rpc_pb2 as rpc
from lockkit.backends._etcd_cluster import CALL_SECONDS
from lockkit.backends._etcd_errors import LeaseEnded
from lockkit.backends._etcd_link import RANGE, TIME_TO_LIVE, TXN
from lockkit.backends._etcd_options import OPTIONS, adopt_cluster, open_cluster
from lockkit.backends._etcd_session import Contender, Sessions, whole_seconds
from lockkit.backends._etcd_watch import Watches
from lockkit.errors import LockError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockkit.backends._etcd_cluster import Cluster
    from lockkit.backends._etcd_session import Session
    from lockkit.url import Url

__all__ = ["EtcdBackend"]

log = logging.getLogger("lockkit")

BATCH = 128
"""Keys that one transaction is about: etcd's default for --max-txn-ops. Fewer takes more round trips."""

_OWNER_CHARS = 32
_TOP = (1 << 63) - 1

_CAPABILITIES = Capabilities(
    crash_release="ttl",
    min_ttl=1.0,
    ttl_granularity=1.0,
    fair=True,
    wakeup="push",
    token_source="the key's create_revision; a cluster that comes back without its data may start lower",  # noqa: S106
    survives_node_loss=True,
    survives_data_loss=False,
    shared_mode=False,
    clock_assumption="the leader's clock runs at the rate of the clients' within 1 %",
    waiters_visible=True,
    scope="network",
    caveat="A holder that is paused beyond its ttl may still write: guard storage by token. One member alone survives "
    "no loss; a ttl is whole seconds, and the cluster may raise it.",
)


class EtcdBackend(LockBackend):
    """
    Processes that reach the same etcd.

    Attributes:
        cluster: Its members, for guards of data that are there too.
    """

    capabilities = _CAPABILITIES
    options: ClassVar[Mapping[str, Option]] = OPTIONS

    def __init__(self, url: str, cluster: Cluster, options: Mapping[str, Any], host: Host) -> None:
        """Use a cluster; nothing is sent."""
        self._url = url
        self.cluster = self._cluster = cluster
        self._runtime = host.runtime
        self._prefix: str = options["prefix"]
        self._sessions = Sessions(host, cluster)
        self._watches = Watches(host.runtime, cluster)

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> EtcdBackend:
        """See `LockBackend.open`."""
        return cls(url.safe_text, open_cluster(url, options, host), options, host)

    @classmethod
    def adopt(cls, client: object, options: Mapping[str, Any], host: Host) -> EtcdBackend | None:
        """See `LockBackend.adopt`: a gRPC channel, or a client that has one, in the form of this face."""
        found = adopt_cluster(client, host)
        return None if found is None else cls(found[0], found[1], options, host)

    @property
    def url(self) -> str:
        """See `LockBackend.url`."""
        return self._url

    # -- acquire ---------------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """See `LockBackend.try_acquire`."""
        outcome: Grant | Busy | None = None
        if request.place is not None:
            outcome = await self._look_again(request, request.place)
        while outcome is None:
            value = f"{request.owner} {request.metadata}".encode()
            contender = Contender(
                request.name, request.owner, self._queue_of(request.name), value, self._runtime.event()
            )
            contender.wake = request.wake if request.queue else None
            await self._sessions.join(contender, whole_seconds(request.ttl))
            request.place = contender
            # A caller that is cancelled leaves it running: `abandon` hears out whether there is anything to undo.
            outcome = await self._runtime.settle(self._enter(request, contender), 4 * CALL_SECONDS)
        return outcome

    async def _enter(self, request: Request, contender: Contender) -> Grant | Busy | None:
        """Create the key. None: its session has ended meanwhile, begin anew."""
        session = contender.session
        assert session is not None
        try:
            if session.is_stale(self._runtime.now()) and not await self._keep_alive(session):
                request.place = None
                return None
            # Twice is as good as once: the second finds the key of the first.
            answer = await self._cluster.call(
                TXN, _entry(contender, session.id, queue=request.queue), resend=True, doubt=contender.doubt
            )
        except LeaseEnded:
            self._sessions.end(session)
            request.place = None
            return None
        finally:
            contender.entered.set()
        if answer.succeeded:
            return self._granted(contender, answer.header.revision)
        return await self._entered_behind(request, contender, answer)

    async def _entered_behind(
        self, request: Request, contender: Contender, answer: rpc.TxnResponse
    ) -> Grant | Busy | None:
        """Read the answer of a transaction that found others below the prefix."""
        oldest = answer.responses[0].response_range.kvs[0]
        if oldest.key == contender.key and oldest.value == contender.value:
            # The first of two equal requests was carried out, and its answer lost.
            return self._granted(contender, oldest.create_revision)
        busy = Busy(owner=_owner_of(oldest))
        if not request.queue:
            self._sessions.leave([contender])
            request.place = None
            return busy
        nested = answer.responses[1].response_txn
        if nested.succeeded:
            contender.revision = answer.header.revision
            contender.before = nested.responses[0].response_range.kvs[0].key
            return busy
        mine = nested.responses[0].response_range.kvs[0]
        if mine.value == contender.value:
            contender.revision = mine.create_revision
            return await self._look_again(request, contender)
        # A key of ours that should not be there any more. Its session keeps it no longer than a ttl.
        contender.doubt()
        self._sessions.leave([contender])
        request.place = None
        return None

    async def _look_again(self, request: Request, contender: Contender) -> Grant | Busy | None:
        """Look who is in front. None: our key has gone, begin anew."""
        if contender.session is not None and contender.session.retired:
            moved = await self._renew_in([contender], contender.session.seconds)
            outcome = moved[contender.owner]
            if isinstance(outcome, Unknown):
                # Without a session that is kept alive there is no place in the line to wait in.
                raise outcome.error
        look = rpc.TxnRequest(compare=[contender.guard])
        in_front = _range(contender.prefix, rpc.RangeRequest.DESCEND, keys_only=True)
        in_front.max_create_revision = contender.revision - 1
        look.success.add(request_range=in_front)
        look.success.add(request_range=_range(contender.prefix, rpc.RangeRequest.ASCEND))
        answer = await self._cluster.call(TXN, look, resend=True)
        session = contender.session
        assert session is not None
        if answer.succeeded:
            found = answer.responses[0].response_range.kvs
            if found:
                contender.before = found[0].key
                return Busy(owner=_owner_of(answer.responses[1].response_range.kvs[0]))
            # Who waited must not be given what is left of the session's ttl only.
            if not session.is_stale(self._runtime.now()) or session.retired or await self._keep_alive(session):
                return self._granted(contender, contender.revision)
        self._forget(contender)
        request.place = None
        return None

    def _granted(self, contender: Contender, revision: int) -> Grant:
        session = contender.session
        assert session is not None
        assert revision > 0
        self._watches.forget(contender)
        contender.revision = revision
        contender.until = session.anchor + session.ttl
        return Grant(contender.name, contender.owner, revision, session.ttl, session.anchor, contender)

    def _forget(self, contender: Contender) -> None:
        self._watches.forget(contender)
        self._sessions.leave([contender])

    async def wait(self, request: Request, busy: Busy, until: float) -> None:
        """See `LockBackend.wait`. Keeps the session alive meanwhile, and with it the place in the queue."""
        del busy
        contender: Contender | None = request.place
        if contender is None or contender.session is None:
            return
        self._watches.watch(contender)
        while True:
            session = contender.session
            now = self._runtime.now()
            if await request.wake.wait(max(0.0, min(until, session.keep_at) - now)):
                request.wake.clear()
                return
            now = self._runtime.now()
            if now >= until or session.retired or session.ended or now >= session.anchor + session.ttl:
                return
            if now >= session.keep_at:
                try:
                    await self._keep_alive(session)
                except LockError as error:
                    log.debug("waiting for lock %r: %s", request.name, error)

    async def abandon(self, request: Request) -> None:
        """See `LockBackend.abandon`."""
        contender: Contender | None = request.place
        if contender is None:
            return
        # What was sent is heard out: else the key could be created after it was deleted.
        await contender.entered.wait(CALL_SECONDS)
        self._watches.forget(contender)
        session = contender.session
        assert session is not None
        contender.until = -inf
        if not session.ended:
            if self._sessions.is_last(contender):
                await self._sessions.revoke(session)
            else:
                await self._cluster.call(TXN, _deletion([contender]), resend=True)
        self._sessions.leave([contender])
        request.place = None

    # -- keep --------------------------------------------------------------------------------------------------------

    async def _keep_alive(self, session: Session) -> bool:
        """
        Keep a session alive, but nothing in it that nobody wants any more. False if it has ended.

        Raises:
            LockError: No answer.
        """
        overdue = self._sessions.overdue(session)[:BATCH]
        if overdue:
            await self._cluster.call(TXN, _deletion(overdue), resend=True)
            self._sessions.leave(overdue)
        return await self._sessions.keep_alive(session)

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """See `LockBackend.renew`."""
        outcomes: dict[str, Renewal] = {}
        staying: dict[Session, list[Contender]] = {}
        moving: dict[int, list[Contender]] = {}
        now = self._runtime.now()
        for grant in grants:
            contender: Contender = grant.state
            session = contender.session
            assert session is not None
            seconds = whole_seconds(grant.ttl)
            contender.until = max(contender.until, now + seconds)
            if session.ended:
                outcomes[contender.owner] = Gone("session")
            elif session.retired or contender.adrift or not session.fits(seconds):
                moving.setdefault(seconds, []).append(contender)
            else:
                staying.setdefault(session, []).append(contender)
        for session, contenders in staying.items():
            outcomes.update(await self._renew_staying(session, contenders))
        for seconds, contenders in moving.items():
            outcomes.update(await self._renew_in(contenders, seconds))
        return [outcomes[grant.owner] for grant in grants]

    async def _renew_staying(self, session: Session, contenders: list[Contender]) -> dict[str, Renewal]:
        """Keep a session alive, and see that the keys are still there."""
        outcomes: dict[str, Renewal] = {}
        try:
            if not await self._keep_alive(session):
                return {contender.owner: Gone("session") for contender in contenders}
            anchor = session.anchor
            for batch in _batches(contenders):
                look = rpc.TxnRequest()
                for contender in batch:
                    look.success.add(request_range=rpc.RangeRequest(key=contender.key, keys_only=True))
                answer = await self._cluster.call(TXN, look, resend=True)
                for contender, one in zip(batch, answer.responses, strict=True):
                    revisions = [kv.create_revision for kv in one.response_range.kvs]
                    outcomes[contender.owner] = self._renewed(contender, revisions == [contender.revision], anchor)
        except LockError as error:
            return {contender.owner: Unknown(error) for contender in contenders} | outcomes
        return outcomes

    async def _renew_in(self, contenders: list[Contender], seconds: int) -> dict[str, Renewal]:
        """Move keys to another session: one of another ttl, or in place of one that is retired."""
        outcomes: dict[str, Renewal] = {}
        try:
            target = await self._sessions.fresh(seconds)
            if not await self._keep_alive(target):
                target = await self._sessions.fresh(seconds)
            anchor = target.anchor
            for batch in _batches(contenders):
                move = rpc.TxnRequest()
                for contender in batch:
                    put = rpc.PutRequest(key=contender.key, ignore_value=True, lease=target.id)
                    one = rpc.TxnRequest(compare=[contender.guard], success=[rpc.RequestOp(request_put=put)])
                    move.success.add(request_txn=one)

                def doubt(batch: list[Contender] = batch) -> None:
                    # On the one or on the other: neither is relied on, and the next renewal moves it again.
                    target.retired = True
                    for contender in batch:
                        contender.adrift = True

                answer = await self._cluster.call(TXN, move, resend=True, doubt=doubt)
                for contender, done in zip(batch, answer.responses, strict=True):
                    if done.response_txn.succeeded:
                        self._sessions.move(contender, target)
                    outcomes[contender.owner] = self._renewed(contender, done.response_txn.succeeded, anchor)
        except LockError as error:
            return {contender.owner: Unknown(error) for contender in contenders} | outcomes
        return outcomes

    def _renewed(self, contender: Contender, ours: bool, anchor: float) -> Renewal:  # noqa: FBT001 - read from an answer
        session = contender.session
        assert session is not None
        if not ours:
            self._forget(contender)
            return Gone("gone")
        if contender.until < inf:
            contender.until = anchor + session.ttl
        # Not the session's ttl, which the cluster may have raised: extend() sets the time left to what it was told.
        return Renewed(anchor)

    async def release(self, grant: Grant) -> bool:
        """See `LockBackend.release`. Not sent again by anybody but the engine."""
        contender: Contender = grant.state
        if contender.session is None or contender.session.ended:
            return False
        try:
            # If it is not answered, the session must not keep alive what nobody holds any more.
            answer = await self._cluster.call(TXN, _deletion([contender]), resend=False, doubt=contender.doubt)
        except BaseException:
            contender.until = min(contender.until, self._runtime.now())
            raise
        self._sessions.leave([contender])
        return bool(answer.responses[0].response_txn.succeeded)

    # -- look --------------------------------------------------------------------------------------------------------

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `LockBackend.holders`."""
        look = _range(self._queue_of(name), rpc.RangeRequest.ASCEND)
        answer = await self._cluster.call(RANGE, look, resend=True)
        if not answer.kvs:
            return []
        oldest = answer.kvs[0]
        remaining = None
        if oldest.lease:
            lease = await self._cluster.call(TIME_TO_LIVE, rpc.LeaseTimeToLiveRequest(ID=oldest.lease), resend=True)
            remaining = max(0.0, float(lease.TTL))
        owner, metadata = _read_value(oldest)
        return [Holder(owner, oldest.create_revision, remaining, decode_metadata(metadata), answer.count - 1)]

    async def break_lock(self, name: str) -> bool:
        """See `LockBackend.break_lock`."""
        look = _range(self._queue_of(name), rpc.RangeRequest.ASCEND, keys_only=True)
        answer = await self._cluster.call(RANGE, look, resend=True)
        if not answer.kvs:
            return False
        oldest = answer.kvs[0]
        guard = rpc.Compare(target=rpc.Compare.CREATE, key=oldest.key, create_revision=oldest.create_revision)
        broken = await self._cluster.call(
            TXN, rpc.TxnRequest(compare=[guard], success=[_delete(oldest.key)]), resend=False
        )
        return bool(broken.succeeded)

    async def ping(self) -> None:
        """See `LockBackend.ping`."""
        look = rpc.RangeRequest(key=f"{self._prefix}/".encode(), keys_only=True)
        await self._cluster.call(RANGE, look, resend=True)

    async def close(self) -> None:
        """See `LockBackend.close`. Ends the sessions, so that nothing stays behind for a ttl."""
        self._watches.close()
        await self._sessions.close()
        await self._cluster.close()

    def _queue_of(self, name: str) -> bytes:
        """Give the prefix of the keys of all who contend for a lock."""
        return f"{self._prefix}/{values.escape(name, '/')}/".encode()


def _entry(contender: Contender, lease_id: int, *, queue: bool) -> rpc.TxnRequest:
    """
    Ask for the lock in one transaction.

    ::

        if no key below the prefix:  put ours                                    -> held
        else:                        read the oldest
                                     if ours is not there: read the newest, put  -> in line behind that  (queue only)
                                     else:                 read ours
    """
    put = rpc.PutRequest(key=contender.key, value=contender.value, lease=lease_id)
    entry = rpc.TxnRequest()
    entry.compare.add(
        target=rpc.Compare.CREATE, key=contender.prefix, range_end=_end(contender.prefix), create_revision=0
    )
    entry.success.add(request_put=put)
    entry.failure.add(request_range=_range(contender.prefix, rpc.RangeRequest.ASCEND))
    if queue:
        behind = entry.failure.add().request_txn
        behind.compare.add(target=rpc.Compare.CREATE, key=contender.key, create_revision=0)
        behind.success.add(request_range=_range(contender.prefix, rpc.RangeRequest.DESCEND, keys_only=True))
        behind.success.add(request_put=put)
        behind.failure.add(request_range=rpc.RangeRequest(key=contender.key))
    return entry


def _deletion(contenders: Sequence[Contender]) -> rpc.TxnRequest:
    """Delete keys where they are still these contenders'."""
    deletion = rpc.TxnRequest()
    for contender in contenders:
        one = rpc.TxnRequest(compare=[contender.guard], success=[_delete(contender.key)])
        deletion.success.add(request_txn=one)
    return deletion


def _delete(key: bytes) -> rpc.RequestOp:
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))


def _range(prefix: bytes, order: rpc.RangeRequest.SortOrder, *, keys_only: bool = False) -> rpc.RangeRequest:
    """Read the key of the contender that was first (or last) to come."""
    return rpc.RangeRequest(
        key=prefix,
        range_end=_end(prefix),
        limit=1,
        sort_order=order,
        sort_target=rpc.RangeRequest.CREATE,
        keys_only=keys_only,
    )


def _end(prefix: bytes) -> bytes:
    """Give the first key behind all that begin with `prefix`, which ends with a slash."""
    return prefix[:-1] + b"0"


def _batches(contenders: list[Contender]) -> list[list[Contender]]:
    return [contenders[start : start + BATCH] for start in range(0, len(contenders), BATCH)]


def _read_value(kv: rpc.KeyValue) -> tuple[str, str]:
    """Give owner and metadata of a key; of a foreign client's the id of its lease, and whatever stands there."""
    text = kv.value.decode("utf-8", "replace")
    owner, _, metadata = text.partition(" ")
    if len(owner) == _OWNER_CHARS and metadata:
        return owner, metadata
    return kv.key.rpartition(b"/")[2].decode("utf-8", "replace"), text


def _owner_of(kv: rpc.KeyValue) -> str:
    return _read_value(kv)[0]
