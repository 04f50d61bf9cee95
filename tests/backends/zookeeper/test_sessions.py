"""Sessions of ZooKeeper, their threads, and what answers prove."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from kazoo.protocol.serialization import GetData, SetData, Sync

import lockkit
import lockkit.aio
from lockkit.backend import Grant, Renewed, Request, Unknown
from lockkit.backends.zookeeper.connection import Answer, outcome
from lockkit.backends.zookeeper.session import SYNC, Session
from lockkit.backends.zookeeper.sessions import SESSIONS_MAX, session_timeout
from lockkit.runtime import BlockingRuntime, drive, monotonic
from lockkit.testing.face_driver import FACES, FaceDriver
from lockkit.testing.stopwatch import Stopwatch
from lockkit.testing.target import Face
from lockkit_tools.servers import FaultProxy, ZooKeeperEnsemble, ZooKeeperServer, require, wait_until
from tests.backends.support import Connect, StubHost, granted, inner, open_backend, play
from tests.backends.zookeeper.support import (
    PATIENCE,
    Tree,
    answer,
    end_session,
    holding,
    sessions_of,
)
from tests.tries import beside

TTL = 3.0
LONG = 60.0

CLOSING = 6.5
"""What `close` may take: five seconds, and what a busy machine adds."""


class TestManySessions:
    """A program that computes its ttls."""

    def test_timeout_of_a_session_is_at_most_a_third_longer_than_the_ttl(self) -> None:
        """And usual ttls have their own."""
        for tenths in range(10, 40_000, 7):
            ttl = tenths / 10
            assert ttl <= session_timeout(ttl) <= ttl * 4 / 3 + 0.001
        for ttl in (1, 1.5, 2, 5, 10, 20, 30, 60, 120, 600):
            assert session_timeout(ttl) == ttl
        assert len({session_timeout(4 + number / 100) for number in range(3600)}) == 11

    def test_ttls_outside_of_the_server_s_bounds(self, caplog: pytest.LogCaptureFixture) -> None:
        """A longer lease is cut, the client ends a shorter one; each is warned of once."""
        require("zookeeper", local=True)
        bounds = {"minSessionTimeout": "20000", "maxSessionTimeout": "40000"}
        with ZooKeeperServer(settings=bounds) as server, lockkit.connect(server.url) as client:
            ttls = (1, 1.5, 2, 20, 60, 50, 60, 40)
            with holding(client.lock(f"x{number}", ttl=ttl) for number, ttl in enumerate(ttls)) as leases:
                assert {session.granted_seconds for session in sessions_of(client)} == {20, 40}
                assert [lease.ttl for lease in leases] == [1, 1.5, 2, 20, 40, 40, 40, 40]
                assert 30 < leases[-1].remaining() < 40
            lease = client.lock("short", ttl=2, renew=False).acquire(PATIENCE)
            with lockkit.connect(server.url) as other, other.lock("short", ttl=20, timeout=15):
                assert lease.lost
        for setting, count in (("minSessionTimeout", 3), ("maxSessionTimeout", 2)):
            records = [record for record in caplog.records if setting in record.message]
            assert [record.levelno for record in records] == [logging.WARNING] * count

    def test_more_ttls_than_sessions_lie_in_the_next_longer_one(
        self, server: ZooKeeperServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Or, if there is none, in the longest: then the lease is shorter, and says so. Idle ones make room."""
        ttls = [100, 80, 60, 50, 40, 30, 25, 20, 15, 12, 10, 8, 5, 110]
        with (
            lockkit.connect(server.url) as client,
            holding(client.lock(f"held-{ttl}", ttl=ttl) for ttl in ttls) as leases,
        ):
            assert len(sessions_of(client)) == SESSIONS_MAX == 12
            assert [lease.ttl for lease in leases[12:]] == [5, 100]
            assert len([record for record in caplog.records if "all are in use" in record.message]) == 2
            for lease in leases:
                assert lease.confirm()


class TestThread:
    """It sends heartbeats and wakes waiters: nothing may delay it, and one that dies is replaced."""

    def test_handler_of_the_log_may_use_a_lock_of_the_client(self, server: ZooKeeperServer) -> None:
        """When a lease is lost with its session, the log says so."""
        found: list[object] = []

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "lost lock 'told'" in record.getMessage():
                    found.append(client.lock("by-handler", ttl=LONG).try_acquire(PATIENCE))

        handler = Handler()
        logging.getLogger("lockkit").addHandler(handler)
        try:
            with lockkit.connect(server.url) as client:
                lease = client.lock("told", ttl=LONG).acquire()
                began = monotonic()
                end_session(server, client)
                assert lease.wait_lost(PATIENCE)
                wait_until(lambda: None if found else "the handler still waits", timeout=PATIENCE)
                assert found[0] is not None
                assert monotonic() - began < PATIENCE / 2
        finally:
            logging.getLogger("lockkit").removeHandler(handler)

    @pytest.mark.parametrize("face", FACES)
    def test_thread_that_died_costs_its_leases_and_no_more(self, server: ZooKeeperServer, face: Face) -> None:
        """Their holders are notified, and the client continues in another session."""

        async def body(driver: FaceDriver) -> None:
            client = await driver.connect()
            lease = await client.lock(driver.name(), ttl=LONG).acquire()
            (session,) = sessions_of(inner(client))

            session._take = None  # type: ignore[assignment,method-assign]
            with suppress(lockkit.BackendUnavailable):
                await client.ping()

            assert await lease.wait_lost(LONG / 4)
            async with client.lock(driver.name(), ttl=LONG, timeout=PATIENCE) as after:
                assert await after.confirm()

        play(face, server.url, body)

    def test_thread_that_hangs_in_a_name_lookup_delays_nobody(
        self, server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither a call nor `close()`."""
        look_up, go_on, asked = socket.getaddrinfo, threading.Event(), threading.Event()
        stuck = False

        def slow(*arguments: Any, **keywords: Any) -> object:
            if stuck:
                asked.set()
                assert go_on.wait(PATIENCE)
            return look_up(*arguments, **keywords)

        monkeypatch.setattr(socket, "getaddrinfo", slow)
        with FaultProxy(server.host, server.port) as proxy:
            url = f"zookeeper://{proxy.address}"
            client, closed = lockkit.connect(url), lockkit.connect(url)
            client.ping()
            closed.ping()
            stuck = True
            proxy.cut()
            assert asked.wait(PATIENCE)
            watch = Stopwatch()
            with pytest.raises(lockkit.BackendUnavailable):
                client.lock("x", ttl=LONG).acquire(0)
            closed.close()
            assert watch.stop() < CLOSING
            go_on.set()
            client.close()

    def test_requests_that_the_socket_does_not_take_at_once(
        self, server: ZooKeeperServer, tree: Tree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The caller does not wait: the thread sends the rest."""
        tree.client.create("/large")
        with lockkit.connect(server.url) as client:
            client.ping()
            (session,) = sessions_of(client)
            flush, left = session._flush, list[int]()

            def watched() -> None:
                flush()
                left.append(len(session._out))

            monkeypatch.setattr(session, "_flush", watched)
            server.pause()  # else a quick one has read all of it
            try:
                sent = session.send(*(SetData("/large", bytes(500_000), -1) for _ in range(30)))
                assert left[0]
            finally:
                server.resume()
            assert [answer(one).version for one in sent] == [*range(1, 31)]

    def test_interrupt_while_a_request_is_sent_costs_no_later_answer(
        self, server: ZooKeeperServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Half of it may have been sent: the connection is broken, and the session goes on with the next one."""
        client = connect(server.url)
        lease = client.lock("interrupted", ttl=LONG).acquire(PATIENCE)
        (session,) = sessions_of(client)
        number = session.id

        def interrupted() -> None:
            del session._out[:3]
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(session, "_flush", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.send(SYNC)
        # Long before the next heartbeat.
        wait_until(lambda: None if session.usable and not session._pending else "not back", timeout=LONG / 6)
        assert answer(session.send(GetData("/lockkit", None))[0])
        assert session.id == number
        lease.release()

    def test_unknown_host_is_an_error_that_says_so(self) -> None:
        """Also a name that cannot be one."""
        for host in ("no-such-host.invalid", "a..b"):
            with lockkit.connect(f"zookeeper://{host}") as client:
                for _ in range(2):
                    with pytest.raises(lockkit.BackendUnavailable, match=r"name|label") as raised:
                        client.lock("x").acquire(timeout=0.1)
                    assert "did not answer" not in str(raised.value)


def test_error_of_a_signal_handler_is_no_answer() -> None:
    """A time limit, as Celery and RQ raise it, strikes the wait: it ends the call, which is not tried again."""

    class TimeLimitError(Exception):
        """Of the application."""

    def strike(signum: int, frame: object) -> None:
        del signum, frame
        raise TimeLimitError

    def wait() -> None:
        timer.start()
        drive(outcome(BlockingRuntime(), Answer(), PATIENCE))

    before = signal.signal(signal.SIGUSR1, strike)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    try:
        with pytest.raises(TimeLimitError):
            wait()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_client_stopped_while_connecting_does_not_connect(
    server: ZooKeeperServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads end, and its session does not stay."""
    make, connecting, go_on = socket.create_connection, threading.Event(), threading.Event()

    def slow(*arguments: Any, **keywords: Any) -> socket.socket:
        connecting.set()
        assert go_on.wait(PATIENCE)
        return make(*arguments, **keywords)

    client = connect(server.url)
    before = {*threading.enumerate()}
    monkeypatch.setattr(socket, "create_connection", slow)
    with suppress(lockkit.BackendUnavailable):
        client.lock("slow", ttl=LONG).acquire(timeout=0.5)
    assert connecting.wait(PATIENCE)
    client.close()
    go_on.set()

    wait_until(lambda: None if {*threading.enumerate()} <= before else "threads are left", timeout=PATIENCE / 2)


class Backend:
    """A backend of its own, without an engine, and what the engine would do with it."""

    def __init__(self, url: str) -> None:
        """Open it; nothing is sent."""
        self.host = StubHost()
        self.backend = open_backend(url, self.host)

    def request(self, name: str, ttl: float = LONG) -> Request:
        """Make a request that may take some seconds."""
        return self.host.request(name, ttl=ttl)

    def ask(self, request: Request) -> object:
        """Try once, in the time that a call without a deadline has."""
        return drive(self.backend.try_acquire(request))

    def acquire(self, name: str, ttl: float = LONG) -> Grant:
        """Try once, with success."""
        return granted(self.ask(self.request(name, ttl)))


@pytest.fixture
def opened() -> Iterator[Callable[[str], Backend]]:
    """Opens backends, closed at the end."""
    with ExitStack() as backends:

        def make(url: str) -> Backend:
            made = Backend(url)
            backends.callback(lambda: drive(made.backend.close()))
            return made

        yield make


class TestWhatAnswersProve:
    """What an answer proves, and what it does not."""

    def test_node_of_another_session_is_not_ours(
        self, server: ZooKeeperServer, tree: Tree, opened: Callable[[str], Backend]
    ) -> None:
        """
        A creation stayed unanswered, and a node with our owner is found: but not of the session that we have now.

        It is about to vanish with its own, whatever its name says.
        """
        with FaultProxy(server.host, server.port) as proxy:
            ours = opened(f"zookeeper://{proxy.address}")
            ours.acquire("warm")
            request = ours.request("theirs")
            tree.client.ensure_path("/lockkit/theirs")
            tree.client.create(f"/lockkit/theirs/{request.owner}__lock__", sequence=True)
            proxy.blackhole()  # what is sent now never arrives
            threading.Timer(0.5, lambda: heal(proxy)).start()

            with pytest.raises(lockkit.BackendUnavailable, match="session"):
                ours.ask(request)

    def test_lease_whose_node_was_not_asked_for_is_not_renewed(
        self, server: ZooKeeperServer, opened: Callable[[str], Backend], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The connection broke after the heartbeat: that it was answered says nothing of a node that is not watched."""
        ours = opened(server.url)
        grant = ours.acquire("unwatched")
        send = Session.send

        def send_once(session: Session, *requests: Any) -> list[Answer]:
            if not isinstance(requests[0], Sync):
                raise lockkit.BackendUnavailable
            return send(session, *requests)

        monkeypatch.setattr(Session, "send", send_once)
        (renewal,) = drive(ours.backend.renew([grant]))
        assert isinstance(renewal, Unknown)
        monkeypatch.undo()
        assert list(drive(ours.backend.renew([grant]))) == [Renewed(ttl=LONG)]

    def test_member_with_a_shorter_session_timeout_shortens_a_lease(
        self, server: ZooKeeperServer, opened: Callable[[str], Backend]
    ) -> None:
        """The session has moved there with its connection."""
        ours = opened(server.url)
        grant = ours.acquire("shortened", ttl=30)
        grant.state.session.granted_seconds = 20.0

        assert list(drive(ours.backend.renew([grant]))) == [Renewed(ttl=20.0)]


@pytest.fixture
def ensemble() -> Iterator[ZooKeeperEnsemble]:
    """
    Three servers for one test: those that paused may elect anew for a while.

    A follower serves for ten more seconds (syncLimit) without its leader.
    """
    require("zookeeper-ensemble", local=True)
    with ZooKeeperEnsemble() as running:
        yield running


class TestEnsemble:
    """One or two of three servers are away."""

    def test_without_a_majority_nobody_is_granted_a_lock(self, ensemble: ZooKeeperEnsemble, connect: Connect) -> None:
        """The error says so; the holder is notified by its deadline; afterwards everything works again."""
        client, other = connect(ensemble.url), connect(ensemble.url)
        lease = client.lock("majority", ttl=TTL).acquire(PATIENCE)
        for member in ensemble.members[:2]:
            member.kill()
        try:
            with pytest.raises(lockkit.BackendUnavailable, match="majority"):
                other.lock("majority", ttl=TTL).acquire(timeout=2)
            assert lease.wait_lost(PATIENCE)
        finally:
            ensemble.start()

        with other.lock("majority", ttl=TTL, timeout=PATIENCE) as after:
            assert after.token > lease.token

    def test_member_that_hangs_costs_no_lease(self, ensemble: ZooKeeperEnsemble, connect: Connect) -> None:
        """Its clients leave it after the first question that it does not answer; a new client gets past it, too."""
        follower, *_ = ensemble.followers
        hosts = sorted((member.address for member in ensemble.members), key=lambda address: address != follower.address)
        client, later = (connect(f"zookeeper://{','.join(hosts)}", randomize_hosts=False) for _ in range(2))
        lease = client.lock("hangs", ttl=40).acquire(PATIENCE)

        follower.pause()
        try:
            later.ping()
            client.lock("another", ttl=20).acquire(timeout=PATIENCE).release()
            assert lease.confirm()
            lease.release()
        finally:
            follower.resume()


def test_follower_without_its_leader_proves_nothing(
    ensemble: ZooKeeperEnsemble, opened: Callable[[str], Backend]
) -> None:
    """
    It answers reads from its own copy, while the leader counts the session timeouts, and may have ended sessions.

    So it renews no lease, neither the first time, when the node is asked for, nor when its watch is there. It lists no
    locks, also not on a later page, whose session may be at another member. It makes no waiter the holder.
    """
    follower, *_ = ensemble.followers
    others = [member for member in ensemble.members if member is not follower]
    ours, other, waiter = (opened(follower.url) for _ in range(3))
    fresh, watched, handed = (ours.acquire(name) for name in ("fresh", "watched", "handed"))
    drive(ours.backend.renew([watched]))
    first = drive(other.backend.names("fresh"))
    assert drive(other.backend.names("fresh", first)).names == ["fresh"]
    request = waiter.request("handed")
    assert not isinstance(waiter.ask(request), Grant)
    assert drive(ours.backend.release(handed))
    wait_until(lambda: None if request.wake.is_set() else "not woken", timeout=PATIENCE)

    for member in others:
        member.pause()
    try:
        assert follower.mode() == "follower"
        # All at once: it serves for ten seconds.
        renewing = beside(drive, ours.backend.renew([fresh, watched]))
        calls: list[Future[Any]] = [beside(drive, other.backend.names("fresh", first)), beside(waiter.ask, request)]

        for renewal in renewing.result(PATIENCE):
            assert isinstance(renewal, Unknown)
            assert isinstance(renewal.error, lockkit.BackendUnavailable)
        for call in calls:
            with pytest.raises(lockkit.BackendUnavailable):
                call.result(PATIENCE)
    finally:
        for member in others:
            member.resume()


def heal(proxy: FaultProxy) -> None:
    """Drop what is on its way, and let the rest through."""
    proxy.cut()
    proxy.heal()
