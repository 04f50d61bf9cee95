"""Locks on etcd during faults: real members are killed, stopped, cut off, filled and compacted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import lockkit
from lockkit.backends.etcd import keys
from lockkit.runtime import drive
from lockkit.testing.face_driver import FACES, FaceDriver
from lockkit.testing.stopwatch import Stopwatch
from lockkit.testing.target import Face
from lockkit_tools.servers import EtcdCluster, EtcdServer, FaultProxy, require, wait_until
from tests.backends.etcd.support import (
    WAITING_SECONDS,
    begin,
    leases_of,
    queue_of,
    session_of,
    until_waiting,
    value_of,
)
from tests.backends.support import Connect, answers, inner, play, says_whether_it_was_sent
from tests.tries import until

TTL = 3.0
PATIENCE = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    """Three members, for tests that leave all of them running."""
    require("etcd", local=True)
    with EtcdCluster() as members:
        yield members


class TestLoss:
    """An operator removes the lock at the server."""

    @pytest.mark.parametrize("seen_by", ["renewal", "another lock"])
    def test_revoked_lease_notifies_the_holders(self, server: EtcdServer, connect: Connect, seen_by: str) -> None:
        """`etcdctl lease revoke` ends all locks of the session, with the reason; the next lock has a fresh one."""
        client = connect(server.url)
        before = leases_of(server)
        leases = [client.lock(name, ttl=60).acquire() for name in ("a", "b")]
        reasons: list[str] = []
        for lease in leases:
            lease.on_lost(lambda _, reason: reasons.append(reason))
        (session,) = leases_of(server) - before

        server.etcdctl("lease", "revoke", f"{session:x}")
        if seen_by == "renewal":
            client._engine.confirm_soon()
        else:
            client.lock("another", ttl=60).acquire().release()

        assert all(lease.wait_lost(10) for lease in leases)  # long before the next renewal
        wait_until(lambda: None if reasons == ["session"] * 2 else f"reasons: {reasons}")
        after = client.lock("a", ttl=TTL).acquire(PATIENCE)
        assert after.token > leases[0].token
        after.release()

    def test_revoked_lease_of_a_waiter_puts_it_at_the_end_of_the_queue(
        self, server: EtcdServer, connect: Connect
    ) -> None:
        """It finds its key gone, and creates another one."""
        holder, waiter = connect(server.url), connect(server.url)
        lease = holder.lock("revoked waiter", ttl=30).acquire()
        before = leases_of(server)
        waiting = begin(waiter.lock("revoked waiter", ttl=TTL))
        until_waiting(holder, "revoked waiter")
        (session,) = leases_of(server) - before

        server.etcdctl("lease", "revoke", f"{session:x}")
        wait_until(lambda: None if leases_of(server) - before - {session} else "no other session yet")
        until_waiting(holder, "revoked waiter")

        lease.release()
        waiting.result(WAITING_SECONDS).release()

    @pytest.mark.parametrize("face", FACES)
    def test_holders_get_the_reason(self, server: EtcdServer, face: Face) -> None:
        """A deleted key is gone; a lock or permit that was broken has a mark; other locks of the session stay."""

        async def body(driver: FaceDriver) -> None:
            client, other, told = await driver.connect(), await driver.connect(), dict[str, str]()
            options: dict[str, Any] = {"ttl": 60, "on_lost": lambda lost, reason: told.update({lost.name: reason})}
            stays = await client.lock("stays", **options).acquire()
            leases = [await client.lock(name, **options).acquire() for name in ("deleted", "marked")]
            leases.append(await client.semaphore("permit", limit=2, **options).acquire())

            server.etcdctl("del", "--prefix", "lockkit/deleted/")
            assert await other.break_lock("marked")
            assert await other.semaphore("permit", limit=2).break_permit(0)
            inner(client)._engine.confirm_soon()

            expected = {"deleted": "gone", "marked": "broken", "permit": "broken"}
            await driver.eventually(lambda: told == expected, "the holders get the reasons")
            assert not any(lease.held for lease in leases)
            assert await stays.confirm()
            await stays.release()
            for mark in queue_of(server, "lockkit+broken/marked/"):
                assert session_of(server, mark)  # which ends it

        play(face, server.url, body)


def test_note_that_is_replaced_leaves_no_lease(server: EtcdServer, connect: Connect) -> None:
    """Its etcd lease would stay for as long as the note was to be kept: days, or years."""
    client = connect(server.url)
    lease, notes = client.lock("noted", ttl=30).acquire(), client._engine.notes
    before = leases_of(server)

    for text in ("first", "second"):
        drive(notes.write(lease._record, text, 86_400))

        assert value_of(server, "lockkit+note/noted") == text.encode()
        assert leases_of(server) - before == {session_of(server, "lockkit+note/noted")}
    lease.release()


def test_acquisition_says_whether_it_was_sent(server: EtcdServer) -> None:
    """What was not need not be undone."""
    says_whether_it_was_sent(server)


class TestUnknownOutcomes:
    """A request for one lock was interrupted or not answered: other leases do not depend on it."""

    def test_unanswered_acquire_leaves_held_leases_where_they_are(
        self, server: EtcdServer, proxy: FaultProxy, connect: Connect
    ) -> None:
        """Their session lives on, takes no new key, and each heartbeat deletes the key that may come late."""
        client = connect(f"etcd://{proxy.address}")
        held = client.lock("stays", ttl=6).acquire()
        (key,) = queue_of(server, "lockkit/stays/")
        session = session_of(server, key)
        proxy.blackhole(to_server=False)
        ghost = f"lockkit/unanswered/{session:x}"
        with ThreadPoolExecutor() as pool:
            acquiring = pool.submit(client.lock("unanswered", ttl=6).acquire, 0)
            wait_until(lambda: None if queue_of(server, "lockkit/unanswered/") else "not created yet")
            value = server.etcdctl("get", "--print-value-only", ghost).strip()
            with pytest.raises(lockkit.BackendUnavailable):
                acquiring.result()
        proxy.heal()
        wait_until(lambda: "not undone" if queue_of(server, "lockkit/unanswered/") else None)

        # As a member that hung would, when it goes on.
        server.etcdctl("put", f"--lease={session:x}", ghost, value)

        held.extend()
        wait_until(lambda: "not deleted" if queue_of(server, "lockkit/unanswered/") else None)
        assert session_of(server, key) == session
        held.release()

    def test_key_that_comes_late_finds_no_session(
        self, server: EtcdServer, proxy: FaultProxy, connect: Connect
    ) -> None:
        """A member may execute a deletion before the creation that was sent first: a place would be left for a ttl."""
        client = connect(f"etcd://{proxy.address}")
        before = leases_of(server)
        # The answer to the session's grant comes, that to the creation does not.
        with ThreadPoolExecutor() as pool:
            client.lock("makes the session", ttl=600).acquire().release()
            proxy.blackhole(to_server=False)
            acquiring = pool.submit(client.lock("late", ttl=600).acquire, 0)
            wait_until(lambda: None if queue_of(server, "lockkit/late/") else "not created yet")
            with pytest.raises(lockkit.BackendUnavailable):
                acquiring.result()
        proxy.heal()

        wait_until(lambda: "its session is left" if leases_of(server) - before else None)

    def test_extension_that_was_not_answered_is_settled_by_the_next(
        self, server: EtcdServer, proxy: FaultProxy, connect: Connect
    ) -> None:
        """The key was attached to one etcd lease or to the other; the next extension makes sure of one."""
        client = connect(f"etcd://{proxy.address}")
        lease = client.lock("unsettled", ttl=30).acquire()
        (key,) = queue_of(server, "lockkit/unsettled/")
        home = session_of(server, key)
        proxy.delay(to_client=0.5)
        with ThreadPoolExecutor() as pool:
            extending = pool.submit(lease.extend, 40)
            wait_until(lambda: None if session_of(server, key) != home else "not moved yet")
            proxy.blackhole(to_server=False)
            with pytest.raises(lockkit.BackendUnavailable):
                extending.result()
        proxy.heal()
        other = session_of(server, key)
        until(lambda: answers(lease.confirm))

        lease.extend(30)

        assert session_of(server, key) == home
        server.etcdctl("lease", "revoke", f"{other:x}")
        lease.extend(30)
        assert lease.confirm()
        lease.release()

    def test_more_leases_run_out_than_a_transaction_takes(
        self, server: EtcdServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One heartbeat deletes them all, also an updated one, although the session of the held lock lives on."""
        monkeypatch.setattr(keys, "BATCH", 3)
        client = connect(server.url)
        kept = client.lock("kept beside many", ttl=5).acquire()
        dropped = [client.lock(f"not kept {number}", ttl=5, renew=False).acquire() for number in range(8)]
        dropped[0].update("changed")
        wait_until(lambda: "some are left" if queue_of(server, "lockkit/not kept ") else None)
        assert not any(lease.held for lease in dropped)
        assert kept.confirm()
        kept.release()


def test_waiter_switches_from_a_frozen_member(connect: Connect, cluster: EtcdCluster) -> None:
    """The member sends no event and answers no ping, so the waiter watches at another one, long before its ttl."""
    frozen = cluster.followers[0]
    others = [member for member in cluster.members if member is not frozen]
    holder = connect("etcd://" + ",".join(member.address for member in others))
    leases = [holder.lock(f"frozen {number}", ttl=120).acquire() for number in range(6)]
    # Half of them, or some, are at the member that freezes.
    url = f"etcd://{frozen.address},{others[0].address}"
    waiting = [begin(connect(url).lock(lease.name, ttl=120)) for lease in leases]
    for lease in leases:
        until_waiting(holder, lease.name)
    time.sleep(0.5)

    frozen.pause()
    try:
        watch = Stopwatch()
        for lease in leases:
            lease.release()
        got = [one.result(WAITING_SECONDS) for one in waiting]
        took = watch.stop()
    finally:
        frozen.resume()
    assert took < 15
    for lease in got:
        lease.release()
