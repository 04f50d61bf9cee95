"""
Locks on etcd 3.4 or later: one member, or a cluster.

Algorithm: everybody who wants the lock has a key ``PREFIX/NAME/<lease id in hexadecimal>`` that hangs on an etcd lease,
and the key with the lowest ``create_revision`` holds. So do ``etcdctl lock`` and the ``concurrency`` package of etcd's
Go client (``client/v3/concurrency/mutex.go``), which therefore exclude with lockkit on the same key, in order of
arrival. The value is ``OWNER METADATA``.

==================  ===============================================================================================
acquire             one transaction: create the key; granted if there was no other below the prefix
wait                watch the key in front (`lockkit.backends.etcd.wakeup`), then look for one in front again
renew               keep the leases alive, and see in one transaction for 128 keys that each is still there
release             delete the key, if it still has the ``create_revision`` of the grant
token               the ``create_revision``
==================  ===============================================================================================

Why one round trip grants: the transaction compares the ``create_revision`` of *all* keys below the prefix with 0, which
is true only if there are none (a comparison over a range: etcd 3.3).

Leases of etcd are shared by the locks of a client that have the same ttl (`lockkit.backends.etcd.session`).

What the server must offer: etcd 3.4 (watch ids chosen by the client), a user with read and write rights below the
prefix.

What it cannot promise: tokens higher than before when the cluster comes back without its data.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from lockkit import validation
from lockkit.backend import (
    CALL_SECONDS,
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
    seconds_left,
)
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.cluster import settled
from lockkit.backends.etcd.connection import RANGE, TIME_TO_LIVE, TXN
from lockkit.backends.etcd.errors import LeaseEnded
from lockkit.backends.etcd.options import OPTIONS, adopt_cluster, open_cluster
from lockkit.backends.etcd.session import Contender, Sessions, whole_seconds
from lockkit.backends.etcd.wakeup import Watches
from lockkit.errors import BackendUnavailable, LockError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockkit.backends.etcd.cluster import Cluster
    from lockkit.backends.etcd.session import Session
    from lockkit.url import Url

__all__ = ["EtcdBackend"]

log = logging.getLogger("lockkit")

BATCH = 100
"""Keys that one transaction is about. etcd's default for --max-txn-ops is 128, and an operation that is a transaction
itself counts for what is in it, too. Fewer takes more round trips."""

HEAR_OUT_SECONDS = 1.0
"""How long an acquisition that is given up waits for the answer to its request, which says whether there is anything to
undo. Longer delays the caller when the cluster hangs; shorter has a session retired for nothing."""

UNWATCHED_SECONDS = 0.5
"""A waiter looks again after this time when it has no watch. Longer hands over later, shorter asks more often."""

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
        answer_by = self._answer_by(request)
        outcome: Grant | Busy | None = None
        if request.state is not None:
            outcome = await self._look_again(request, request.state, answer_by)
        while outcome is None:
            value = f"{request.owner} {request.metadata}".encode()
            contender = Contender(
                request.name, request.owner, self._queue_of(request.name), value, self._runtime.event()
            )
            contender.wake = request.wake if request.queue else None
            request.state = contender
            await self._sessions.join(contender, whole_seconds(request.ttl), answer_by)
            contender.entering = True
            # A caller that is cancelled leaves it running: `abandon` hears out whether there is anything to undo.
            outcome = await settled(self._runtime, self._enter(request, contender, answer_by), answer_by)
        return outcome

    def _answer_by(self, request: Request) -> float:
        now = self._runtime.now()
        return now + seconds_left(request.answer_by, now)

    async def _enter(self, request: Request, contender: Contender, answer_by: float) -> Grant | Busy | None:
        """Create the key. None: its session has ended meanwhile, begin anew."""
        session = contender.session
        assert session is not None
        try:
            if session.is_stale(self._runtime.now()) and not await self._keep_alive(session, answer_by):
                request.state = None
                return None
            if contender.until == -inf:
                raise BackendUnavailable("the request was given up")
            # Twice is as good as once: the second finds the key of the first.
            entry = _entry(contender, session.id, queue=request.queue)
            answer = await self._cluster.call(TXN, entry, resend=True, doubt=contender.doubt, answer_by=answer_by)
        except LeaseEnded:
            self._sessions.end(session)
            request.state = None
            return None
        finally:
            contender.entered.set()
        if answer.succeeded:
            contender.created(answer.header.revision)
            return self._granted(contender)
        return await self._entered_behind(request, contender, answer, answer_by)

    async def _entered_behind(
        self, request: Request, contender: Contender, answer: rpc.TxnResponse, answer_by: float
    ) -> Grant | Busy | None:
        """Read the answer of a transaction that found others below the prefix."""
        oldest = answer.responses[0].response_range.kvs[0]
        if oldest.key == contender.key and oldest.value == contender.value:
            # The first of two equal requests was carried out, and its answer lost.
            contender.created(oldest.create_revision)
            return self._granted(contender)
        busy = Busy(owner=_owner_of(oldest))
        if not request.queue:
            self._sessions.leave([contender])
            request.state = None
            return busy
        nested = answer.responses[1].response_txn
        if nested.succeeded:
            contender.created(answer.header.revision)
            contender.before = nested.responses[0].response_range.kvs[0].key
            return busy
        mine = nested.responses[0].response_range.kvs[0]
        if mine.value == contender.value:
            contender.created(mine.create_revision)
            return await self._look_again(request, contender, answer_by)
        # A key of ours that should not be there any more. Its session keeps it no longer than a ttl.
        contender.doubt()
        self._sessions.leave([contender])
        request.state = None
        return None

    async def _look_again(self, request: Request, contender: Contender, answer_by: float) -> Grant | Busy | None:
        """Look who is in front. None: our key has gone, begin anew."""
        look = rpc.TxnRequest(compare=[contender.guard])
        in_front = _range(contender.prefix, rpc.RangeRequest.DESCEND, keys_only=True)
        in_front.max_create_revision = contender.revision - 1
        look.success.add(request_range=in_front)
        look.success.add(request_range=_range(contender.prefix, rpc.RangeRequest.ASCEND))
        answer = await self._cluster.call(TXN, look, resend=True, answer_by=answer_by)
        session = contender.session
        assert session is not None
        if answer.succeeded and not session.is_over:
            found = answer.responses[0].response_range.kvs
            if found:
                contender.before = found[0].key
                return Busy(owner=_owner_of(answer.responses[1].response_range.kvs[0]))
            # Who waited must not be given what is left of the session's ttl only.
            if not session.is_stale(self._runtime.now()) or await self._keep_alive(session, answer_by):
                return self._granted(contender)
        self._forget(contender)
        request.state = None
        return None

    def _granted(self, contender: Contender) -> Grant:
        session = contender.session
        assert session is not None
        assert contender.revision > 0
        self._watches.forget(contender)
        if contender.until > -inf:
            contender.until = session.ends_at
        return Grant(contender.name, contender.owner, contender.revision, session.ttl, session.anchor, contender)

    def _forget(self, contender: Contender) -> None:
        self._watches.forget(contender)
        self._sessions.leave([contender])

    async def wait(self, request: Request, busy: Busy, until: float) -> None:
        """See `LockBackend.wait`. Keeps the session alive meanwhile, and with it the place in the queue."""
        del busy
        contender: Contender | None = request.state
        if contender is None or contender.session is None:
            return
        session = contender.session
        while True:
            # Each time: the member that was asked last is the one to watch at.
            watched = self._watches.watch(contender)
            now = self._runtime.now()
            wake_at = min(until, session.keep_at, inf if watched else now + UNWATCHED_SECONDS)
            if await request.wake.wait(max(0.0, wake_at - now)):
                request.wake.clear()
                return
            now = self._runtime.now()
            if not watched or now >= until or session.is_over or now >= session.ends_at:
                return
            if now >= session.keep_at:
                try:
                    await self._keep_alive(session, min(self._answer_by(request), session.ends_at))
                except LockError as error:
                    log.debug("waiting for lock %r: %s", request.name, error)

    async def abandon(self, request: Request) -> None:
        """See `LockBackend.abandon`."""
        contender: Contender | None = request.state
        if contender is None:
            return
        contender.until = -inf
        answer_by = self._answer_by(request)
        left = answer_by - self._runtime.now()
        # What was sent is heard out. If that takes too long, the key may be created after it is deleted here.
        if contender.entering and not await contender.entered.wait(min(HEAR_OUT_SECONDS, left / 2)):
            contender.doubt()
        self._watches.forget(contender)
        session = contender.session
        if session is not None and not session.ended:
            if contender.doubted and self._sessions.close_if_unused(session):
                await self._sessions.revoke(session, answer_by)
            else:
                await self._cluster.call(TXN, _deletion([contender]), resend=True, answer_by=answer_by)
        self._sessions.leave([contender])
        request.state = None

    # -- keep --------------------------------------------------------------------------------------------------------

    async def _keep_alive(self, session: Session, answer_by: float) -> bool:
        """
        Keep a session alive, but nothing in it that nobody wants any more. False if it has ended.

        Raises:
            LockError: No answer.
        """
        if session.is_over:
            return False
        session.put_off(self._runtime.now())
        for batch in _batches(self._sessions.overdue(session)):
            await self._cluster.call(TXN, _deletion(batch), resend=True, answer_by=answer_by)
            self._sessions.leave(batch)
        return await self._sessions.keep_alive(session, answer_by)

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """See `LockBackend.renew`."""
        outcomes: dict[str, Renewal] = {}
        staying: dict[Session, list[Contender]] = {}
        moving: dict[int, list[Contender]] = {}
        now = self._runtime.now()
        answer_by = now + CALL_SECONDS
        for grant in grants:
            contender: Contender = grant.state
            session = contender.session
            assert session is not None
            seconds = whole_seconds(grant.ttl)
            contender.until = max(contender.until, now + seconds)
            if session.is_over:
                outcomes[contender.owner] = Gone("session")
            elif contender.target is not None or not session.fits(seconds):
                moving.setdefault(seconds, []).append(contender)
            else:
                staying.setdefault(session, []).append(contender)
        for session, contenders in staying.items():
            # Before it ends: of several members that leaves time to ask another one when the first hangs.
            outcomes.update(await self._renew_staying(session, contenders, min(answer_by, session.ends_at)))
        for seconds, contenders in moving.items():
            outcomes.update(await self._renew_moving(contenders, seconds, answer_by))
        return [outcomes[grant.owner] for grant in grants]

    async def _renew_staying(
        self, session: Session, contenders: list[Contender], answer_by: float
    ) -> dict[str, Renewal]:
        """Keep a session alive, and see that the keys are still there."""
        outcomes: dict[str, Renewal] = {}
        try:
            if not await self._keep_alive(session, answer_by):
                return {contender.owner: Gone("session") for contender in contenders}
            anchor = session.anchor
            for batch in _batches(contenders):
                look = rpc.TxnRequest()
                for contender in batch:
                    look.success.add(request_range=rpc.RangeRequest(key=contender.key, keys_only=True))
                answer = await self._cluster.call(TXN, look, resend=True, answer_by=answer_by)
                for contender, one in zip(batch, answer.responses, strict=True):
                    revisions = [kv.create_revision for kv in one.response_range.kvs]
                    outcomes[contender.owner] = self._renewed(contender, revisions == [contender.revision], anchor)
        except LockError as error:
            return {contender.owner: Unknown(error) for contender in contenders} | outcomes
        return outcomes

    async def _renew_moving(self, contenders: list[Contender], seconds: int, answer_by: float) -> dict[str, Renewal]:
        """Move keys to a session of another ttl: somebody has extended to that, or the answer to it was lost."""
        outcomes: dict[str, Renewal] = {}
        try:
            target = await self._sessions.join_moving(contenders, seconds, answer_by)
            if not await self._keep_alive(target, answer_by):
                target = await self._sessions.join_moving(contenders, seconds, answer_by)
            anchor = target.anchor
            pending = contenders
            while pending:
                batch, pending = pending[: BATCH // 2], pending[BATCH // 2 :]
                move = rpc.TxnRequest(success=[_move(contender, target) for contender in batch])
                answer = await self._cluster.call(TXN, move, resend=True, answer_by=answer_by)
                for contender, one in zip(batch, answer.responses, strict=True):
                    found = one.response_txn.responses[0].response_range.kvs
                    if one.response_txn.succeeded:
                        contender.modified = answer.header.revision
                    elif not found or found[0].create_revision != contender.revision:
                        outcomes[contender.owner] = self._renewed(contender, ours=False, anchor=anchor)
                        continue
                    else:
                        contender.modified = found[0].mod_revision
                        if found[0].lease != target.id:
                            # An earlier move was carried out late. Now that its revision is known, none can be again.
                            pending = [*pending, contender]
                            continue
                    self._sessions.moved(contender, target)
                    outcomes[contender.owner] = self._renewed(contender, ours=True, anchor=anchor)
        except LockError as error:
            return {contender.owner: Unknown(error) for contender in contenders} | outcomes
        return outcomes

    def _renewed(self, contender: Contender, ours: bool, anchor: float) -> Renewal:  # noqa: FBT001 - read from an answer
        session = contender.session
        assert session is not None
        if not ours:
            self._forget(contender)
            return Gone("gone")
        if session.is_over:
            return Gone("session")
        if contender.until < inf:
            contender.until = anchor + session.ttl
        # Not the session's ttl, which the cluster may have raised: extend() sets the time left to what it was told.
        return Renewed(anchor)

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        """See `LockBackend.release`. Not sent again by anybody but the engine."""
        contender: Contender = grant.state
        if contender.session is None or contender.session.ended:
            return False
        deletion = rpc.TxnRequest(compare=[contender.guard], success=[_delete(contender.key)])
        try:
            answer = await self._cluster.call(TXN, deletion, resend=False, answer_by=answer_by)
        except BaseException:
            # Not before: a heartbeat of another lock would delete the key, and this one would look lost.
            contender.until = min(contender.until, self._runtime.now())
            raise
        self._sessions.leave([contender])
        return bool(answer.succeeded)

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        """See `LockBackend.release_all`. A session in which nothing else is goes as a whole, with all its keys."""
        contenders: set[Contender] = {grant.state for grant in grants}
        now = self._runtime.now()
        for contender in contenders:
            contender.until = min(contender.until, now)
        failed: LockError | None = None
        for session in {one for contender in contenders for one in (contender.session, contender.target) if one}:
            try:
                if self._sessions.close_if_unused(session):
                    await self._sessions.revoke(session, answer_by)
                    continue
                for batch in _batches([one for one in contenders if one.session is session]):
                    await self._cluster.call(TXN, _deletion(batch), resend=True, answer_by=answer_by)
                    self._sessions.leave(batch)
            except LockError as error:
                failed = error
        if failed is not None:
            raise failed

    # -- look --------------------------------------------------------------------------------------------------------

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `LockBackend.holders`."""
        answer_by = self._runtime.now() + CALL_SECONDS
        look = _range(self._queue_of(name), rpc.RangeRequest.ASCEND)
        answer = await self._cluster.call(RANGE, look, resend=True, answer_by=answer_by)
        if not answer.kvs:
            return []
        oldest = answer.kvs[0]
        remaining = None
        if oldest.lease:
            ask = rpc.LeaseTimeToLiveRequest(ID=oldest.lease)
            lease = await self._cluster.call(TIME_TO_LIVE, ask, resend=True, answer_by=answer_by)
            remaining = max(0.0, float(lease.TTL))
        owner, metadata = _read_value(oldest)
        return [Holder(owner, oldest.create_revision, remaining, decode_metadata(metadata), answer.count - 1)]

    async def break_lock(self, name: str) -> bool:
        """See `LockBackend.break_lock`."""
        answer_by = self._runtime.now() + CALL_SECONDS
        look = _range(self._queue_of(name), rpc.RangeRequest.ASCEND, keys_only=True)
        answer = await self._cluster.call(RANGE, look, resend=True, answer_by=answer_by)
        if not answer.kvs:
            return False
        oldest = answer.kvs[0]
        guard = rpc.Compare(target=rpc.Compare.CREATE, key=oldest.key, create_revision=oldest.create_revision)
        deletion = rpc.TxnRequest(compare=[guard], success=[_delete(oldest.key)])
        broken = await self._cluster.call(TXN, deletion, resend=False, answer_by=answer_by)
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
        return f"{self._prefix}/{validation.escape(name, '/')}/".encode()


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
        # Not the guard: what was created late has another revision than what was known before.
        one = rpc.TxnRequest(compare=[contender.mark], success=[_delete(contender.key)])
        deletion.success.add(request_txn=one)
    return deletion


def _move(contender: Contender, target: Session) -> rpc.RequestOp:
    """
    Have a key hang on another session; with it stay its ``create_revision``, and so the token.

    Only if nothing has changed the key since: a move that was not answered cannot be carried out after a later one.
    """
    unchanged = rpc.Compare(target=rpc.Compare.MOD, key=contender.key, mod_revision=contender.modified)
    put = rpc.PutRequest(key=contender.key, ignore_value=True, lease=target.id)
    move = rpc.TxnRequest(compare=[contender.guard, unchanged], success=[rpc.RequestOp(request_put=put)])
    move.failure.add(request_range=rpc.RangeRequest(key=contender.key, keys_only=True))
    return rpc.RequestOp(request_txn=move)


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


def _batches(contenders: Sequence[Contender]) -> list[Sequence[Contender]]:
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
