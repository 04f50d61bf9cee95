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
  the contender stays in it, unwanted. If the session has nothing else, it is revoked: no key can be attached to it
  then. If it has, that stays where it is, and every heartbeat deletes the key that may have come late, for as long as
  the session lives. What is held never depends on a request for another lock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from math import ceil, inf

from lockkit.backend import Host
from lockkit.backends.etcd import keys
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.cluster import GRANT, KEEP_ALIVE, REVOKE, TXN, Cluster, SharedAttempt, settle_by
from lockkit.backends.etcd.errors import LeaseEnded
from lockkit.backends.etcd.keys import Contender, Session
from lockkit.errors import BackendUnavailable

log = logging.getLogger("lockkit")


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
        self._opening = SharedAttempt(host.runtime)
        self._warned_ttls: set[int] = set()

    async def attach(self, contender: Contender, ttl: int, answer_by: float) -> None:
        """
        Give a contender its first session, or another one with another ttl, to which its key is to be moved.

        A writer's first is one in which this client has no other writer of the lock.
        """
        while True:
            with self._mutex:
                now = self._runtime.now()
                for session in self._all:
                    if session.takes_keys(ttl, now):
                        key = keys.key_of(contender.prefix, session.id, contender.owner, contender.mode)
                        if contender.home is not None:
                            contender.unsettled = True
                        elif key in session.contenders:
                            continue
                        else:
                            contender.home, contender.first_key, contender.key = session, key, key
                        contender.session = session
                        session.contenders[contender.first_key] = contender
                        return
            # Goes on if the caller is cancelled: else the cluster would keep a lease that nobody knows.
            opening = self._opening.make(lambda: self._open(ttl, answer_by), answer_by)
            if not await settle_by(self._runtime, opening, answer_by):
                raise BackendUnavailable("etcd did not grant a lease in time")

    async def _open(self, ttl: int, answer_by: float) -> None:
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
        session = Session(answer.ID, ttl, float(answer.TTL), started)
        session.was_kept_alive(started)
        with self._mutex:
            self._all = [*self._living(), session]

    async def set_apart(self, contender: Contender, ttl: int, answer_by: float) -> None:
        """Give a contender a session of its own, which nobody keeps alive or revokes; its key is to be moved there."""
        started = self._runtime.now()
        request = rpc.LeaseGrantRequest(TTL=ttl)
        answer = await self._cluster.call(GRANT, request, resend=True, answer_by=answer_by)
        contender.session, contender.unsettled = Session(answer.ID, ttl, float(answer.TTL), started), True

    def _living(self) -> list[Session]:
        """List the sessions, without those that may have ended unnoticed with nothing that is wanted."""
        now = self._runtime.now()
        return [
            one
            for one in self._all
            if now < one.ends_at or any(contender.wanted_until > now for contender in one.contenders.values())
        ]

    async def keep_alive(self, session: Session, answer_by: float) -> bool:
        """Send a heartbeat, after deleting the keys in the session that are not wanted. False if it has ended."""
        now = self._runtime.now()
        # No other waiter sends one meanwhile, nor at once if this one fails.
        session.keep_alive_at = now + session.ttl / 10
        with self._mutex:
            unwanted = [one for one in session.contenders.values() if one.wanted_until <= now]
        await self.delete_keys(unwanted, answer_by)
        request = rpc.LeaseKeepAliveRequest(ID=session.id)
        started = self._runtime.now()
        answer = await self._cluster.call(KEEP_ALIVE, request, resend=True, answer_by=answer_by)
        if answer.TTL <= 0:
            self.end(session)
        else:
            session.was_kept_alive(started)
        return not session.ended

    async def delete_keys(self, contenders: Iterable[Contender], answer_by: float) -> None:
        """Delete keys, and forget their contenders."""
        deletions = [(one, deletion) for one in contenders for deletion in keys.deletions(one)]
        for batch in keys.batches(deletions):
            request = rpc.TxnRequest(success=[rpc.RequestOp(request_txn=deletion) for _, deletion in batch])
            await self._cluster.call(TXN, request, resend=True, answer_by=answer_by)
        for contender, _ in deletions:
            self.detach(contender)

    async def give_up(self, contender: Contender, answer_by: float) -> None:
        """Delete the key of a contender, and revoke the session in which it may still come if nothing else is there."""
        await self.delete_keys([contender], answer_by)
        home = contender.home
        assert home is not None
        with self._mutex:
            # A retired session takes no new contender, so none comes between this and the revocation.
            is_needed = not home.retired or any(one.wanted_until > -inf for one in home.contenders.values())
        if not is_needed:
            await self._revoke(home, answer_by)

    def detach(self, contender: Contender) -> None:
        """Forget a contender whose key is gone; but if its key may be created late, it stays in its session."""
        with self._mutex:
            contender.wanted_until = -inf
            for session in self._all:
                stays = session is contender.home and contender.may_come_late
                if not stays and session.contenders.get(contender.first_key) is contender:
                    del session.contenders[contender.first_key]

    def end(self, session: Session) -> None:
        """Note that a session is gone: its holders have lost their locks, its waiters look again."""
        with self._mutex:
            session.ended = True
            contenders = [one for one in session.contenders.values() if one.session is session]
            session.contenders.clear()
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

    async def revoke_all(self, answer_by: float) -> None:
        """Revoke all sessions; after the first without an answer, the others end by their ttl."""
        with self._mutex:
            sessions = self._living()
        for session in sessions:
            await self._revoke(session, answer_by)

    async def _revoke(self, session: Session, answer_by: float) -> None:
        try:
            request = rpc.LeaseRevokeRequest(ID=session.id)
            await self._cluster.call(REVOKE, request, resend=True, answer_by=answer_by)
        except LeaseEnded as ended:
            log.debug("session %x: %s", session.id, ended)
        self.end(session)
