"""
The ways to lock by hand with which most programs on Redis begin, each led into what goes wrong with it.

A, B and C are programs that want the same lock. Their commands are sent one by one, in the order in which they lose: no
luck is needed, and no waiting. The page on it, docs/comparison/naive-ways.md, names the tests that lockkit does better.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lockkit_tools.servers import FaultProxy, RedisServer, require
from tests.comparison.support import PATIENCE, run_out

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


def program(port: int, **options: Any) -> redis.Redis:
    """One of several programs that want the same lock."""
    return redis.Redis(port=port, decode_responses=True, **options)


@pytest.fixture
def a(server: RedisServer) -> Iterator[redis.Redis]:
    """The one to whom it happens."""
    with program(server.port) as connected:
        yield connected


b, c = a, a
"""The one that is in the way, and the one that profits."""


@pytest.fixture
def link(server: RedisServer) -> Iterator[FaultProxy]:
    """A way to the server on which answers get lost and requests are late."""
    with FaultProxy(server.host, server.port) as proxy:
        yield proxy


class TestSetnxAlone:
    """``SETNX lock 1`` … ``DEL lock``."""

    def test_lost_answer_of_setnx_leaves_a_lock_that_nobody_has(self, a: redis.Redis, link: FaultProxy) -> None:
        """
        The value says nothing about who set it, so the one who did cannot tell its own lock from another's.

        A  SETNX lock 1   is done; its answer is lost, and the client sends it again
        A  SETNX lock 1   0: somebody has it, namely A, who does not know
        """
        with program(link.port, retry=Retry(NoBackoff(), 3)) as far:
            far.ping()
            dropped = link.drop_next_reply(match=b"SETNX")

            assert not far.setnx(LOCK, 1)

        assert dropped.wait(PATIENCE)
        assert a.exists(LOCK)
        assert a.ttl(LOCK) == -1, "and it never ends"


class TestNoTtl:
    """A lock that nothing ends but its holder: ``SETNX``, also with an ``EXPIRE`` after it."""

    def test_holder_that_dies_leaves_the_lock_for_ever(self, a: redis.Redis, b: redis.Redis) -> None:
        """
        There is nobody left to delete it, nor to send the EXPIRE that was to come next.

        A  SETNX lock a   1, and dies
        B  SETNX lock b   0, today and in a year
        """
        assert a.setnx(LOCK, "a")
        a.close()

        assert not b.setnx(LOCK, "b")
        assert b.ttl(LOCK) == -1


class TestDeleteWithoutOwner:
    """``SETNX lock 1``, and ``DEL lock`` in the ``finally`` of whoever tried."""

    def test_loser_that_cleans_up_frees_the_winner_s_lock(self, a: redis.Redis, b: redis.Redis, c: redis.Redis) -> None:
        """
        Nothing at the server knows whose lock it is.

        A  SETNX lock 1   1: holds
        B  SETNX lock 1   0: gives up
        B  DEL lock       in its finally
        C  SETNX lock 1   1: holds, and A works on
        """
        assert a.setnx(LOCK, 1)
        try:
            assert not b.setnx(LOCK, 1)
        finally:
            b.delete(LOCK)

        assert c.setnx(LOCK, 1)


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

    def test_clock_that_is_ahead_takes_a_lock_that_is_held(self, a: redis.Redis, b: redis.Redis) -> None:
        """
        The deadline is one client's time of day, compared with another's.

        A  12:00:00 on its clock   SETNX lock 12:00:30: holds
        B  12:00:31 on its clock   GET: it is over. GETSET: holds, and A works on
        """
        noon = 43_200

        assert lock_by_timestamp(a, noon, 30)
        assert lock_by_timestamp(b, noon + 31, 30), "in the same instant"

    def test_loser_of_the_race_overwrites_the_winner_s_deadline(
        self, a: redis.Redis, b: redis.Redis, c: redis.Redis
    ) -> None:
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
        c.set(LOCK, noon - 1)
        assert int(a.get(LOCK) or 0) < noon
        assert int(b.get(LOCK) or 0) < noon
        assert int(a.getset(LOCK, of_a) or 0) < noon  # A holds
        assert int(b.getset(LOCK, of_b) or 0) > noon  # B does not

        if a.get(LOCK) == str(of_a):
            a.delete(LOCK)

        assert not lock_by_timestamp(c, of_a + 1, 30), "A has ended, its deadline is over, and it is still taken"


class TestUncheckedDelete:
    """``SET lock OWNER NX EX 30`` … ``DEL lock``."""

    def test_late_delete_frees_the_next_holder_s_lock(self, a: redis.Redis, b: redis.Redis, c: redis.Redis) -> None:
        """
        The ttl has ended A's lock; DEL does not ask whose it is now.

        A  SET lock a NX EX   holds, and is paused until the ttl is over
        B  SET lock b NX EX   holds
        A  DEL lock           wakes up and deletes B's
        C  SET lock c NX EX   holds, and B works on
        """
        assert a.set(LOCK, "a", nx=True, px=TTL_MS)
        run_out(a, LOCK)
        assert b.set(LOCK, "b", nx=True, px=TTL_MS)

        a.delete(LOCK)

        assert c.set(LOCK, "c", nx=True, px=TTL_MS)

    def test_get_before_delete_leaves_a_gap(self, a: redis.Redis, b: redis.Redis, c: redis.Redis) -> None:
        """
        Two commands again: between them the lock passes on.

        A  GET lock           a: still mine
           the ttl is over
        B  SET lock b NX EX   holds
        A  DEL lock           deletes B's
        C  SET lock c NX EX   holds, and B works on
        """
        assert a.set(LOCK, "a", nx=True, px=TTL_MS)
        assert a.get(LOCK) == "a"
        run_out(a, LOCK)
        assert b.set(LOCK, "b", nx=True, px=TTL_MS)

        a.delete(LOCK)

        assert c.set(LOCK, "c", nx=True, px=TTL_MS)

    def test_paused_holder_overwrites_what_the_next_one_wrote(self, a: redis.Redis, b: redis.Redis) -> None:
        """
        Also with a delete that is checked: nothing tells storage that A's time is over.

        A  SET lock a NX EX   holds, and is paused until the ttl is over
        B  SET lock b NX EX   holds, writes Ben
        A  SET seat Ada       wakes up and writes
        """
        assert a.set(LOCK, "a", nx=True, px=TTL_MS)
        run_out(a, LOCK)
        assert b.set(LOCK, "b", nx=True, px=TTL_MS)
        b.set("seat", "Ben")

        a.set("seat", "Ada")

        assert b.get("seat") == "Ada", "sold twice"


def read(pipe: redis.client.Pipeline) -> int:
    """Read the stock. While it watches, a pipeline sends each command at once."""
    return int(pipe.get(STOCK))  # type: ignore[arg-type]  # of a pipeline that does not watch


def watched(pipe: redis.client.Pipeline) -> int:
    """Watch the stock, and read it."""
    pipe.watch(STOCK)  # type: ignore[no-untyped-call]
    return read(pipe)


class TestWatchMultiExec:
    """``WATCH stock``, ``GET stock``, ``MULTI``, ``SET stock``, ``EXEC``: no lock at all, and often a good choice."""

    def test_what_was_done_elsewhere_is_done_twice(self, a: redis.Redis, b: redis.Redis) -> None:
        """
        Only Redis forgets the attempt that lost: a parcel is on its way.

        A  WATCH, GET   1 is left: sends the parcel
        B  WATCH, GET   1 is left: sends the parcel
        A  EXEC         0 is left
        B  EXEC         nil: too late, but the parcel has been sent
        """
        a.set(STOCK, 1)
        sent = []
        with a.pipeline() as first, b.pipeline() as second:
            for name, pipe in (("A", first), ("B", second)):
                assert watched(pipe) == 1
                sent.append(name)
                pipe.multi()
                pipe.set(STOCK, 0)
            first.execute()
            with pytest.raises(redis.WatchError):
                second.execute()

        assert sent == ["A", "B"], "two parcels"
        assert a.get(STOCK) == "0", "of one"

    def test_slow_one_never_gets_its_turn(self, a: redis.Redis, b: redis.Redis) -> None:
        """
        Whoever is quicker wins, so who takes longer may lose for ever.

        A  WATCH, GET   thinks
        B  DECR         takes no time
        A  EXEC         nil, and again from the start
        """
        a.set(STOCK, 1000)
        tries, changes = 50, 0
        for _ in range(tries):
            with a.pipeline() as pipe:
                left = watched(pipe)
                b.decr(STOCK)
                pipe.multi()
                pipe.set(STOCK, left - 1)
                try:
                    pipe.execute()
                    changes += 1
                except redis.WatchError:
                    continue

        assert changes == 0

    def test_lost_answer_of_exec_makes_the_change_twice(self, a: redis.Redis, link: FaultProxy) -> None:
        """
        redis-py's ``transaction()`` takes a lost answer for a collision, and begins again.

        A  EXEC        is done, 9 are left; the answer is lost
        A  WATCH, GET  9
        A  EXEC        8 are left, and one was sold
        """
        a.set(STOCK, 10)

        def sell(pipe: redis.client.Pipeline) -> None:
            left = read(pipe)
            pipe.multi()
            pipe.set(STOCK, left - 1)

        with program(link.port) as far:
            far.ping()
            dropped = link.drop_next_reply(match=b"EXEC")
            far.transaction(sell, STOCK)

        assert dropped.wait(PATIENCE)
        assert a.get(STOCK) == "8"
