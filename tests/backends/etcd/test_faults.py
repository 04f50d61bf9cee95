"""Locks on etcd during faults: real members are killed, stopped, cut off, filled and compacted."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

import lockkit
import lockkit.aio
from lockkit.backend import Busy, Gone, Host, Renewed, apart
from lockkit.backends.etcd.backend import EtcdBackend
from lockkit.backends.etcd.cluster import Cluster
from lockkit.backends.etcd.connection import GRANT, TXN, BlockingConnection, Method
from lockkit.backends.etcd.contender import Contender, Session
from lockkit.backends.etcd.session import Sessions
from lockkit.configuration.registry import split_options
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive
from lockkit.sync import Lease
from lockkit.testing.face_driver import FACES, FaceDriver
from lockkit.testing.stopwatch import Stopwatch
from lockkit.testing.target import Face
from lockkit.url import parse
from lockkit_tools.servers import EtcdCluster, EtcdServer, FaultProxy, http2_call_ended, require, wait_until
from tests.backends.etcd.support import (
    Connect,
    Waiting,
    leases_of,
    queue_of,
    session_of,
    until_waiting,
    value_of,
)
from tests.backends.support import StubHost, broken_reason, granted, play, sent_to
from tests.tries import busy, until, until_renewed

pytestmark = pytest.mark.timeout(120)

TTL = 3.0
PATIENCE = 30.0

KEEP = 86_400
KEEP_REQUEST = b"\x08\x80\xa3\x05"
"""How a request for an etcd lease of so many seconds begins."""


@pytest.fixture(autouse=True, scope="module")
def _etcd() -> None:
    require("etcd", local=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    """Three members, for tests that leave all of them running."""
    with EtcdCluster() as members:
        yield members


def backend_at(address: str, host: StubHost) -> EtcdBackend:
    """Open a backend without an engine."""
    url = parse(f"etcd://{address}")
    return EtcdBackend.open(url, split_options(EtcdBackend, url, {})[1], host)


def confirmed(lease: Lease) -> bool:
    """Tell whether the lease is held; False while no leader is elected."""
    try:
        return lease.confirm()
    except lockkit.BackendUnavailable:
        return False


def answers(backend: EtcdBackend) -> bool:
    """Tell whether the member answers."""
    try:
        drive(backend.ping())
    except lockkit.BackendUnavailable:
        return False
    return True


class TestOneMember:
    """``etcd://`` with one host."""

    def test_error_message_names_a_full_database(self, connect: Connect) -> None:
        """With the alarm NOSPACE etcd grants nothing, and the message says why; a release still works."""
        with EtcdServer(settings={"quota-backend-bytes": str(2 * 1024 * 1024)}) as member:
            client = connect(member.url)
            lease = client.lock("x", ttl=30).acquire()
            for _ in range(20):
                try:
                    member.call("/v3/kv/put", key="QQ==", value="QUFB" * 100_000)
                except OSError:
                    break

            with pytest.raises(lockkit.BackendUnavailable, match=r"NOSPACE.*alarm disarm"):
                client.lock("y", ttl=30).acquire(timeout=3)

            lease.extend()
            lease.release()

            # The way out, as docs/how-to/check-your-servers.md has it.
            (status,) = json.loads(member.etcdctl("endpoint", "status", "--write-out=json"))
            member.etcdctl("compact", str(status["Status"]["header"]["revision"]))
            member.etcdctl("defrag", "--cluster")
            member.etcdctl("alarm", "disarm")
            client.lock("y", ttl=30).acquire(timeout=PATIENCE).release()


class TestLongOutage:
    """The members start the ttl of each etcd lease anew when they are back, also of one that is over for its client."""

    @pytest.mark.parametrize("face", FACES)
    def test_lock_that_was_lost_is_freed_when_the_member_is_back(self, face: Face) -> None:
        """Also if its client asks for nothing else. Without that the others would wait for a ttl."""
        with EtcdServer() as member:

            async def body(driver: FaceDriver) -> None:
                client = await driver.connect()
                lease = await client.lock("x", ttl=4).acquire(PATIENCE)
                await driver.call(member.kill)
                assert await lease.wait_lost(PATIENCE)
                await driver.call(until_given_up, client)
                await driver.call(member.start)
                await driver.call(until_free, member)

            play(face, member.url, body)
            assert int(member.metrics()["etcd_debugging_server_lease_expired_total"]) == 0


def until_given_up(client: lockkit.Client | lockkit.aio.Client) -> None:
    """Return once the engine undoes nothing any more: the ttl has passed."""
    cleanups = client._engine.cleanups
    wait_until(lambda: "it still tries" if cleanups._background.running else None, timeout=PATIENCE)


def until_free(member: EtcdServer) -> None:
    """Return once there is no key of a lock."""
    wait_until(lambda: "there still is one" if queue_of(member) else None, timeout=PATIENCE)


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
        waiting = Waiting(waiter.lock("revoked waiter", ttl=TTL))
        until_waiting(holder, "revoked waiter")
        (session,) = leases_of(server) - before

        server.etcdctl("lease", "revoke", f"{session:x}")
        wait_until(lambda: None if leases_of(server) - before - {session} else "no other session yet")
        until_waiting(holder, "revoked waiter")

        lease.release()
        waiting.lease().release()

    def test_deleted_key_notifies_the_holder(self, server: EtcdServer, connect: Connect) -> None:
        """The next renewal reports that nobody holds the lock; other locks of the session stay."""
        client = connect(server.url)
        lease, other = (client.lock(name, ttl=60).acquire() for name in ("deleted", "stays"))
        reasons: list[str] = []
        lease.on_lost(lambda _, reason: reasons.append(reason))

        server.etcdctl("del", "--prefix", "lockkit/deleted/")
        client._engine.confirm_soon()

        assert lease.wait_lost(PATIENCE)
        wait_until(lambda: None if reasons == ["gone"] else f"reasons: {reasons}")
        assert other.confirm()
        other.release()

    def test_broken_lock_is_told_as_broken(self, server: EtcdServer, connect: Connect) -> None:
        """By a mark that its own etcd lease removes; of a permit, too."""
        client = connect(server.url)
        lease, permit = client.lock("marked", ttl=60).acquire(), client.semaphore("marked", limit=2, ttl=60).acquire()
        reasons: list[str] = []
        for one in (lease, permit):
            one.on_lost(lambda _, reason: reasons.append(reason))

        assert connect(server.url).break_lock("marked")
        assert drive(client._engine.client.ready().break_lock(apart("sem", "marked")))
        client._engine.confirm_soon()

        wait_until(lambda: None if reasons == ["broken"] * 2 else f"reasons: {reasons}")
        (mark,) = queue_of(server, "lockkit+broken/marked/")
        assert session_of(server, mark)
        assert asyncio.run(broken_reason(server.url, "marked again", renewed=True)) == "broken"


class TestLostAnswers:
    """The member executed the request, and its answer was lost."""

    def test_grant_is_found_by_asking_again(self, server: EtcdServer, proxy: FaultProxy, connect: Connect) -> None:
        """The second request finds the key of the first."""
        client = connect(f"etcd://{proxy.address}")
        client.lock("lost grant", ttl=TTL).acquire().release()
        dropped = proxy.drop_next_reply(match=b"lockkit/lost grant", until=http2_call_ended)

        lease = client.lock("lost grant", ttl=TTL).acquire(PATIENCE)

        assert dropped.wait(PATIENCE)
        (key,) = queue_of(server, "lockkit/lost grant/")
        assert [holder.token for holder in client.holders("lost grant")] == [lease.token]
        # The lease stays where it is; later locks get another session.
        lease.extend()
        assert lease.confirm()
        assert queue_of(server, "lockkit/lost grant/") == [key]
        assert f"{session_of(server, key):x}" == key.rpartition("/")[2]
        with client.lock("after lost grant", ttl=TTL):
            (after,) = queue_of(server, "lockkit/after lost grant/")
            assert session_of(server, after) != session_of(server, key)
        lease.release()
        assert queue_of(server, "lockkit/lost grant/") == []

    @pytest.mark.parametrize("lost", [KEEP_REQUEST, b"lockkit+note/noted"], ids=["lease", "note"])
    def test_note_leaves_no_lease_without_it(
        self, server: EtcdServer, proxy: FaultProxy, connect: Connect, lost: bytes
    ) -> None:
        """Neither that of an attempt whose answer was lost, nor that of the note which the next one replaces."""
        client = connect(f"etcd://{proxy.address}")
        lease, notes = client.lock("noted", ttl=30).acquire(), client._engine.notes
        before = leases_of(server)
        dropped = proxy.drop_next_reply(match=lost, until=http2_call_ended)

        drive(notes.write(lease._record, "first", KEEP))

        assert dropped.wait(PATIENCE)
        assert leases_of(server) - before == {session_of(server, "lockkit+note/noted")}
        drive(notes.write(lease._record, "second", KEEP))
        assert value_of(server, "lockkit+note/noted") == b"second"
        assert leases_of(server) - before == {session_of(server, "lockkit+note/noted")}
        lease.release()


class TestWhatWasSent:
    """The engine has nothing to undo if nothing was sent."""

    def test_acquisition_says_whether_it_was_sent(self, server: EtcdServer, proxy: FaultProxy) -> None:
        """Refused at connect: no. Unanswered, or refused while a place in the queue is there: yes."""
        host = StubHost()
        backend, other = backend_at(proxy.address, host), backend_at(server.address, host)
        proxy.refuse()
        request = host.request("sent")
        assert not sent_to(backend, request)
        assert request.state is None
        proxy.heal()
        until(lambda: answers(backend))  # grpc connects again after a pause

        holder = host.request("sent")
        grant = granted(drive(other.try_acquire(holder)))
        waiting = host.request("sent")
        assert isinstance(drive(backend.try_acquire(waiting)), Busy)
        proxy.refuse()
        proxy.cut()
        assert sent_to(backend, waiting)
        proxy.heal()
        drive(backend.abandon(waiting))

        proxy.blackhole(to_server=False)
        assert sent_to(backend, host.request("unanswered"))
        proxy.heal()
        drive(other.release(grant))
        for one in (backend, other):
            drive(one.close())


class TestUnknownOutcomes:
    """A request for one lock was interrupted or not answered: other leases do not depend on it."""

    def test_interrupted_acquire_leaves_the_session_that_a_lease_is_being_moved_to(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A Ctrl-C in an acquisition of the same ttl, just before the request that moves the lease is sent."""
        client, other = connect(), connect()
        lease = client.lock("extended", ttl=6).acquire()
        call, sent_count = BlockingConnection.call, 0

        async def strike(connection: BlockingConnection, sent: Method, *arguments: Any) -> object:
            nonlocal sent_count
            if sent is TXN and threading.current_thread() is threading.main_thread():
                sent_count += 1
                if sent_count == 1:
                    with pytest.raises(KeyboardInterrupt):
                        client.lock("interrupted", ttl=12).acquire()
                elif sent_count == 2:
                    raise KeyboardInterrupt
            return await call(connection, sent, *arguments)

        monkeypatch.setattr(BlockingConnection, "call", strike)
        lease.extend(12)

        assert sent_count > 2
        assert busy(other.lock("extended", ttl=6))
        assert lease.confirm()
        lease.release()

    @pytest.mark.parametrize("when", ["free", "waited for", "renewed"])
    def test_session_that_ends_after_its_last_answer_grants_and_renews_nothing(
        self, server: EtcdServer, monkeypatch: pytest.MonkeyPatch, when: str
    ) -> None:
        """
        The member answers that the lock is ours; the session ends; another thread notices that first.

        It finds no holder to notify, and the lock would count as held up to the next renewal.
        """
        host = StubHost()
        backend, other, request = (
            backend_at(server.address, host),
            backend_at(server.address, host),
            host.request("ends"),
        )
        if when == "waited for":
            former = granted(drive(other.try_acquire(host.request("ends"))))
            assert isinstance(drive(backend.try_acquire(request)), Busy)
            drive(other.release(former))
        grant = granted(drive(backend.try_acquire(request))) if when == "renewed" else None
        call, ended = backend.cluster.call, list[Session]()

        async def call_and_end(method: Method, *arguments: Any, **keywords: Any) -> object:
            answer: object = await call(method, *arguments, **keywords)
            if method is TXN and not ended:
                ended.extend(backend._sessions._all)
                server.etcdctl("lease", "revoke", f"{ended[0].id:x}")
                backend._sessions.end(ended[0])
            return answer

        monkeypatch.setattr(backend.cluster, "call", call_and_end)
        if grant is not None:
            assert list(drive(backend.renew([grant]))) == [Gone("session")]
            assert host.losses == [(grant.owner, "session")]
        else:
            after = granted(drive(backend.try_acquire(request)))
            assert after.state.session not in ended
            assert drive(backend.release(after))
        for one in (backend, other):
            drive(one.close())

    @pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
    @pytest.mark.parametrize("executed", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("method", [GRANT, TXN], ids=["session", "key"])
    def test_interrupted_acquire_costs_no_other_lease(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch, method: Method, *, executed: bool
    ) -> None:
        """Before or after a request of it: what is held stays renewed, and the lock is free within its ttl."""
        client, other = connect(), connect()
        held = [client.lock(f"held {number}", ttl=2 * TTL).acquire() for number in range(3)]
        call, struck = BlockingConnection.call, threading.Event()

        async def strike(connection: BlockingConnection, sent: Method, *arguments: Any) -> object:
            if sent is not method or threading.current_thread() is not threading.main_thread() or struck.is_set():
                return await call(connection, sent, *arguments)
            struck.set()
            if executed:
                await call(connection, sent, *arguments)
            raise KeyboardInterrupt

        # The other ttl needs a session of its own.
        lock = client.lock("struck", ttl=2 * TTL if method is TXN else 3 * TTL)
        monkeypatch.setattr(BlockingConnection, "call", strike)
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()

        with other.lock("struck", ttl=TTL, timeout=PATIENCE):
            until_renewed(*held)
        assert all(lease.confirm() for lease in held)
        for lease in held:
            lease.release()

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
        assert queue_of(server, "lockkit/unanswered/") == []
        assert session_of(server, key) == session
        held.release()

    def test_key_whose_release_was_not_answered_goes_with_the_next_heartbeat(
        self, server: EtcdServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The session lives on with another lock, and would keep it up to a ttl."""
        host = StubHost()
        backend = backend_at(server.address, host)
        kept, released = (granted(drive(backend.try_acquire(host.request(name)))) for name in ("kept", "released"))

        async def unanswered(*_: object, **__: object) -> object:
            raise lockkit.BackendUnavailable("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(backend.cluster, "call", unanswered)
            with pytest.raises(lockkit.BackendUnavailable):
                drive(backend.release(released))
        assert queue_of(server, "lockkit/released/")

        drive(backend.renew([kept]))

        assert queue_of(server, "lockkit/released/") == []
        drive(backend.close())

    @pytest.mark.parametrize("is_alone", [False, True], ids=["beside a lease", "alone"])
    def test_request_that_a_cancelled_task_left_under_way_leaves_no_key(
        self, server: EtcdServer, monkeypatch: pytest.MonkeyPatch, *, is_alone: bool
    ) -> None:
        """The member executes it after the key was deleted: it finds no session, or a heartbeat deletes the key."""
        monkeypatch.setattr("lockkit.backends.etcd.backend.ABANDON_WAIT_SECONDS", 0.01)
        host = StubHost(AsyncioRuntime())
        before = leases_of(server)

        async def scenario() -> None:
            backend = backend_at(server.address, host)
            held = None if is_alone else granted(await backend.try_acquire(host.request("beside")))
            call, sent, go_on, answered = backend.cluster.call, asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def call_late(method: Method, *arguments: Any, **keywords: Any) -> object:
                if method is not TXN or sent.is_set():
                    return await call(method, *arguments, **keywords)
                sent.set()
                await go_on.wait()
                try:
                    return await call(method, *arguments, **keywords)
                finally:
                    answered.set()

            monkeypatch.setattr(backend.cluster, "call", call_late)
            request = host.request("late")
            task = asyncio.create_task(backend.try_acquire(request))
            await sent.wait()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

            await backend.abandon(request)
            go_on.set()
            await answered.wait()

            if held is not None:
                assert queue_of(server, "lockkit/late/")
                assert [type(one) for one in await backend.renew([held])] == [Renewed]
            else:
                assert leases_of(server) - before == set()
            assert queue_of(server, "lockkit/late/") == []
            await backend.close()

        asyncio.run(scenario())

    def test_end_of_a_session_is_no_loss_for_a_request_that_was_given_up(self) -> None:
        """Its key may still come late, while another key of the same owner holds the lock in another session."""
        lost: list[str] = []
        host = SimpleNamespace(runtime=BlockingRuntime(), lost=lambda owner, _: lost.append(owner))
        sessions = Sessions(cast("Host", host), cast("Cluster", None))
        session = Session(1, 30, 30.0, 0.0)
        held, given_up = (Contender("x", owner, b"lockkit/x/", b"", None) for owner in ("held", "given up"))
        for contender in (held, given_up):
            contender.home = contender.session = session
            session.contenders.add(contender)
        held.wanted_until = 30.0
        given_up.set_may_come_late()
        sessions.detach(given_up)
        assert session.contenders == {held, given_up}
        assert [one for one in session.contenders if one.wanted_until > 0.0] == [held]

        sessions.end(session)

        assert lost == ["held"]

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
        wait_until(lambda: None if confirmed(lease) else "not connected again yet")

        lease.extend(30)

        assert session_of(server, key) == home
        server.etcdctl("lease", "revoke", f"{other:x}")
        lease.extend(30)
        assert lease.confirm()
        lease.release()

    def test_renewal_says_gone_of_keys_that_are_gone(self, server: EtcdServer, connect: Connect) -> None:
        """Both for keys that stay in their session, and for keys that move to another."""
        client = connect(server.url)
        for ttl in (30, 40):
            lease = client.lock("no key", ttl=30).acquire()
            (key,) = queue_of(server, "lockkit/no key/")
            server.etcdctl("del", key)

            with pytest.raises(lockkit.LockLost):
                lease.extend(ttl)
            assert not lease.held

    def test_more_leases_run_out_than_a_transaction_takes(self, server: EtcdServer, connect: Connect) -> None:
        """One heartbeat deletes them all, also an updated one, although the session of the held lock lives on."""
        client = connect(server.url)
        kept = client.lock("kept beside many", ttl=5).acquire()
        dropped = [client.lock(f"not kept {number}", ttl=5, renew=False).acquire() for number in range(150)]
        dropped[0].update("changed")
        wait_until(lambda: "some are left" if queue_of(server, "lockkit/not kept ") else None)
        assert not any(lease.held for lease in dropped)
        assert kept.confirm()
        kept.release()


class TestThreeMembers:
    """A cluster."""

    def test_client_switches_from_a_stopped_member(self, connect: Connect, cluster: EtcdCluster) -> None:
        """The same call asks another member; keys that the stopped one creates late do not stay."""
        clients = [connect(cluster.url) for _ in range(6)]
        for client in clients:
            client.ping()
        stopped = cluster.followers[0]
        stopped.pause()
        try:
            for number, client in enumerate(clients):
                client.lock(f"stopped {number}", ttl=5).acquire(timeout=PATIENCE).release()
        finally:
            stopped.resume()

        # A request that it kept may create a key now, in a session that no client keeps alive.
        running = cluster.leader
        wait_until(lambda: None if not queue_of(running, "lockkit/") else "a key is left", timeout=PATIENCE)

    def test_waiter_switches_from_a_frozen_member(self, connect: Connect, cluster: EtcdCluster) -> None:
        """The member sends no event and answers no ping, so the waiter watches at another one, long before its ttl."""
        frozen = cluster.followers[0]
        others = [member for member in cluster.members if member is not frozen]
        holder = connect("etcd://" + ",".join(member.address for member in others))
        leases = [holder.lock(f"frozen {number}", ttl=120).acquire() for number in range(6)]
        # Half of them, or some, are at the member that freezes.
        url = f"etcd://{frozen.address},{others[0].address}"
        waiting = [Waiting(connect(url).lock(lease.name, ttl=120)) for lease in leases]
        for lease in leases:
            until_waiting(holder, lease.name)
        time.sleep(0.5)

        frozen.pause()
        try:
            watch = Stopwatch()
            for lease in leases:
                lease.release()
            got = [one.lease() for one in waiting]
            took = watch.stop()
        finally:
            frozen.resume()
        assert took < 15
        for lease in got:
            lease.release()
