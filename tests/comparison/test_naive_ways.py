"""
The ways to lock by hand with which most programs on Redis begin, each led into what goes wrong with it.

A, B and C are programs that want the same lock. Their commands are sent one by one, in the order in which they lose: no
luck is needed, and no waiting. Each class ends with the same order of events on lockkit.
The page on it is docs/comparison/naive-ways.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

import lockkit
from lockkit.sync import Lease
from lockkit.testing.processes import Worker
from lockkit.testing.target import Target
from lockkit_tools.servers import FaultProxy, RedisServer, require, wait_until
from tests.comparison.support import LONG, PATIENCE, Program, run_out
from tests.tries import busy, have_time_to_answer

LOCK = "lock"
STOCK = "stock"
TTL_MS = 60_000


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One node for all tests of this module."""
    require("redis", local=True)
    with RedisServer() as node:
        yield node


@pytest.fixture(autouse=True)
def _empty(server: RedisServer) -> None:
    with server.connect() as connection:
        connection.call("FLUSHALL")


@pytest.fixture
def a(server: RedisServer) -> Iterator[Program]:
    """The one to whom it happens."""
    with Program(server.port) as program:
        yield program


@pytest.fixture
def b(server: RedisServer) -> Iterator[Program]:
    """The one that is in the way."""
    with Program(server.port) as program:
        yield program


@pytest.fixture
def c(server: RedisServer) -> Iterator[Program]:
    """The one that profits."""
    with Program(server.port) as program:
        yield program


@pytest.fixture
def link(server: RedisServer) -> Iterator[FaultProxy]:
    """A way to the server on which answers get lost and requests are late."""
    with FaultProxy(server.host, server.port) as proxy:
        yield proxy


def scripts_run(server: RedisServer) -> int:
    """How many scripts the server has run: lockkit's releases are such."""
    with server.connect() as connection:
        calls = connection.info("commandstats").get("cmdstat_evalsha", "calls=0")
    return int(calls.partition("calls=")[2].partition(",")[0])


def replaced(a: Program, b: Program) -> tuple[Lease, Lease]:
    """Pause A until its lease has run out and B has the lock; give A's lease and B's."""
    paused = a.locks.lock(LOCK, ttl=0.3, renew=False).acquire()
    assert paused.wait_lost(PATIENCE)
    return paused, b.locks.lock(LOCK, ttl=LONG).acquire(timeout=PATIENCE)


class TestSetnxAlone:
    """``SETNX lock 1`` … ``DEL lock``."""

    def test_lost_answer_of_setnx_leaves_a_lock_that_nobody_has(self, a: Program, link: FaultProxy) -> None:
        """
        The value says nothing about who set it, so the one who did cannot tell its own lock from another's.

        A  SETNX lock 1   is done; its answer is lost, and the client sends it again
        A  SETNX lock 1   0: somebody has it, namely A, who does not know
        """
        with Program(link.port, retry=Retry(NoBackoff(), 3)) as far:
            far.redis.ping()
            dropped = link.drop_next_reply(match=b"SETNX")

            assert not far.redis.setnx(LOCK, 1)

        assert dropped.wait(PATIENCE)
        assert a.redis.exists(LOCK)
        assert a.redis.ttl(LOCK) == -1, "and it never ends"

    def test_lockkit_is_granted_the_lock_whose_answer_was_lost(self, a: Program, link: FaultProxy) -> None:
        """What may have been granted is undone by its owner, and asked for anew."""
        with Program(link.port) as far:
            far.locks.lock("warm").acquire().release()
            dropped = link.drop_next_reply(match=b"lockkit:lock")

            with far.locks.lock(LOCK, ttl=LONG).acquire(timeout=PATIENCE) as lease:
                assert dropped.wait(PATIENCE)
                assert [holder.owner for holder in a.locks.holders(LOCK)] == [lease.owner]


class TestNoTtl:
    """A lock that nothing ends but its holder: ``SETNX``, also with an ``EXPIRE`` after it."""

    def test_holder_that_dies_leaves_the_lock_for_ever(self, a: Program, b: Program) -> None:
        """
        There is nobody left to delete it, nor to send the EXPIRE that was to come next.

        A  SETNX lock a   1, and dies
        B  SETNX lock b   0, today and in a year
        """
        assert a.redis.setnx(LOCK, "a")
        a.redis.close()

        assert not b.redis.setnx(LOCK, "b")
        assert b.redis.ttl(LOCK) == -1

    @pytest.mark.slow
    def test_lockkit_gives_the_lock_of_a_killed_process_to_the_next(self, server: RedisServer, b: Program) -> None:
        """The ttl comes with the grant, in one step, and ends what the dead process held."""
        with Worker(Target(server.url), "blocking") as holder:
            dead = holder.acquire(LOCK, ttl=1.0)
            holder.kill()

            lease = b.locks.lock(LOCK).acquire(timeout=PATIENCE)

        assert lease.token > dead.token
        lease.release()


class TestDeleteWithoutOwner:
    """``SETNX lock 1``, and ``DEL lock`` in the ``finally`` of whoever tried."""

    def test_loser_that_cleans_up_frees_the_winner_s_lock(self, a: Program, b: Program, c: Program) -> None:
        """
        Nothing at the server knows whose lock it is.

        A  SETNX lock 1   1: holds
        B  SETNX lock 1   0: gives up
        B  DEL lock       in its finally
        C  SETNX lock 1   1: holds, and A works on
        """
        assert a.redis.setnx(LOCK, 1)
        try:
            assert not b.redis.setnx(LOCK, 1)
        finally:
            b.redis.delete(LOCK)

        assert c.redis.setnx(LOCK, 1)

    def test_lockkit_loser_has_nothing_to_free(
        self, a: Program, b: Program, c: Program, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A lease is what frees a lock, and the loser gets none."""
        have_time_to_answer(monkeypatch)
        with a.locks.lock(LOCK, ttl=LONG) as lease:
            with pytest.raises(lockkit.LockTimeout), b.locks.lock(LOCK, timeout=0):
                pytest.fail("the body ran without the lock")

            assert busy(c.locks.lock(LOCK))
            assert lease.confirm()


def lock_by_timestamp(client: redis.Redis, now: int, lease: int) -> bool:
    """Take the lock until `now` + `lease`, both seconds on the caller's clock, as many a program has it."""
    until = now + lease
    if client.setnx(LOCK, until):
        return True
    if int(client.get(LOCK) or 0) > now:
        return False
    return int(client.getset(LOCK, until) or 0) <= now


class TestTimestampAndGetset:
    """``SETNX lock DEADLINE``; if that has passed, ``GETSET lock DEADLINE`` and see who was first."""

    def test_clock_that_is_ahead_takes_a_lock_that_is_held(self, a: Program, b: Program) -> None:
        """
        The deadline is one client's time of day, compared with another's.

        A  12:00:00 on its clock   SETNX lock 12:00:30: holds
        B  12:00:31 on its clock   GET: it is over. GETSET: holds, and A works on
        """
        noon = 43_200

        assert lock_by_timestamp(a.redis, noon, 30)
        assert lock_by_timestamp(b.redis, noon + 31, 30), "in the same instant"

    def test_loser_of_the_race_overwrites_the_winner_s_deadline(self, a: Program, b: Program, c: Program) -> None:
        """
        GETSET writes before it knows.

           the lock of a dead program is over
        A  GET       it is over
        B  GET       it is over
        A  GETSET a  the old deadline: A holds until a
        B  GETSET b  a, which is still to come: B does not hold, but the lock says b
        A  GET       b: not mine, so it is not deleted, and nobody is left who would
        """
        noon, of_a, of_b = 43_200, 43_230, 43_290
        c.redis.set(LOCK, noon - 1)
        assert int(a.redis.get(LOCK) or 0) < noon
        assert int(b.redis.get(LOCK) or 0) < noon
        assert int(a.redis.getset(LOCK, of_a) or 0) < noon  # A holds
        assert int(b.redis.getset(LOCK, of_b) or 0) > noon  # B does not

        if a.redis.get(LOCK) == str(of_a):
            a.redis.delete(LOCK)

        assert not lock_by_timestamp(c.redis, of_a + 1, 30), "A has ended, its deadline is over, and it is still taken"

    def test_lockkit_compares_no_client_s_time_of_day(
        self, a: Program, b: Program, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server keeps the time. A client whose clock is a year ahead takes nothing, and gets no higher a token."""
        import time  # noqa: PLC0415 - what is patched

        with a.locks.lock(LOCK, ttl=LONG) as lease:
            ahead = time.time() + 365 * 86_400
            monkeypatch.setattr(time, "time", lambda: ahead)
            monkeypatch.setattr(time, "time_ns", lambda: int(ahead * 1e9))

            assert busy(b.locks.lock(LOCK))
            assert lease.confirm()
        with b.locks.lock(LOCK) as after:
            assert lease.token < after.token < ahead * 1e6


class TestUncheckedDelete:
    """``SET lock OWNER NX EX 30`` … ``DEL lock``."""

    def test_late_delete_frees_the_next_holder_s_lock(self, a: Program, b: Program, c: Program) -> None:
        """
        The ttl has ended A's lock; DEL does not ask whose it is now.

        A  SET lock a NX EX   holds, and is paused until the ttl is over
        B  SET lock b NX EX   holds
        A  DEL lock           wakes up and deletes B's
        C  SET lock c NX EX   holds, and B works on
        """
        assert a.redis.set(LOCK, "a", nx=True, px=TTL_MS)
        run_out(a.redis, LOCK)
        assert b.redis.set(LOCK, "b", nx=True, px=TTL_MS)

        a.redis.delete(LOCK)

        assert c.redis.set(LOCK, "c", nx=True, px=TTL_MS)

    def test_get_before_delete_leaves_a_gap(self, a: Program, b: Program, c: Program) -> None:
        """
        Two commands again: between them the lock passes on.

        A  GET lock           a: still mine
           the ttl is over
        B  SET lock b NX EX   holds
        A  DEL lock           deletes B's
        C  SET lock c NX EX   holds, and B works on
        """
        assert a.redis.set(LOCK, "a", nx=True, px=TTL_MS)
        assert a.redis.get(LOCK) == "a"
        run_out(a.redis, LOCK)
        assert b.redis.set(LOCK, "b", nx=True, px=TTL_MS)

        a.redis.delete(LOCK)

        assert c.redis.set(LOCK, "c", nx=True, px=TTL_MS)

    def test_paused_holder_overwrites_what_the_next_one_wrote(self, a: Program, b: Program) -> None:
        """
        Also with a delete that is checked: nothing tells storage that A's time is over.

        A  SET lock a NX EX   holds, and is paused until the ttl is over
        B  SET lock b NX EX   holds, writes Ben
        A  SET seat Ada       wakes up and writes
        """
        assert a.redis.set(LOCK, "a", nx=True, px=TTL_MS)
        run_out(a.redis, LOCK)
        assert b.redis.set(LOCK, "b", nx=True, px=TTL_MS)
        b.redis.set("seat", "Ben")

        a.redis.set("seat", "Ada")

        assert b.redis.get("seat") == "Ada", "sold twice"

    def test_lockkit_late_release_frees_nobody_else_s_lock(self, a: Program, b: Program, c: Program) -> None:
        """The one that comes late is told so."""
        paused, lease = replaced(a, b)

        with pytest.raises(lockkit.LockLost):
            paused.release()

        assert busy(c.locks.lock(LOCK))
        assert lease.confirm()
        lease.release()

    def test_lockkit_release_that_arrives_late_frees_nobody_else_s_lock(
        self, server: RedisServer, b: Program, c: Program, link: FaultProxy
    ) -> None:
        """It was sent in time and is on its way until B holds: the owner is compared where and when it is deleted."""
        with lockkit.connect(f"redis://{link.address}/0", socket_timeout=1.0) as far:
            mine = far.lock(LOCK, ttl=LONG, renew=False).acquire()
            link.blackhole()
            with pytest.raises(lockkit.BackendUnavailable):
                mine.release()
            run_out(b.redis, f"lockkit:{LOCK}")
            lease = b.locks.lock(LOCK, ttl=LONG).acquire(timeout=PATIENCE)
            before = scripts_run(server)

            link.heal()  # what was sent arrives now
            wait_until(lambda: None if scripts_run(server) > before else "it has not arrived")

            assert busy(c.locks.lock(LOCK))
            assert lease.confirm()
            lease.release()

    def test_lockkit_token_keeps_the_paused_holder_from_writing(self, a: Program, b: Program) -> None:
        """Storage compares tokens in the same step as it writes."""
        paused, lease = replaced(a, b)
        lockkit.fencing.RedisGuard(b.redis).set("seat", "Ben", token=lease.token)

        with pytest.raises(lockkit.StaleToken):
            lockkit.fencing.RedisGuard(a.redis).set("seat", "Ada", token=paused.token)

        assert b.redis.get("seat") == "Ben"
        lease.release()


def read(pipe: redis.client.Pipeline) -> int:
    """Read the stock. While it watches, a pipeline sends each command at once."""
    return int(pipe.get(STOCK))  # type: ignore[arg-type]  # of a pipeline that does not watch


def watched(pipe: redis.client.Pipeline) -> int:
    """Watch the stock, and read it."""
    pipe.watch(STOCK)  # type: ignore[no-untyped-call]
    return read(pipe)


class TestWatchMultiExec:
    """``WATCH stock``, ``GET stock``, ``MULTI``, ``SET stock``, ``EXEC``: no lock at all, and often a good choice."""

    def test_what_was_done_elsewhere_is_done_twice(self, a: Program, b: Program) -> None:
        """
        Only Redis forgets the attempt that lost: a parcel is on its way.

        A  WATCH, GET   1 is left: sends the parcel
        B  WATCH, GET   1 is left: sends the parcel
        A  EXEC         0 is left
        B  EXEC         nil: too late, but the parcel has been sent
        """
        a.redis.set(STOCK, 1)
        sent = []
        with a.redis.pipeline() as first, b.redis.pipeline() as second:
            for program, pipe in (("A", first), ("B", second)):
                assert watched(pipe) == 1
                sent.append(program)
                pipe.multi()
                pipe.set(STOCK, 0)
            first.execute()
            with pytest.raises(redis.WatchError):
                second.execute()

        assert sent == ["A", "B"], "two parcels"
        assert a.redis.get(STOCK) == "0", "of one"

    def test_slow_one_never_gets_its_turn(self, a: Program, b: Program) -> None:
        """
        Whoever is quicker wins, so who takes longer may lose for ever.

        A  WATCH, GET   thinks
        B  DECR         takes no time
        A  EXEC         nil, and again from the start
        """
        a.redis.set(STOCK, 1000)
        tries, changes = 50, 0
        for _ in range(tries):
            with a.redis.pipeline() as pipe:
                left = watched(pipe)
                b.redis.decr(STOCK)
                pipe.multi()
                pipe.set(STOCK, left - 1)
                try:
                    pipe.execute()
                    changes += 1
                except redis.WatchError:
                    continue

        assert changes == 0

    def test_lost_answer_of_exec_makes_the_change_twice(self, a: Program, link: FaultProxy) -> None:
        """
        redis-py's ``transaction()`` takes a lost answer for a collision, and begins again.

        A  EXEC        is done, 9 are left; the answer is lost
        A  WATCH, GET  9
        A  EXEC        8 are left, and one was sold
        """
        a.redis.set(STOCK, 10)

        def sell(pipe: redis.client.Pipeline) -> None:
            left = read(pipe)
            pipe.multi()
            pipe.set(STOCK, left - 1)

        with Program(link.port) as far:
            far.redis.ping()
            dropped = link.drop_next_reply(match=b"EXEC")
            far.redis.transaction(sell, STOCK)

        assert dropped.wait(PATIENCE)
        assert a.redis.get(STOCK) == "8"

    def test_lockkit_lets_only_the_holder_act(self, a: Program, b: Program) -> None:
        """What is done elsewhere is done after the lock was granted, not before."""
        a.redis.set(STOCK, 1)
        sent = []
        with a.locks.lock(STOCK, ttl=LONG):
            assert busy(b.locks.lock(STOCK)), "B comes at the same time and sends nothing"
            sent.append("A")
            a.redis.decr(STOCK)
        with b.locks.lock(STOCK, timeout=PATIENCE):
            if int(b.redis.get(STOCK) or 0) > 0:
                sent.append("B")

        assert sent == ["A"]

    def test_lockkit_serves_in_the_order_of_arrival(self, a: Program, b: Program, c: Program) -> None:
        """B, who is quick, comes back for more, and waits behind A."""
        assert a.locks.capabilities.fair
        first = b.locks.lock(STOCK, ttl=LONG).acquire()
        got: dict[str, Lease] = {}
        threads = []
        for waiters, (name, program) in enumerate([("A", a), ("B again", c)], 1):

            def wait(name: str = name, program: Program = program) -> None:
                got[name] = program.locks.lock(STOCK, ttl=LONG).acquire(timeout=PATIENCE)
                got[name].release()

            threads.append(threading.Thread(target=wait))
            threads[-1].start()
            wait_until(
                lambda waiters=waiters: (
                    None  # type: ignore[misc]  # mypy cannot infer a default's type
                    if [holder.waiters for holder in b.locks.holders(STOCK)] == [waiters]
                    else f"not {waiters} waiting"
                )
            )

        first.release()
        for thread in threads:
            thread.join(PATIENCE)

        assert first.token < got["A"].token < got["B again"].token

    def test_lockkit_optimistic_change_is_made_once_though_its_answer_was_lost(
        self, a: Program, link: FaultProxy
    ) -> None:
        """`with_retry` says that it does not know, and does not try again."""
        a.redis.set(STOCK, 10)
        with Program(link.port, retry=Retry(NoBackoff(), 3)) as far:
            far.redis.ping()
            dropped = link.drop_next_reply(match=b"EXEC")

            with pytest.raises(lockkit.BackendUnavailable, match="may have been"):
                lockkit.optimistic.with_retry(far.redis, STOCK, lambda now: int(now) - 1)

        assert dropped.wait(PATIENCE)
        assert a.redis.get(STOCK) == "9"
