"""
Sessions: the etcd leases that a client's keys are attached to.

One session per client and ttl, kept alive while anything in it is held or waited for. A client that asks for a lock
that it holds or waits for already needs a second one: the id of the session is the last part of the key. The keys of
readers and permits have the owner in them, too, so all of them share one.

A session must not keep alive what nobody wants any more:

- The key of a lock that is not renewed (``renew=False``, ``max_hold``, a dropped lease) beside others that are. Each
  key has a time until which it is wanted (`Contender.wanted_until`), and every heartbeat first deletes what is past it.
- A key that is created late. A sends "create", the member hangs, A gives up or asks another member; when the first one
  goes on, it creates the key, and nobody knows. So a session with such a request is *retired*: it takes no new key, and
  the contender stays in it, unwanted. If the session has nothing else, the client revokes it; a create that comes later
  finds no lease. If it has, that stays where it is, and every heartbeat deletes the key that may have come late, for as
  long as the session lives. What is held never depends on a request for another lock.

Rule: the client never revokes a session that has a wanted contender, and every contender that relies on a session is in
it before anything is sent. Both are decided under one mutex (`Sessions.revoke_if_unused`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import ceil, inf

from lockkit.backend import Host
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd import transactions, values
from lockkit.backends.etcd.cluster import Cluster, SharedAttempts, settle_by
from lockkit.backends.etcd.connection import GRANT, KEEP_ALIVE, REVOKE, TXN
from lockkit.backends.etcd.contender import Contender, Session
from lockkit.backends.etcd.errors import LeaseEnded
from lockkit.errors import BackendUnavailable, LockError

log = logging.getLogger("lockkit")

CLOSE_SECONDS = 0.2
"""Longest time to revoke one session when a client is closed; after the first without an answer, the others are left.
Longer delays the close when the cluster hangs; shorter leaves sessions of a slow cluster to their ttl."""


def round_up(ttl: float) -> int:
    """Round a ttl up to etcd's unit, whole seconds."""
    return max(1, ceil(ttl - 1e-6))  # 0.1 * 30 is a little above 3


class Sessions:
    """The sessions of one client. Threads may share it."""

    def __init__(self, host: Host, cluster: Cluster) -> None:
        self._host = host
        self._runtime = host.runtime
        self._cluster = cluster
        self._mutex = host.runtime.mutex()
        self._all: list[Session] = []
        self._opening = SharedAttempts(host.runtime)
        self._warned_ttls: set[int] = set()

    # -- open --------------------------------------------------------------------------------------------------------

    async def attach(self, contender: Contender, ttl: int, answer_by: float) -> None:
        """Give a contender its session. A writer's is one in which this client has no other writer of the lock."""

        def take(session: Session) -> bool:
            if contender.mode == "exclusive":
                if contender.name in session.by_name:
                    return False
                session.by_name[contender.name] = contender
            contender.home = contender.session = session
            contender.key = values.key_of(contender.prefix, session.id, contender.owner, contender.mode)
            session.contenders.add(contender)
            return True

        await self._find_or_open(ttl, take, answer_by)

    async def prepare_move(self, contender: Contender, ttl: int, answer_by: float) -> Session:
        """Return a session to move a key to. Its contender is in both sessions until `finish_move`."""

        def take(session: Session) -> bool:
            session.contenders.add(contender)
            contender.moving_to = session
            return True

        return await self._find_or_open(ttl, take, answer_by)

    def finish_move(self, contender: Contender) -> None:
        """Note that a key is surely attached to the session that it was to be moved to, and to no other."""
        assert contender.moving_to is not None
        with self._mutex:
            self._remove(contender)
            contender.session, contender.moving_to = contender.moving_to, None
            contender.session.contenders.add(contender)

    async def _find_or_open(self, ttl: int, take: Callable[[Session], bool], answer_by: float) -> Session:
        while True:
            with self._mutex:
                now = self._runtime.now()
                for session in self._all:
                    if session.takes_keys(ttl, now) and take(session):
                        return session
            # Goes on if the caller is cancelled: else the cluster would keep a lease that nobody knows.
            opening = self._opening.make(ttl, lambda: self._open(ttl, answer_by), answer_by)
            if not await settle_by(self._runtime, opening, answer_by):
                raise BackendUnavailable("etcd did not grant a lease in time")

    async def _open(self, ttl: int, answer_by: float) -> None:
        with self._mutex:
            # Drop those that have ended unnoticed.
            now = self._runtime.now()
            self._all = [one for one in self._all if now < one.ends_at or one.is_wanted(now)]
        session = await self._grant(ttl, answer_by)
        with self._mutex:
            self._all.append(session)

    async def _grant(self, ttl: int, answer_by: float) -> Session:
        started = self._runtime.now()
        # If the first answer is lost, its lease expires with nothing attached to it.
        request = rpc.LeaseGrantRequest(TTL=ttl)
        answer = await self._cluster.call(GRANT, request, resend=True, answer_by=answer_by)
        if ttl < answer.TTL and ttl not in self._warned_ttls:
            self._warned_ttls.add(ttl)
            log.warning(
                "etcd keeps locks for %d s instead of the requested ttl of %d s: its shortest lease is one and a half "
                "election timeouts",
                answer.TTL,
                ttl,
            )
        return Session(answer.ID, ttl, float(answer.TTL), started)

    # -- keep --------------------------------------------------------------------------------------------------------

    async def keep_alive(self, session: Session, answer_by: float) -> bool:
        """Send a heartbeat, after deleting the keys in the session that are not wanted. False if it has ended."""
        now = self._runtime.now()
        session.delay_heartbeat(now)
        with self._mutex:
            unwanted = [one for one in session.contenders if one.wanted_until <= now]
        request = rpc.LeaseKeepAliveRequest(ID=session.id)
        await self.delete_keys(unwanted, answer_by)
        started = self._runtime.now()
        answer = await self._cluster.call(KEEP_ALIVE, request, resend=True, answer_by=answer_by)
        if answer.TTL <= 0:
            self.end(session)
        else:
            session.was_kept_alive(started)
        return not session.ended

    async def delete_keys(self, contenders: Sequence[Contender], answer_by: float) -> None:
        """Delete keys, and forget their contenders."""
        for request, batch in transactions.delete_keys(contenders):
            await self._cluster.call(TXN, request, resend=True, answer_by=answer_by)
            for contender in batch:
                self.detach(contender)

    def detach(self, contender: Contender) -> None:
        """Forget a contender whose key is gone; but if its key may be created late, it stays in its session."""
        with self._mutex:
            contender.wanted_until = -inf
            self._remove(contender)
            home = contender.home
            if home is None:
                return
            if home.by_name.get(contender.name) is contender:
                del home.by_name[contender.name]
            if contender.may_come_late and not home.ended:
                home.contenders.add(contender)

    def _remove(self, contender: Contender) -> None:
        for session in self._all:
            session.contenders.discard(contender)

    # -- end ---------------------------------------------------------------------------------------------------------

    def end(self, session: Session) -> None:
        """Note that a session is gone: its holders have lost their locks, its waiters look again."""
        with self._mutex:
            session.ended = True
            contenders = [*session.contenders]
            session.contenders.clear()
            session.by_name.clear()
            if session in self._all:
                self._all.remove(session)
        for contender in contenders:
            # Not for one that was given up: its request may hold the lock by now, with another key.
            if contender.wanted_until == -inf:
                continue
            if contender.wake is not None:
                contender.wake.set()
            if contender.wanted_until < inf:
                self._host.lost(contender.owner, "session")

    async def revoke_if_unused(self, session: Session, answer_by: float) -> bool:
        """Revoke a session in which nothing is held or waited for; tell whether that is so."""
        with self._mutex:
            session.closing = session.closing or not session.is_wanted(self._runtime.now())
        if session.closing and not session.ended:
            await self._revoke(session, answer_by)
        return session.closing

    async def _revoke(self, session: Session, answer_by: float) -> None:
        """End a session, and all its keys with it. etcd refuses what is created in it late."""
        try:
            request = rpc.LeaseRevokeRequest(ID=session.id)
            await self._cluster.call(REVOKE, request, resend=True, answer_by=answer_by)
        except LeaseEnded as ended:
            log.debug("session %x: %s", session.id, ended)
        self.end(session)

    async def close(self) -> None:
        """Revoke all sessions, best effort: the others end by their ttl."""
        with self._mutex:
            now = self._runtime.now()
            sessions = [one for one in self._all if now < one.ends_at]
        for session in sessions:
            try:
                await self._revoke(session, self._runtime.now() + CLOSE_SECONDS)
            except LockError as error:
                log.debug("session %x is left to its ttl: %s", session.id, error)
                return
