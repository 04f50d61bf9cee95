"""
Locks on etcd 3.4 or later: one member, or a cluster.

Algorithm: each contender for the lock has a key ``PREFIX/NAME/<lease id in hexadecimal>`` that is attached to an etcd
lease, and the key with the lowest ``create_revision`` holds. ``etcdctl lock`` and the ``concurrency`` package of etcd's
Go client (``client/v3/concurrency/mutex.go``) do the same, and therefore exclude with lockkit on the same key, in order
of arrival. The value is ``OWNER METADATA``.

A reader has a key below the same prefix (`lockkit.backends.etcd.values`), and waits for the writers in front of it
only; a writer waits for every key in front, as above, and so do foreign clients. Semaphores have permits of their own
(`lockkit.backends.etcd.permits`).

==================  ===============================================================================================
acquire             one transaction: create the key; granted if there was no other below the prefix
wait                watch the key in front (`lockkit.backends.etcd.wakeup`); when it goes away, check for one in front
                    again
renew               keep the leases alive, and check in one transaction for 100 keys that each is still there
release             delete the key, if it still has the ``create_revision`` of the grant
update, downgrade   replace the value, if the key has not changed since its last known revision
token               the ``create_revision``
note                the key ``PREFIX+note/NAME`` (`lockkit.backends.etcd.inspection`)
==================  ===============================================================================================

Why one round trip suffices: the transaction compares the ``create_revision`` of *all* keys below the prefix with 0,
which is true only if there are none (a comparison over a range: etcd 3.3).

What lives apart from the locks has the prefix ``PREFIX+once`` or ``PREFIX+sem`` instead.

A client's locks with the same ttl share an etcd lease (`lockkit.backends.etcd.session`).

Requirements: etcd 3.4 (watch ids chosen by the client), a user with read and write rights below the prefix.

Known limit: when the cluster comes back without its data, tokens may be lower than before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, ClassVar

from lockkit import validation
from lockkit.backend import (
    CALL_SECONDS,
    SINCE_EXACT_SECONDS,
    SPACES,
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    Host,
    LockBackend,
    NamesPage,
    Note,
    Option,
    Renewal,
    Renewed,
    Request,
    Unknown,
    apart,
    seconds_left,
    split_space,
    unproven,
    with_since,
)
from lockkit.backends.etcd import permits, transactions, values
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.cluster import Cluster, settle_by
from lockkit.backends.etcd.connection import RANGE, TXN
from lockkit.backends.etcd.contender import Contender, Session
from lockkit.backends.etcd.errors import LeaseEnded
from lockkit.backends.etcd.inspection import Inspection, UnprovenKey
from lockkit.backends.etcd.options import OPTIONS, adopt_cluster, check_adopted_options, open_cluster
from lockkit.backends.etcd.session import Sessions, round_up
from lockkit.backends.etcd.wakeup import WakeupListener
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import wall_clock
from lockkit.units import Instant, Seconds
from lockkit.url import Url

log = logging.getLogger("lockkit")

ABANDON_WAIT_SECONDS = 1.0
"""Longest time that an abandoned acquisition waits for the answer to its request, which says what there is to undo.
Longer delays the caller when the cluster hangs; shorter retires a session for nothing."""

UNWATCHED_SECONDS = 0.5
"""How often a waiter without a watch looks again. Longer hands over later, shorter asks more often."""

_NOTES = "+note"
_MARKS = "+broken"

_CAPABILITIES = Capabilities(
    crash_release="ttl",
    min_ttl=1.0,
    ttl_granularity=1.0,
    fair=True,
    wakeup="push",
    token_source="the key's create_revision; a cluster that comes back without its data may start lower",  # noqa: S106
    survives_node_loss=True,
    survives_data_loss=False,
    shared_mode=True,
    clock_assumption="the leader's clock runs at the rate of the clients' within 1 %",
    waiters_visible=True,
    scope="network",
    caveat="A holder that is paused beyond its ttl may still write: guard storage by token. One member alone survives "
    "no loss; the cluster may raise a ttl.",
    metadata_update=True,
    listing=True,
    fair_shared=True,
    downgrade=True,
    permits="native",
    notes=True,
)


class EtcdBackend(LockBackend):
    """
    Processes that reach the same etcd.

    Attributes:
        cluster: Its members, also for guards of data in the same etcd.
    """

    capabilities = _CAPABILITIES
    options: ClassVar[Mapping[str, Option]] = OPTIONS

    def __init__(self, url: str, cluster: Cluster, options: Mapping[str, Any], host: Host) -> None:
        self._url = url
        self.cluster = self._cluster = cluster
        self._runtime = host.runtime
        self._prefix: str = options["prefix"]
        self._sessions = Sessions(host, cluster)
        self._inspection = Inspection(host.runtime, cluster)
        self._listener = WakeupListener(host.runtime, cluster)

    @classmethod
    def examiner(cls, url: Url) -> str:
        del url
        return "lockkit.backends.etcd.examine"

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> EtcdBackend:
        return cls(url.safe_text, open_cluster(url, options, host), options, host)

    @classmethod
    def adopt(cls, client: object, options: Mapping[str, Any], host: Host) -> EtcdBackend | None:
        """See `LockBackend.adopt`: takes a gRPC channel, or a client that has one, for the same API (sync or async)."""
        found = adopt_cluster(client, host)
        if found is None:
            return None
        check_adopted_options(options)
        return cls(found[0], found[1], options, host)

    @property
    def url(self) -> str:
        return self._url

    # -- acquire ---------------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        try:
            return await self._attempt(request, self._answer_by(request))
        except BackendUnavailable as error:
            contender: Contender | None = request.state
            if not error.sent and contender is not None:
                # That was the last request; one before it may have created a key.
                error.sent = contender.create_revision > 0 or contender.may_come_late
                if not error.sent:
                    self._forget(request, contender)
            raise

    async def _attempt(self, request: Request, answer_by: float) -> Grant | Busy:
        outcome: Grant | Busy | None = None
        if request.state is not None:
            outcome = await self._check_queue(request, request.state, answer_by)
        while outcome is None:
            since = wall_clock()
            value = values.encode(request.owner, with_since(request.metadata, since))
            wake = request.wake if request.queue else None
            prefix = self._prefix_of(request.name)
            contender = Contender(request.name, request.owner, prefix, value, wake, request.mode)
            contender.joined_at, contender.since = self._runtime.now(), since
            request.state = contender
            await self._sessions.attach(contender, round_up(request.ttl), answer_by)
            contender.created = self._runtime.event()
            # Goes on if the caller is cancelled: `abandon` waits for the answer, which says what there is to undo.
            outcome = await settle_by(self._runtime, self._create_key(request, contender, answer_by), answer_by)
            if isinstance(outcome, Busy) and not contender.create_revision:
                self._forget(request, contender)  # it does not wait
        return outcome

    def _answer_by(self, request: Request) -> float:
        now = self._runtime.now()
        return now + seconds_left(request.answer_by, now)

    async def _create_key(self, request: Request, contender: Contender, answer_by: float) -> Grant | Busy | None:
        """Acquire the lock or take a place in its queue. None: the session has ended meanwhile, start again."""
        session = contender.session
        assert session is not None
        assert contender.created is not None
        try:
            if session.is_stale(self._runtime.now()) and not await self._sessions.keep_alive(session, answer_by):
                request.state = None
                return None
            if contender.wanted_until == -inf:
                raise BackendUnavailable("the request was given up")
            answer = await self._cluster.call(
                TXN,
                _creation(request, contender, session.id),
                # Sending it twice does no harm: the second finds the key of the first. Not so for a permit.
                resend=contender.mode != "permit",
                on_unknown=contender.set_may_come_late,
                answer_by=answer_by,
            )
            if contender.mode == "permit":
                # Before `created` is set: this may send another request, for a slot.
                return await self._enter_permits(request, contender, answer, answer_by)
        except LeaseEnded:
            self._sessions.end(session)
            request.state = None
            return None
        except ConfigurationError:
            # Refused, so there is nothing to delete. That may be refused, too, and then no heartbeat would be sent.
            if not contender.create_revision:
                self._forget(request, contender)
            raise
        finally:
            contender.created.set()
        if answer.succeeded:
            contender.set_revision(answer.header.revision)
            return self._grant(request, contender)
        return await self._read_busy_answer(request, contender, answer, answer_by)

    async def _read_busy_answer(
        self, request: Request, contender: Contender, answer: rpc.TxnResponse, answer_by: float
    ) -> Grant | Busy | None:
        """Read the answer of a transaction that found a key that excludes the contender's, or its own."""
        oldest = answer.responses[0].response_range.kvs[0]
        if oldest.value == contender.value:
            # The first of two equal requests was executed, and its answer was lost.
            contender.set_revision(oldest.create_revision)
            return self._grant(request, contender)
        busy = Busy(owner=_owner_of(oldest))
        if len(answer.responses) == 1:
            return busy
        nested = answer.responses[2].response_txn
        if nested.succeeded:
            contender.set_revision(answer.header.revision)
            return self._behind(contender, answer) or self._grant(request, contender)
        ours = nested.responses[0].response_range.kvs
        if not ours:
            return busy
        if ours[0].value == contender.value:
            # As above, behind another one.
            contender.set_revision(ours[0].create_revision)
            return await self._check_queue(request, contender, answer_by)
        # A key of this client that should be gone. Its session keeps it no longer than a ttl.
        contender.set_may_come_late()
        self._forget(request, contender)
        return None

    def _forget(self, request: Request, contender: Contender) -> None:
        """Forget a contender that has no key, or none any more."""
        self._detach(contender)
        request.state = None

    async def _enter_permits(
        self, request: Request, contender: Contender, answer: rpc.TxnResponse, answer_by: float
    ) -> Grant | Busy | None:
        """Read the answer of a permit's transaction, and take a slot if one is free."""
        busy = await permits.enter(self._cluster, contender, request, answer, answer_by)
        if busy is not None:
            return busy
        return await self._grant_from_queue(request, contender, held=contender.slot is not None, answer_by=answer_by)

    async def _check_queue(self, request: Request, contender: Contender, answer_by: float) -> Grant | Busy | None:
        """Check whether the lock is free for this contender. None: its key is gone, start again."""
        if contender.mode == "permit":
            busy = await permits.check(self._cluster, contender, request, answer_by)
            held = contender.slot is not None
        else:
            check = transactions.check_queue(contender)
            answer = await self._cluster.call(TXN, check, resend=True, answer_by=answer_by)
            held = answer.succeeded
            busy = self._behind(contender, answer) if held else None
        if busy is not None:
            return busy
        return await self._grant_from_queue(request, contender, held=held, answer_by=answer_by)

    @staticmethod
    def _behind(contender: Contender, answer: rpc.TxnResponse) -> Busy | None:
        """Read what is in front of a contender; None if nothing there excludes it."""
        oldest, in_front = (one.response_range.kvs for one in answer.responses[:2])
        if not in_front or (contender.mode == "shared" and values.is_downgraded(in_front[0].value)):
            return None
        contender.waits_for(answer.header.revision, in_front[0].key)
        return Busy(owner=_owner_of(oldest[0]))

    async def _grant_from_queue(
        self, request: Request, contender: Contender, *, held: bool, answer_by: float
    ) -> Grant | None:
        """Grant what a contender holds, if its session lasts. None: start again."""
        session = contender.session
        assert session is not None
        # After a long wait, little may be left of the session's ttl.
        if held and session.is_stale(self._runtime.now()):
            held = await self._sessions.keep_alive(session, answer_by)
        if held:
            return self._grant(request, contender)
        self._forget(request, contender)
        return None

    def _grant(self, request: Request, contender: Contender) -> Grant:
        """Grant what a contender holds."""
        session = contender.session
        assert session is not None
        assert contender.create_revision > 0
        self._listener.unwatch(contender)
        if contender.wanted_until > -inf:
            contender.wanted_until = session.ends_at
        if self._runtime.now() - contender.joined_at > SINCE_EXACT_SECONDS:
            self._correct_since(contender, request.metadata)
        return Grant(
            contender.name, contender.owner, contender.create_revision, session.ttl, session.anchor, contender,
            slot=contender.slot,
        )  # fmt: skip

    def _correct_since(self, contender: Contender, metadata: str) -> None:
        """Have the value of a key say when it was granted, in the background: that is later than it was created."""
        contender.since = wall_clock()

        async def correct() -> None:
            try:
                await self._rewrite(contender, lambda value: _described(contender, metadata, value))
            except LockError as error:
                log.debug("lock %r is shown as held since it was asked for: %s", contender.name, error)

        try:
            self._runtime.spawn("lockkit-etcd-since", correct)
        except RuntimeError as error:  # no more threads
            log.debug("lock %r is shown as held since it was asked for: %s", contender.name, error)

    def _detach(self, contender: Contender) -> None:
        self._listener.unwatch(contender)
        self._sessions.detach(contender)

    async def wait(self, request: Request, busy: Busy, until: Instant) -> None:
        """See `LockBackend.wait`. Keeps the session alive meanwhile, and with it the place in the queue."""
        del busy
        contender: Contender | None = request.state
        if contender is None or contender.session is None:
            return
        session = contender.session
        while True:
            # Each time: the client may have switched to another member, and must watch there.
            is_watched = self._listener.watch(contender)
            now = self._runtime.now()
            wake_at = min(until, session.keep_alive_at, inf if is_watched else now + UNWATCHED_SECONDS)
            if await request.wake.wait(max(0.0, wake_at - now)):
                request.wake.clear()
                return
            now = self._runtime.now()
            if not is_watched or now >= until or session.is_over or now >= session.ends_at:
                return
            if now >= session.keep_alive_at:
                try:
                    await self._sessions.keep_alive(session, min(self._answer_by(request), session.ends_at))
                except LockError as error:
                    log.debug("waiting for lock %r: %s", request.name, error)

    async def abandon(self, request: Request) -> None:
        contender: Contender | None = request.state
        if contender is None:
            return
        contender.wanted_until = -inf
        answer_by = self._answer_by(request)
        timeout = min(ABANDON_WAIT_SECONDS, (answer_by - self._runtime.now()) / 2)
        # Without an answer to the request, the member may create the key after it is deleted here.
        if contender.created is not None and not await contender.created.wait(timeout):
            contender.set_may_come_late()
        self._listener.unwatch(contender)
        session = contender.session
        if session is not None and not session.ended:
            revoked = contender.may_come_late and await self._sessions.revoke_if_unused(session, answer_by)
            if not revoked:
                await self._sessions.delete_keys([contender], answer_by)
        self._sessions.detach(contender)
        request.state = None

    # -- keep --------------------------------------------------------------------------------------------------------

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        outcomes: dict[str, Renewal] = {}
        staying: dict[Session, list[Contender]] = {}
        moving: dict[Contender, int] = {}
        now = self._runtime.now()
        answer_by = now + CALL_SECONDS
        for grant in grants:
            contender: Contender = grant.state
            session = contender.session
            assert session is not None
            ttl = round_up(grant.ttl)
            contender.wanted_until = max(contender.wanted_until, now + ttl)
            if session.is_over:
                outcomes[contender.owner] = Gone("session")
            elif contender.moving_to is None and session.has_ttl(ttl):
                staying.setdefault(session, []).append(contender)
            else:
                moving[contender] = ttl
        for session, contenders in staying.items():
            await self._renew_in(session, contenders, answer_by, outcomes)
        for contender, ttl in moving.items():
            outcomes[contender.owner] = await self._move(contender, ttl, answer_by)
        return [outcomes[grant.owner] for grant in grants]

    async def _renew_in(
        self, session: Session, contenders: Sequence[Contender], answer_by: float, outcomes: dict[str, Renewal]
    ) -> None:
        """Keep a session alive, and check that the keys in it are still there."""
        kept = False
        try:
            # Before it ends: that leaves time to ask another member when the first one hangs.
            if not await self._sessions.keep_alive(session, min(answer_by, session.ends_at)):
                outcomes.update((contender.owner, Gone("session")) for contender in contenders)
                return
            kept = True
            anchor = session.anchor
            gone: list[Contender] = []
            for batch in transactions.batches(contenders):
                request = transactions.read_keys([one.key for one in batch])
                answer = await self._cluster.call(TXN, request, resend=True, answer_by=answer_by)
                for contender, found in zip(batch, answer.responses, strict=True):
                    if contender.was_found(found.response_range.kvs):
                        outcomes[contender.owner] = self._renewed(contender, anchor)
                    else:
                        gone.append(contender)
            reasons = await self._gone(gone)
            outcomes.update((contender.owner, reason) for contender, reason in zip(gone, reasons, strict=True))
        except LockError as error:
            if kept and isinstance(error, BackendUnavailable):
                error.sent = True  # the heartbeat was
            for contender in contenders:
                outcomes.setdefault(contender.owner, Unknown(error))

    async def _move(self, contender: Contender, ttl: int, answer_by: float) -> Renewal:
        """Move a key to a session with another ttl: it was extended to that, or a move was not answered."""
        try:
            session = await self._sessions.prepare_move(contender, ttl, answer_by)
            while not await self._sessions.keep_alive(session, answer_by):
                session = await self._sessions.prepare_move(contender, ttl, answer_by)
            anchor, lease_id = session.anchor, session.id
            put = rpc.PutRequest(key=contender.key, ignore_value=True, lease=lease_id)
            if not await self._change(contender, lambda _: put, lambda kv: kv.lease == lease_id, answer_by):
                return (await self._gone([contender]))[0]
        except LockError as error:
            return Unknown(error)
        self._sessions.finish_move(contender)
        return self._renewed(contender, anchor)

    async def _change(
        self,
        contender: Contender,
        put: Callable[[bytes], rpc.PutRequest],
        is_done: Callable[[rpc.KeyValue], bool],
        answer_by: float,
    ) -> bool:
        """
        Change a key; return False if it is gone.

        Each attempt compares the last known revision, so none can be executed after a later one, nor twice.
        """
        while True:
            change = put(contender.value_now)
            request = transactions.change_key(contender, change)
            answer = await self._cluster.call(TXN, request, resend=True, answer_by=answer_by)
            if answer.succeeded:
                contender.mod_revision = answer.header.revision
                contender.value_now = contender.value_now if change.ignore_value else change.value
                return True
            kvs = answer.responses[0].response_range.kvs
            if not contender.was_found(kvs):
                return False
            # Another change meanwhile, or an earlier one that was not answered.
            contender.mod_revision, contender.value_now = kvs[0].mod_revision, kvs[0].value
            if is_done(kvs[0]):
                return True

    async def _gone(self, contenders: Sequence[Contender]) -> Sequence[Gone]:
        """Forget contenders whose keys have gone."""
        for contender in contenders:
            self._detach(contender)
        return await self._inspection.why_gone(
            [transactions.mark_of(self._marks_of(one.name), one.create_revision) for one in contenders]
        )

    def _marks_of(self, name: str) -> bytes:
        """Return where `break_lock` leaves marks for the holders of a lock."""
        return self._directory(name, _MARKS).encode()

    def _renewed(self, contender: Contender, anchor: Instant) -> Renewal:
        session = contender.session
        assert session is not None
        if session.is_over:
            return Gone("session")
        if contender.wanted_until < inf:
            contender.wanted_until = anchor + session.ttl
        # Not the session's ttl, which the cluster may have raised: extend() sets the time left to its argument.
        return Renewed(anchor)

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        """See `LockBackend.release`. Only the engine sends it again."""
        contender: Contender = grant.state
        if contender.session is None or contender.session.ended:
            return False
        deletion = transactions.delete_key(contender.key, contender.compare_revision)
        # Without an answer, a heartbeat of the session deletes the key once its ttl is over.
        answer = await self._cluster.call(TXN, deletion, resend=False, answer_by=answer_by)
        self._sessions.detach(contender)
        return bool(answer.succeeded)

    async def update(self, grant: Grant, metadata: str) -> Gone | None:
        def updated(value: bytes) -> bytes:
            return _described(grant.state, metadata, value)

        return None if await self._rewrite(grant.state, updated) else (await self._gone([grant.state]))[0]

    async def downgrade(self, grant: Grant) -> bool:
        """See `LockBackend.downgrade`. The key stays, in front of the writers that wait, with a mark in its value."""
        contender: Contender = grant.state

        def downgraded(value: bytes) -> bytes:
            return value if values.is_downgraded(value) else values.SHARED + value

        if not await self._rewrite(contender, downgraded):
            return False
        contender.mode = "shared"
        return True

    async def _rewrite(self, contender: Contender, change: Callable[[bytes], bytes]) -> bool:
        """Change the value of a key; return False if the key is gone."""

        def put(value: bytes) -> rpc.PutRequest:
            return rpc.PutRequest(key=contender.key, value=change(value), ignore_lease=True)

        contender.is_rewritten = True
        answer_by = self._runtime.now() + CALL_SECONDS
        return await self._change(contender, put, lambda kv: change(kv.value) == kv.value, answer_by)

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        """See `LockBackend.release_all`. Revokes a session that has nothing else, with all its keys."""
        contenders: list[Contender] = [grant.state for grant in grants]
        now = self._runtime.now()
        for contender in contenders:
            contender.wanted_until = min(contender.wanted_until, now)
        failure: LockError | None = None
        for session in {one for contender in contenders for one in (contender.session, contender.moving_to) if one}:
            try:
                if not await self._sessions.revoke_if_unused(session, answer_by):
                    remaining = [contender for contender in contenders if contender.session is session]
                    await self._sessions.delete_keys(remaining, answer_by)
            except LockError as error:
                failure = error
        if failure is not None:
            raise failure

    # -- inspect -----------------------------------------------------------------------------------------------------

    async def holders(self, name: str) -> Sequence[Holder]:
        return await self._inspection.holders(self._prefix_of(name), is_semaphore=_is_semaphore(name))

    async def confirm(self, grant: Grant) -> Gone | None:
        """See `LockBackend.confirm`. A lease that was granted holds the lock as long as its key is there."""
        contender: Contender = grant.state
        request = rpc.RangeRequest(key=contender.key, keys_only=True)
        answer = await self._cluster.call(RANGE, request, resend=True)
        if contender.was_found(answer.kvs):
            return None
        (gone,) = await self._gone([contender])
        return Gone("taken") if gone.reason == "gone" and await self.holders(grant.name) else gone

    async def break_lock(self, name: str) -> bool:
        """See `LockBackend.break_lock`. With ``prefix=``, applications may have keys below a lock's."""
        return await self._break(name)

    async def break_unproven(self, name: str) -> bool:
        return await self._break(name, proven=False)

    async def break_permit(self, name: str, slot: int) -> bool:
        return await self._break(name, slot=slot)

    async def _break(self, name: str, *, slot: int | None = None, proven: bool = True) -> bool:
        prefix, marks = self._prefix_of(name), self._marks_of(name)
        is_semaphore = _is_semaphore(name)
        try:
            return await self._inspection.break_lock(prefix, marks, is_semaphore=is_semaphore, slot=slot, proven=proven)
        except UnprovenKey as error:
            raise unproven(self._url, name, f"no client of locks has made the key {str(error)!r}") from error

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        """See `LockBackend.names`. A lock is held while there is a key below its prefix: the oldest holds."""
        space, _ = split_space(prefix)
        below = f"{self._prefix}{f'+{space}' if space else ''}/".encode()
        begin = self._prefix_of(prefix)[:-1]
        request = transactions.keys_from(begin if after is None else after.next, begin)
        answer = await self._cluster.call(RANGE, request, resend=True)
        # Each as the part of its keys that it is, in their order: many may be of waiters for the same lock.
        parts = dict.fromkeys(part for kv in answer.kvs if (part := _part_of_name(kv.key, below)) is not None)
        names = [apart(space, name) if space else name for part in parts if (name := _name_of(part)) is not None]
        if not answer.more:
            return NamesPage(names)
        last = answer.kvs[-1].key
        part = _part_of_name(last, below)
        return NamesPage(names, last + b"\0" if part is None else transactions.end(below + part + b"/"))

    async def read_note(self, name: str) -> Note | None:
        return await self._inspection.read_note(self._note_key(name))

    async def write_note(self, grant: Grant, text: str, keep: Seconds, answer_by: float = inf) -> bool:
        return await self._inspection.write_note(
            grant.state, self._note_key(grant.name), text, round_up(keep), answer_by
        )

    async def erase(self) -> None:
        for space in ("", *(f"+{space}" for space in SPACES)):
            for what in ("", _NOTES, _MARKS):
                below = transactions.delete_below(f"{self._prefix}{space}{what}/".encode())
                await self._cluster.call(TXN, below, resend=True)

    async def ping(self) -> None:
        request = rpc.RangeRequest(key=f"{self._prefix}/".encode(), keys_only=True)
        await self._cluster.call(RANGE, request, resend=True)

    async def close(self) -> None:
        """See `LockBackend.close`. Ends the sessions, so that no key stays for a ttl."""
        self._listener.close()
        await self._sessions.close()
        await self._cluster.close()

    def _prefix_of(self, name: str) -> bytes:
        """Return the prefix of the keys of all contenders for a lock."""
        return f"{self._directory(name)}/".encode()

    def _note_key(self, name: str) -> bytes:
        """Return the key of a note: not below the prefix of the contenders, whose keys are counted."""
        return self._directory(name, _NOTES).encode()

    def _directory(self, name: str, what: str = "") -> str:
        space, name = split_space(name)
        return f"{self._prefix}{f'+{space}' if space else ''}{what}/{validation.escape(name, '/')}"


def _part_of_name(key: bytes, below: bytes) -> bytes | None:
    """Return the part of a contender's key that is the escaped name; None for a key that belongs to no lock."""
    part, slash, _ = key.removeprefix(below).partition(b"/")
    return part if slash else None


def _name_of(part: bytes) -> str | None:
    """Return the name of a lock from its part of the key; None for one that lockkit cannot have written."""
    try:
        name = validation.lock_name(validation.unescape(part.decode()))
    except (UnicodeDecodeError, ConfigurationError):
        return None
    return name if validation.escape(name, "/").encode() == part else None


def _creation(request: Request, contender: Contender, lease_id: int) -> rpc.TxnRequest:
    """Return the transaction with which a contender begins."""
    create = permits.create_permit if contender.mode == "permit" else transactions.create_key
    return create(contender, lease_id, request)


def _described(contender: Contender, metadata: str, value: bytes) -> bytes:
    """Give the value of a key with this metadata, in place of another."""
    text = with_since(metadata, contender.since)
    return values.encode(contender.owner, text, downgraded=values.is_downgraded(value))


def _owner_of(kv: rpc.KeyValue) -> str:
    return values.owner_and_metadata(kv)[0]


def _is_semaphore(name: str) -> bool:
    return split_space(name)[0] == "sem"
