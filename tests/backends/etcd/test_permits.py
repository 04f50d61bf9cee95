"""Permits of semaphores on etcd: keys, slots, order, cost, and lost answers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

import lockkit
from lockkit.backends.etcd import permits
from lockkit.backends.etcd.permits import FIRST_SLOTS
from lockkit.backends.lock_state import lowest_free
from lockkit.sync import Lease
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import EtcdServer, FaultProxy, http2_call_ended, wait_until
from tests.backends.etcd.support import (
    WAITING_SECONDS,
    begin,
    queue_of,
    settled_calls_of,
)
from tests.backends.support import Connect
from tests.tries import busy, tried

TTL = 3.0
LONG = 120.0


def keys_of(server: EtcdServer, name: str) -> list[str]:
    """List the last parts of a semaphore's keys, as they were created."""
    return [key.rpartition("/")[2] for key in queue_of(server, f"lockkit+sem/{name}/")]


def until_queued(server: EtcdServer, name: str, count: int) -> None:
    """Return once so many wait for a permit."""
    wait_until(lambda: None if sum(key[0] == "q" for key in keys_of(server, name)) == count else f"not {count} waiters")


class TestPermits:
    """Who gets which one."""

    def test_keys_are_slots(self, server: EtcdServer, connect: Connect) -> None:
        """Each permit is one key, attached to the session; the token is its create_revision, and increases."""
        clients = [connect() for _ in range(3)]
        permits = [one.semaphore("keys", limit=3, ttl=LONG).acquire(PATIENCE) for one in clients]

        assert keys_of(server, "keys") == ["s0000", "s0001", "s0002"]
        assert [permit.slot for permit in permits] == [0, 1, 2]
        permits[1].update({"step": 1})
        permits[1].extend(LONG + 1)
        with connect().semaphore("keys", limit=4, ttl=LONG).acquire(PATIENCE) as more:
            tokens = [permit.token for permit in (*permits, more)]
            assert tokens == sorted(set(tokens))
        permits[0].release()
        again = clients[0].semaphore("keys", limit=3, ttl=LONG).acquire(PATIENCE)
        assert again.slot == 0
        assert again.token > more.token
        for permit in (again, *permits[1:]):
            assert permit.confirm()
            permit.release()
        assert keys_of(server, "keys") == []

    def test_slots_above_the_own_limit_count(self, server: EtcdServer, connect: Connect) -> None:
        """A free slot is not enough."""
        client, other = connect(), connect()
        permits = [client.semaphore("above", limit=3, ttl=LONG).acquire(PATIENCE) for _ in range(3)]
        for permit in permits[:2]:
            permit.release()
        assert keys_of(server, "above") == ["s0002"]

        assert busy(other.semaphore("above", limit=1, ttl=LONG))
        with pytest.raises(lockkit.LockTimeout):
            other.semaphore("above", limit=1, ttl=LONG).acquire(0.1)

        with other.semaphore("above", limit=2, ttl=LONG).acquire(PATIENCE) as second:
            assert second.slot == 0
            assert busy(other.semaphore("above", limit=2, ttl=LONG))
        permits[2].release()

    def test_more_slots_than_the_first_transaction_tries(self, server: EtcdServer, connect: Connect) -> None:
        """With a place in the queue and by a single try."""
        client, other = connect(), connect()
        lock = client.semaphore("many", limit=FIRST_SLOTS + 3, ttl=LONG)
        held = [lock.acquire(PATIENCE) for _ in range(FIRST_SLOTS + 1)]
        single = tried(lock)
        assert single is not None
        held.append(single)
        held.append(lock.acquire(PATIENCE))

        assert [permit.slot for permit in held] == list(range(FIRST_SLOTS + 3))
        assert busy(other.semaphore("many", limit=FIRST_SLOTS + 3, ttl=LONG))
        held.pop(2).release()
        again = other.semaphore("many", limit=FIRST_SLOTS + 3, ttl=LONG).acquire(PATIENCE)
        assert again.slot == 2
        for permit in (again, *held):
            permit.release()
        assert keys_of(server, "many") == []

    def test_slot_that_was_taken_meanwhile(
        self, server: EtcdServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """
        One client looks, and sees slot 9 free. Others take 9 and 10, and release 9: too many are held by then.

        A comparison of the key of slot 9 alone would not notice.
        """
        client, other = connect(), connect()
        held = [other.semaphore("aba", limit=12, ttl=LONG).acquire(PATIENCE) for _ in range(9)]
        meanwhile: list[Lease] = []

        def slow(taken: Iterable[int | None]) -> int:
            slot = lowest_free(taken)
            if not meanwhile:
                meanwhile.append(other.semaphore("other", limit=1, ttl=LONG).acquire(PATIENCE))
                released, kept = [other.semaphore("aba", limit=12, ttl=LONG).acquire(PATIENCE) for _ in range(2)]
                assert (slot, released.slot, kept.slot) == (9, 9, 10)
                meanwhile.append(kept)
                released.release()
            return slot

        monkeypatch.setattr("lockkit.backends.etcd.permits.lowest_free", slow)

        assert busy(client.semaphore("aba", limit=10, ttl=LONG))

        assert len(keys_of(server, "aba")) == 10
        for permit in (*held, *meanwhile):
            permit.release()


@pytest.mark.parametrize("kind", ["lock", "permit"])
def test_release_wakes_one_waiter(server: EtcdServer, connect: Connect, kind: str) -> None:
    """No herd: the cost of a release at the server does not depend on the number of waiters."""

    def contender() -> lockkit.Lock | lockkit.Semaphore:
        client = connect()
        return client.lock("herd", ttl=LONG) if kind == "lock" else client.semaphore("herd", limit=2, ttl=LONG)

    held = [contender().acquire(PATIENCE) for _ in range(1 if kind == "lock" else 2)]
    prefix, waiting = "lockkit/herd/" if kind == "lock" else "lockkit+sem/herd/", []
    for number in range(8):
        waiting.append(begin(contender()))
        count = len(held) + number + 1
        wait_until(lambda count=count: None if len(queue_of(server, prefix)) == count else "not in the queue")  # type: ignore[misc]
    before = settled_calls_of(server)

    held.pop(0).release()

    waiting[0].result(WAITING_SECONDS)
    # The release; the first waiter looks, and takes the slot; the next one looks, watches the holders, looks again.
    assert settled_calls_of(server) - before <= (3 if kind == "lock" else 7)
    for lease in held:
        lease.release()
    for one in waiting:
        one.result(WAITING_SECONDS).release()


class TestLostAnswers:
    """The member executed the request, and its answer was lost."""

    def test_first_permit(self, server: EtcdServer, proxy: FaultProxy, connect: Connect) -> None:
        """What was granted is undone beside a lock that stays, and another permit acquired: one key is left."""
        client = connect(f"etcd://{proxy.address}")
        kept = client.lock("kept", ttl=TTL).acquire(PATIENCE)
        client.semaphore("lost", limit=2, ttl=TTL).acquire(PATIENCE).release()
        dropped = proxy.drop_next_reply(match=b"lockkit+sem/lost/s0000", until=http2_call_ended)

        permit = client.semaphore("lost", limit=2, ttl=TTL).acquire(PATIENCE)

        assert dropped.wait(PATIENCE)
        assert keys_of(server, "lost") == [f"s{permit.slot:04d}"]
        assert client.semaphore("lost", limit=2).available() == 1
        assert kept.confirm()
        permit.release()
        assert keys_of(server, "lost") == []
        kept.release()

    @pytest.fixture(params=[FIRST_SLOTS, 1])
    def first_slots(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """With one, the second permit takes a second transaction."""
        monkeypatch.setattr(permits, "FIRST_SLOTS", request.param)

    @pytest.mark.usefixtures("first_slots")
    @pytest.mark.parametrize("timeout", [PATIENCE, 0])
    def test_further_permit(self, server: EtcdServer, proxy: FaultProxy, connect: Connect, timeout: float) -> None:
        """With a place in the queue the same request is sent again; a single try may fail, and leaves nothing."""
        client, other = connect(f"etcd://{proxy.address}"), connect()
        first = other.semaphore("further", limit=2, ttl=LONG).acquire(PATIENCE)
        client.semaphore("further", limit=2, ttl=TTL).acquire(PATIENCE).release()
        dropped = proxy.drop_next_reply(match=b"lockkit+sem/further/s0001", until=http2_call_ended)

        try:
            permit = client.semaphore("further", limit=2, ttl=TTL).acquire(timeout)
        except lockkit.BackendUnavailable:
            assert timeout == 0
        else:
            assert permit.slot == 1
            assert keys_of(server, "further") == ["s0000", "s0001"]
            permit.release()

        assert dropped.wait(PATIENCE)
        wait_until(lambda: None if keys_of(server, "further") == ["s0000"] else "more permits than one")
        first.release()

    def test_permit_of_a_waiter(self, server: EtcdServer, proxy: FaultProxy, connect: Connect) -> None:
        """The same request is sent again, finds the permit of the first one, and no other waits behind that."""
        held = connect().semaphore("taken", limit=1, ttl=LONG).acquire(PATIENCE)
        waiting = begin(connect(f"etcd://{proxy.address}").semaphore("taken", limit=1, ttl=LONG))
        until_queued(server, "taken", 1)
        dropped = proxy.drop_next_reply(match=b"lockkit+sem/taken/s0000", until=http2_call_ended)

        held.release()

        permit = waiting.result(WAITING_SECONDS)
        assert dropped.wait(PATIENCE)
        assert keys_of(server, "taken") == ["s0000"]
        assert permit.confirm()
        permit.release()
        assert keys_of(server, "taken") == []
