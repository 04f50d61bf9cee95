"""
Locks on etcd 3.4 or later: one member, or a cluster.

Algorithm: each contender for the lock has a key ``PREFIX/NAME/<lease id in hexadecimal>`` that is attached to an etcd
lease, and the key with the lowest ``create_revision`` holds. ``etcdctl lock`` and the ``concurrency`` package of etcd's
Go client (``client/v3/concurrency/mutex.go``) do the same, and therefore exclude with lockkit on the same key, in order
of arrival. The value is ``OWNER METADATA``.

A reader has a key below the same prefix (`lockkit.backends.etcd.keys`), and waits for the writers in front of it
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
note                the key ``PREFIX+note/NAME``, attached to an etcd lease of its own, which is not kept alive and ends
                    it; a new leader starts that lease again, so a note may live longer than it should, never shorter
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
    decode_metadata,
    seconds_left,
    since_stored,
    split_space,
    unproven,
    with_since,
)
from lockkit.backends.etcd import keys, permits
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.cluster import GRANT, RANGE, REVOKE, TIME_TO_LIVE, TXN, Cluster, settle_by
from lockkit.backends.etcd.errors import LeaseEnded
from lockkit.backends.etcd.keys import Contender, Session
from lockkit.backends.etcd.options import OPTIONS, TLS_OPTIONS, adopt_cluster, open_cluster
from lockkit.backends.etcd.session import Sessions, round_up
from lockkit.backends.etcd.wakeup import UNWATCHED_SECONDS, WakeupListener
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import wall_clock
from lockkit.units import Instant, Seconds
from lockkit.url import Url

log = logging.getLogger("lockkit")

ABANDON_WAIT_SECONDS = 1.0
"""Longest time that an abandoned acquisition waits for the answer to its request, which says what there is to undo.
Longer delays the caller when the cluster hangs; shorter retires a session for nothing."""

CLOSE_SECONDS = 0.2
"""Longest time to revoke sessions when a client is closed, after its locks were released. Longer delays the close when
the cluster hangs; shorter leaves sessions of a slow cluster to their ttl."""

KEYS_PAGE = 1000
"""Keys in one answer of `EtcdBackend.names`. More makes larger answers (100 bytes a key), fewer more round trips."""

MARK_SECONDS = 600
"""How long the mark of a lock that was broken stays. Longer keeps more of them; with shorter ones, a holder with a long
ttl looks at its key too late, and gets the reason `gone`."""


class EtcdBackend(LockBackend):
    """Processes that reach the same etcd."""

    capabilities = Capabilities(
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
        caveat="A holder that is paused beyond its ttl may still write: guard storage by token. One member alone "
        "survives no loss; the cluster may raise a ttl.",
        metadata_update=True,
        listing=True,
        fair_shared=True,
        downgrade=True,
        permits="native",
        notes=True,
    )
    options: ClassVar[Mapping[str, Option]] = OPTIONS

    def __init__(self, url: str, cluster: Cluster, options: Mapping[str, Any], host: Host) -> None:
        self._url = url
        self.cluster = cluster  # also for guards of data in the same etcd
        self._runtime = host.runtime
        self._prefix: str = options["prefix"]
        self._sessions = Sessions(host, cluster)
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
        """Take a gRPC channel, or a client that has one, for the same API (sync or async)."""
        found = adopt_cluster(client, host)
        given = next((name for name in TLS_OPTIONS if options[name] is not None), None)
        if found is not None and given is not None:
            message = (
                f"the option {given} is for URLs with etcds://: the channel or client has its certificates already"
            )
            raise ConfigurationError(message)
        return None if found is None else cls(*found, options, host)

    @property
    def url(self) -> str:
        return self._url

    # -- acquire ---------------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        answer_by = self._answer_by(request)
        try:
            outcome = None if request.state is None else await self._check_queue(request, request.state, answer_by)
            while outcome is None:
                self._forget(request.state, request)  # its key or its session has gone
                outcome = await self._enter(request, answer_by)
        except LockError as error:
            is_refused = isinstance(error, ConfigurationError)
            contender: Contender | None = request.state
            if contender is not None and isinstance(error, BackendUnavailable) and not error.sent:
                # That was the last request; one before it may have created a key.
                error.sent = contender.create_revision > 0 or contender.may_come_late
                is_refused = not error.sent
            if contender is not None and is_refused and not contender.create_revision:
                # There is nothing to delete. That may be refused, too, and then no heartbeat would be sent.
                self._forget(contender, request)
            raise
        if isinstance(outcome, Busy) and not request.state.create_revision:
            self._forget(request.state, request)  # it does not wait
        return outcome

    def _forget(self, contender: Contender | None, request: Request | None = None) -> None:
        """Forget a contender that has no key, or none any more."""
        if contender is not None:
            self._listener.unwatch(contender)
            self._sessions.detach(contender)
        if request is not None:
            request.state = None

    def _answer_by(self, request: Request) -> float:
        now = self._runtime.now()
        return now + seconds_left(request.answer_by, now)

    async def _enter(self, request: Request, answer_by: float) -> Grant | Busy | None:
        """Acquire the lock, or take a place in its queue. None: start again."""
        since = wall_clock()
        value = f"{request.owner} {with_since(request.metadata, since)}".encode()
        wake = request.wake if request.queue else None
        prefix = self._directory(request.name)
        request.state = contender = Contender(request.name, request.owner, prefix, value, wake, request.mode)
        contender.since = since
        await self._sessions.attach(contender, round_up(request.ttl), answer_by)
        contender.created = self._runtime.event()
        # Goes on if the caller is cancelled: `abandon` waits for the answer, which says what there is to undo.
        return await settle_by(self._runtime, self._create_key(request, contender, answer_by), answer_by)

    async def _create_key(self, request: Request, contender: Contender, answer_by: float) -> Grant | Busy | None:
        session, is_permit = contender.session, contender.mode == "permit"
        assert contender.created is not None
        try:
            if session.is_stale(self._runtime.now()) and not await self._sessions.keep_alive(session, answer_by):
                return None
            if contender.wanted_until == -inf:
                raise BackendUnavailable("the request was given up")
            creation = (permits.create_permit if is_permit else keys.create_key)(contender, session.id, request)
            # Sending it twice does no harm: the second finds the key of the first. Not so for a permit.
            late = contender.set_may_come_late
            answer = await self.cluster.call(TXN, creation, resend=not is_permit, on_unknown=late, answer_by=answer_by)
            # Before `created` is set: a permit may send another request, for a slot.
            busy = await permits.enter(self.cluster, contender, request, answer, answer_by) if is_permit else None
        except LeaseEnded:
            self._sessions.end(session)
            return None
        finally:
            contender.created.set()
        if is_permit:
            held = contender.slot is not None
            return await self._grant(request, contender, answer_by) if held else busy
        if answer.succeeded:
            contender.set_revision(answer.header.revision)
            return await self._grant(request, contender, answer_by)
        return await self._read_busy_answer(request, contender, answer, answer_by)

    async def _read_busy_answer(
        self, request: Request, contender: Contender, answer: rpc.TxnResponse, answer_by: float
    ) -> Grant | Busy | None:
        """Read the answer of a transaction that found a key that excludes the contender's, or its own."""
        found = oldest = answer.responses[0].response_range.kvs
        if len(answer.responses) > 1:
            nested = answer.responses[2].response_txn
            if nested.succeeded:
                contender.set_revision(answer.header.revision)
                return self._behind(contender, answer) or await self._grant(request, contender, answer_by)
            found = nested.responses[0].response_range.kvs
        if not found or found[0].key != contender.key:
            return Busy(owner=keys.owner_and_metadata(oldest[0])[0])
        if found[0].value != contender.value:
            # A key of this client that should be gone. Its session keeps it no longer than a ttl.
            contender.set_may_come_late()
            return None
        # The first of two equal requests was executed, and its answer was lost.
        contender.set_revision(found[0].create_revision)
        return await self._check_queue(request, contender, answer_by)

    async def _check_queue(self, request: Request, contender: Contender, answer_by: float) -> Grant | Busy | None:
        """Check whether the lock is free for this contender. None: its key is gone, start again."""
        if contender.mode == "permit":
            busy = await permits.check(self.cluster, contender, request, answer_by)
            held = contender.slot is not None
        else:
            answer = await self.cluster.call(TXN, keys.check_queue(contender), resend=True, answer_by=answer_by)
            held = answer.succeeded
            busy = self._behind(contender, answer) if held else None
        return await self._grant(request, contender, answer_by) if held and busy is None else busy

    @staticmethod
    def _behind(contender: Contender, answer: rpc.TxnResponse) -> Busy | None:
        """Read what is in front of a contender; None if nothing there excludes it."""
        oldest, in_front = (one.response_range.kvs for one in answer.responses[:2])
        if not in_front or (contender.mode == "shared" and in_front[0].value.startswith(keys.SHARED)):
            return None
        contender.waits_for(answer.header.revision, in_front[0].key)
        return Busy(owner=keys.owner_and_metadata(oldest[0])[0])

    async def _grant(self, request: Request, contender: Contender, answer_by: float) -> Grant | None:
        """Grant what a contender holds, if its session lasts. None: start again."""
        session = contender.session
        assert contender.create_revision > 0
        # After a long wait, little may be left of the session's ttl.
        if session.is_stale(self._runtime.now()) and not await self._sessions.keep_alive(session, answer_by):
            return None
        self._listener.unwatch(contender)
        if contender.wanted_until > -inf:
            contender.wanted_until = session.ends_at
        if wall_clock() - contender.since > SINCE_EXACT_SECONDS:
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
                await self._describe(contender, metadata)
            except LockError as error:
                log.debug("lock %r is shown as held since it was asked for: %s", contender.name, error)

        try:
            self._runtime.spawn("lockkit-etcd-since", correct)
        except RuntimeError as error:  # no more threads
            log.debug("lock %r is shown as held since it was asked for: %s", contender.name, error)

    async def wait(self, request: Request, busy: Busy, until: Instant) -> None:
        """Keep the session alive meanwhile, and with it the place in the queue."""
        del busy
        contender: Contender | None = request.state
        if contender is None:
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
            if not is_watched or now >= until or session.ended or now >= session.ends_at:
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
        if contender.home is not None and not contender.session.ended:
            await self._sessions.give_up(contender, answer_by)
        self._forget(contender, request)

    # -- keep --------------------------------------------------------------------------------------------------------

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        outcomes: dict[str, Renewal] = {}
        by_session: dict[Session, list[Contender]] = {}
        now = self._runtime.now()
        answer_by = now + CALL_SECONDS
        for grant in grants:
            contender: Contender = grant.state
            ttl = round_up(grant.ttl)
            contender.wanted_until = max(contender.wanted_until, now + ttl)
            try:
                if contender.session.ended:
                    outcomes[contender.owner] = Gone("session")
                    continue
                if not contender.session.has_ttl(ttl):  # it was extended to that
                    await self._sessions.attach(contender, ttl, answer_by)
                by_session.setdefault(contender.session, []).append(contender)
            except LockError as error:
                outcomes[contender.owner] = Unknown(error)
        for session, contenders in by_session.items():
            await self._renew_in(session, contenders, answer_by, outcomes)
        return [outcomes[grant.owner] for grant in grants]

    async def _renew_in(
        self, session: Session, contenders: Sequence[Contender], answer_by: float, outcomes: dict[str, Renewal]
    ) -> None:
        """Keep a session alive, and check that the keys in it are still there, or move them to it."""
        kept = False
        try:
            # Before it ends: that leaves time to ask another member when the first one hangs.
            kept = await self._sessions.keep_alive(session, min(answer_by, session.ends_at))
            if not kept:
                outcomes.update((contender.owner, Gone("session")) for contender in contenders)
                return
            anchor = session.anchor
            gone = [one for one in contenders if one.unsettled and not await self._change(one, answer_by)]
            for batch in keys.batches([one for one in contenders if one not in gone]):
                request = keys.read_keys([one.key for one in batch])
                answer = await self.cluster.call(TXN, request, resend=True, answer_by=answer_by)
                for contender, found in zip(batch, answer.responses, strict=True):
                    if not contender.was_found(found.response_range.kvs):
                        gone.append(contender)
                    elif session.ended:
                        outcomes[contender.owner] = Gone("session")
                    else:
                        if contender.wanted_until < inf:
                            contender.wanted_until = anchor + session.ttl
                        # Not the session's ttl, which the cluster may have raised: extend() sets the time left to its
                        # argument.
                        outcomes[contender.owner] = Renewed(anchor)
            reasons = await self._gone(gone)
            outcomes.update((contender.owner, reason) for contender, reason in zip(gone, reasons, strict=True))
        except LockError as error:
            if kept and isinstance(error, BackendUnavailable):
                error.sent = True  # the heartbeat was
            for contender in contenders:
                outcomes.setdefault(contender.owner, Unknown(error))

    async def _change(
        self, contender: Contender, answer_by: float, change: Callable[[bytes], bytes] = lambda value: value
    ) -> bool:
        """Change the value of a key, and move the key to its session; return False if it is gone."""
        while True:
            # Read in this order, and written in the other: another thread may change the key, too. The revision of its
            # change with the session from before would move the key back to that, which nobody may keep alive.
            revision = contender.mod_revision
            value, session = change(contender.value_now), contender.session
            request = keys.change_key(contender.key, revision, value, session.id)
            try:
                answer = await self.cluster.call(TXN, request, resend=True, answer_by=answer_by)
            except LeaseEnded:
                self._sessions.end(session)
                return False
            if answer.succeeded:
                if answer.header.revision > contender.mod_revision:  # not after a later change by another thread
                    contender.value_now, contender.mod_revision = value, answer.header.revision
                break
            kvs = answer.responses[0].response_range.kvs
            if not contender.was_found(kvs):
                return False
            # Another change meanwhile, or an earlier one that was not answered.
            contender.value_now, contender.mod_revision = kvs[0].value, kvs[0].mod_revision
            if change(kvs[0].value) == kvs[0].value and kvs[0].lease == session.id:
                break
        if contender.session is session:
            contender.unsettled = False
        return True

    async def _gone(self, contenders: Sequence[Contender]) -> Sequence[Gone]:
        """Forget contenders whose keys have gone; return why, as far as `break_lock` has left marks."""
        for contender in contenders:
            self._forget(contender)
        found: list[Gone] = []
        for batch in keys.batches(contenders):
            marks = [self._mark(one.name, one.create_revision) for one in batch]
            try:
                answer = await self.cluster.call(TXN, keys.read_keys(marks), resend=True)
            except LockError as error:
                log.debug("cannot find out why keys at etcd are gone: %s", error)
                break
            found += (Gone("broken" if one.response_range.kvs else "gone") for one in answer.responses)
        return [*found, *[Gone("gone")] * (len(contenders) - len(found))]

    async def detach(self, grant: Grant) -> Renewal:
        """See `LockBackend.detach`. A session of its own: that of the client is revoked when the client is closed."""
        contender: Contender = grant.state
        if contender.session.ended:
            return Gone("session")
        started = self._runtime.now()
        answer_by = started + CALL_SECONDS
        await self._sessions.set_apart(contender, round_up(grant.ttl), answer_by)
        if not await self._change(contender, answer_by):
            return (await self._gone([contender]))[0]
        self._sessions.detach(contender)
        return Renewed(started)

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        """Only the engine sends it again."""
        contender: Contender = grant.state
        if contender.session.ended:
            return False
        deletion = keys.delete_key(contender.compare_revision)
        # Without an answer, a heartbeat of the session deletes the key once its ttl is over.
        answer = await self.cluster.call(TXN, deletion, resend=False, answer_by=answer_by)
        self._sessions.detach(contender)
        return bool(answer.succeeded)

    async def update(self, grant: Grant, metadata: str) -> Gone | None:
        return None if await self._describe(grant.state, metadata) else (await self._gone([grant.state]))[0]

    async def _describe(self, contender: Contender, metadata: str) -> bool:
        """Give the value of a key this metadata, in place of another; return False if the key is gone."""
        text = f"{contender.owner} {with_since(metadata, contender.since)}".encode()

        def described(value: bytes) -> bytes:
            return keys.SHARED + text if value.startswith(keys.SHARED) else text

        return await self._change(contender, self._runtime.now() + CALL_SECONDS, described)

    async def downgrade(self, grant: Grant) -> bool:
        """The key stays, in front of the writers that wait, with a mark in its value."""

        def downgraded(value: bytes) -> bytes:
            return keys.SHARED + value.removeprefix(keys.SHARED)

        if not await self._change(grant.state, self._runtime.now() + CALL_SECONDS, downgraded):
            return False
        grant.state.mode = "shared"
        return True

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        """Revoke the sessions, with all their keys: nothing of this client is wanted any more."""
        del grants
        await self._sessions.revoke_all(answer_by)

    # -- inspect -----------------------------------------------------------------------------------------------------

    async def holders(self, name: str) -> Sequence[Holder]:
        prefix, answer_by = self._directory(name), self._runtime.now() + CALL_SECONDS
        kvs, waiters_count = await self._held_keys(name, answer_by)
        lives: dict[int, float | None] = {0: None}
        for lease in dict.fromkeys(kv.lease for kv in kvs if kv.lease):
            ask = rpc.LeaseTimeToLiveRequest(ID=lease)
            answer = await self.cluster.call(TIME_TO_LIVE, ask, resend=True, answer_by=answer_by)
            lives[lease] = max(0.0, float(answer.TTL))
        found = []
        for kv in kvs:
            owner, metadata = keys.owner_and_metadata(kv)
            mode, slot = keys.mode_of(kv, prefix), None
            if _is_semaphore(name):
                mode, slot = "permit", keys.slot_of(kv.key)
            about, since = since_stored(decode_metadata(metadata))
            found.append(Holder(owner, kv.create_revision, lives[kv.lease], about, waiters_count, mode, slot, since))
        return found

    async def _held_keys(self, name: str, answer_by: float) -> tuple[Sequence[rpc.KeyValue], int]:
        """Read the keys that hold a lock or a semaphore, the oldest first, and count those that wait."""
        prefix = self._directory(name)
        if _is_semaphore(name):
            slots, waiters = keys.beginning_with(prefix + keys.SLOT), keys.beginning_with(prefix + keys.WAITER)
            request = rpc.TxnRequest()
            request.success.add(request_range=rpc.RangeRequest(key=slots[0], range_end=slots[1]))
            request.success.add(request_range=keys.in_order(waiters, newest=True, keys_only=True))
            both = await self.cluster.call(TXN, request, resend=True, answer_by=answer_by)
            held, waiting = (one.response_range for one in both.responses)
            return held.kvs, waiting.count
        answer = await self.cluster.call(RANGE, keys.oldest_of(prefix), resend=True, answer_by=answer_by)
        if answer.kvs and keys.mode_of(answer.kvs[0], prefix) == "shared":
            everything = keys.oldest_of(prefix)
            everything.limit = 0
            answer = await self.cluster.call(RANGE, everything, resend=True, answer_by=answer_by)
        modes = [keys.mode_of(kv, prefix) for kv in answer.kvs]
        # A writer waits for all in front of it, and stops the readers behind it.
        held_count = modes.index("exclusive") if "exclusive" in modes else len(modes)
        held_count = max(1, held_count) if modes else 0
        return answer.kvs[:held_count], answer.count - held_count

    async def confirm(self, grant: Grant) -> Gone | None:
        """A lease that was granted holds the lock as long as its key is there."""
        contender: Contender = grant.state
        request = rpc.RangeRequest(key=contender.key, keys_only=True)
        answer = await self.cluster.call(RANGE, request, resend=True)
        if contender.was_found(answer.kvs):
            return None
        (gone,) = await self._gone([contender])
        return Gone("taken") if gone.reason == "gone" and await self.holders(grant.name) else gone

    async def break_lock(self, name: str) -> bool:
        """With ``prefix=``, applications may have keys below a lock's."""
        return await self._break(name)

    async def break_unproven(self, name: str) -> bool:
        return await self._break(name, proven=False)

    async def break_permit(self, name: str, slot: int) -> bool:
        return await self._break(name, slot=slot)

    async def _break(self, name: str, *, slot: int | None = None, proven: bool = True) -> bool:
        """
        Free a lock, a semaphore, or its permit `slot`: delete the keys that hold it now. False if none does.

        Each deletion writes a mark, which tells the holder why its key is gone, unless this user has no rights there.
        """
        prefix, answer_by = self._directory(name), self._runtime.now() + CALL_SECONDS
        kvs, _ = await self._held_keys(name, answer_by)
        if slot is not None:
            kvs = [kv for kv in kvs if keys.slot_of(kv.key) == slot]
        if not kvs:
            return False
        foreign = next((kv.key for kv in kvs if proven and not keys.is_contender(kv, prefix)), None)
        if foreign is not None:
            key = foreign.decode("utf-8", "replace")
            raise unproven(self._url, name, f"no client of locks has made the key {key!r}")
        lease_id, broken = await self._new_lease(MARK_SECONDS, answer_by), False
        for batch in keys.batches(kvs):
            request = rpc.TxnRequest()
            for kv in batch:
                as_read = rpc.Compare(target=rpc.Compare.CREATE, key=kv.key, create_revision=kv.create_revision)
                deletion = request.success.add(request_txn=keys.delete_key(as_read)).request_txn
                mark = rpc.PutRequest(key=self._mark(name, kv.create_revision), lease=lease_id)
                deletion.success.add(request_put=mark)
            try:
                answer = await self.cluster.call(TXN, request, resend=False, answer_by=answer_by)
            except ConfigurationError:
                for one in request.success:
                    del one.request_txn.success[1:]
                answer = await self.cluster.call(TXN, request, resend=False, answer_by=answer_by)
            broken = broken or any(one.response_txn.succeeded for one in answer.responses)
        return broken

    def _mark(self, name: str, create_revision: int) -> bytes:
        """Return the key of the mark for a holder of a lock that was broken."""
        return b"%b%d" % (self._directory(name, "+broken"), create_revision)

    async def _new_lease(self, ttl: int, answer_by: float) -> int:
        request = rpc.LeaseGrantRequest(TTL=ttl)
        return int((await self.cluster.call(GRANT, request, resend=True, answer_by=answer_by)).ID)

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        """A lock is held while there is a key below its prefix: the oldest holds."""
        space, _ = split_space(prefix)
        below = f"{self._prefix}{f'+{space}' if space else ''}/".encode()
        begin, end = keys.beginning_with(self._directory(prefix)[:-1])
        # In the order of their bytes.
        start = begin if after is None else after.next
        request = rpc.RangeRequest(key=start, range_end=end, limit=KEYS_PAGE, keys_only=True)
        answer = await self.cluster.call(RANGE, request, resend=True)
        # Each as the part of its keys that it is, in their order: many may be of waiters for the same lock.
        parts = dict.fromkeys(part for kv in answer.kvs if (part := _part_of_name(kv.key, below)) is not None)
        names = [apart(space, name) if space else name for part in parts if (name := _name_of(part)) is not None]
        if not answer.more:
            return NamesPage(names)
        last = answer.kvs[-1].key
        part = _part_of_name(last, below)
        return NamesPage(names, last + b"\0" if part is None else keys.beginning_with(below + part + b"/")[1])

    async def read_note(self, name: str, answer_by: float = inf) -> Note | None:
        request = rpc.RangeRequest(key=self._directory(name, "+note")[:-1])
        answer = await self.cluster.call(RANGE, request, resend=True, answer_by=answer_by)
        return Note(answer.kvs[0].value.decode("utf-8", "replace"), None) if answer.kvs else None

    async def write_note(self, grant: Grant, text: str, keep: Seconds, answer_by: float = inf) -> bool:
        lease_id = await self._new_lease(round_up(keep), answer_by)
        key = self._directory(grant.name, "+note")[:-1]
        put = rpc.PutRequest(key=key, value=text.encode(), lease=lease_id, prev_kv=True)
        request = rpc.TxnRequest(compare=[grant.state.compare_revision], success=[rpc.RequestOp(request_put=put)])
        answer = await self.cluster.call(TXN, request, resend=True, answer_by=answer_by)
        unused = answer.responses[0].response_put.prev_kv.lease if answer.succeeded else lease_id
        # Not that of this request, if its first answer was lost. If it is not ended, its ttl ends it.
        if unused and (unused != lease_id or not answer.succeeded):
            try:
                await self.cluster.call(REVOKE, rpc.LeaseRevokeRequest(ID=unused), resend=True, answer_by=answer_by)
            except LockError as error:
                log.debug("the lease %x of a note is left to its ttl: %s", unused, error)
        return bool(answer.succeeded)

    async def erase(self) -> None:
        for space in ("", *(f"+{space}" for space in SPACES)):
            for what in ("", "+note", "+broken"):
                first, behind = keys.beginning_with(f"{self._prefix}{space}{what}/".encode())
                deletion = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=first, range_end=behind))
                await self.cluster.call(TXN, rpc.TxnRequest(success=[deletion]), resend=True)

    async def ping(self) -> None:
        request = rpc.RangeRequest(key=f"{self._prefix}/".encode(), keys_only=True)
        await self.cluster.call(RANGE, request, resend=True)

    async def close(self) -> None:
        """Revoke the sessions, so that no key stays for a ttl."""
        self._listener.close()
        try:
            await self._sessions.revoke_all(self._runtime.now() + CLOSE_SECONDS)
        except LockError as error:
            log.debug("sessions at %s are left to their ttl: %s", self._url, error)
        await self.cluster.close()

    def _directory(self, name: str, what: str = "") -> bytes:
        """Return the prefix of the keys of all contenders for a lock, or of `what` else there is for it."""
        space, name = split_space(name)
        return f"{self._prefix}{f'+{space}' if space else ''}{what}/{validation.escape(name, '/')}/".encode()


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


def _is_semaphore(name: str) -> bool:
    return split_space(name)[0] == "sem"
