"""Read/write locks on etcd: keys, order, foreign clients, downgrades, updates, and readers that die."""

from __future__ import annotations

from math import inf
from typing import cast

import pytest

from lockkit.backends.etcd import keys
from lockkit.backends.etcd.backend import EtcdBackend
from lockkit.backends.etcd.cluster import TXN
from lockkit.backends.etcd.keys import Contender
from lockkit.engine import semaphore
from lockkit.runtime import drive
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import EtcdServer
from tests.backends.etcd.support import (
    WAITING_SECONDS,
    begin,
    calls_of,
    etcdctl_runs,
    leases_of,
    queue_of,
    session_of,
    until_waiting,
    value_of,
)
from tests.backends.support import Connect
from tests.tries import busy, tried

LONG = 120.0


class TestOrder:
    """Who waits for whom."""

    def test_keys_of_readers(self, server: EtcdServer, connect: Connect) -> None:
        """``r``, the etcd lease, a dash, the owner; listed as a lock; all readers of a client share an etcd lease."""
        client = connect(prefix="app")
        before = leases_of(server)
        lock = client.rwlock("a/b", ttl=LONG)
        with lock.read().acquire(PATIENCE) as first:
            second = begin(lock.read()).result(WAITING_SECONDS)
            keys = queue_of(server, "app/a%2Fb/")

            assert keys == [f"app/a%2Fb/r{session_of(server, keys[0]):x}-{one.owner}" for one in (first, second)]
            assert len(leases_of(server) - before) == 1
            assert list(client.names()) == ["a/b"]
            assert second.token > first.token
            second.release()
        assert queue_of(server, "app/") == []

    def test_etcdctl_waits_for_readers_and_readers_for_etcdctl(self, server: EtcdServer, connect: Connect) -> None:
        """One queue, in order of arrival: two readers, etcdctl, a reader."""
        client, other, third = connect(), connect(), connect()
        readers = [one.rwlock("shared", ttl=LONG).read().acquire(PATIENCE) for one in (client, other)]
        with etcdctl_runs(server, "lock", "lockkit/shared") as theirs:
            until_waiting(client, "shared", 1)
            assert busy(third.rwlock("shared", ttl=LONG).read())
            late = begin(third.rwlock("shared", ttl=LONG).read())
            until_waiting(client, "shared", 2)

            readers[1].release()
            until_waiting(client, "shared", 2)
            readers[0].release()
            key = theirs.stdout.readline().strip()
            (holder,) = client.holders("shared")
            assert (holder.owner, holder.mode, holder.waiters) == (key.rpartition("/")[2], "exclusive", 1)
            assert not late.done()
            theirs.terminate()

            lease = late.result(WAITING_SECONDS)
            assert holder.token is not None
            assert lease.token > readers[1].token
            lease.release()


class TestRequests:
    """What it costs at the server."""

    def test_readers_and_permits_cost_what_a_lock_costs(
        self, server: EtcdServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One call to acquire, one to release; and a lock costs no more than it did before there were readers."""
        monkeypatch.setattr(semaphore, "LOOK_SECONDS", 600.0)
        client = connect()
        client._engine.caps._compared_at = inf  # the look for other limits, once a second at most
        locks = {
            "lock": client.lock("cost", ttl=LONG),
            "read": client.rwlock("cost", ttl=LONG).read(),
            "permit": client.semaphore("cost", limit=3, ttl=LONG),
        }
        with client.lock("the session is open", ttl=LONG), client.semaphore("caps are known", limit=1, ttl=LONG):
            pass
        for what, lock in locks.items():
            before = calls_of(server)
            lease = lock.acquire(PATIENCE)
            assert calls_of(server) - before == 1, what
            lease.release()
            assert calls_of(server) - before == 2, what


class TestDowngrade:
    """The key stays; its value says that it reads only."""

    def test_keeps_key_token_and_place(self, server: EtcdServer, connect: Connect) -> None:
        """Readers at the head go in, those behind the waiting writer wait on, and so does ``etcdctl lock``."""
        client, *others = [connect() for _ in range(4)]
        lease = client.rwlock("down", ttl=LONG).write().acquire(PATIENCE)
        beside = begin(others[0].rwlock("down", ttl=LONG).read())
        until_waiting(client, "down", 1)
        with etcdctl_runs(server, "lock", "lockkit/down") as theirs:
            until_waiting(client, "down", 2)
            behind = begin(others[1].rwlock("down", ttl=LONG).read())
            until_waiting(client, "down", 3)
            key, token = queue_of(server, "lockkit/down/")[0], lease.token

            lease.downgrade()

            reader = beside.result(WAITING_SECONDS)
            assert queue_of(server, "lockkit/down/")[0] == key
            assert lease.token == token
            assert [(one.mode, one.waiters) for one in client.holders("down")] == [("shared", 2)] * 2
            assert busy(others[2].rwlock("down", ttl=LONG).read())
            lease.extend(LONG + 1)
            lease.update({"step": 2})
            assert {one.owner: one.metadata.get("step") for one in client.holders("down")}[lease.owner] == 2
            lease.release()
            reader.release()
            assert theirs.stdout.readline().startswith("lockkit/down/")
            assert not behind.done()
        behind.result(WAITING_SECONDS).release()

    def test_single_tries_beside_a_downgraded_lease(self, connect: Connect) -> None:
        """A reader goes in at once, a writer does not."""
        client, other = connect(), connect()
        lease = client.rwlock("beside", ttl=LONG).write().acquire(PATIENCE)
        lease.downgrade()

        assert busy(other.lock("beside", ttl=LONG))
        reader = tried(other.rwlock("beside", ttl=LONG).read())

        assert reader is not None
        lease.release()
        assert busy(client.lock("beside", ttl=LONG))
        reader.release()
        client.lock("beside", ttl=LONG).acquire(PATIENCE).release()


class TestUpdate:
    """The metadata of a held lock."""

    def test_late_update_changes_nothing(self, server: EtcdServer, connect: Connect) -> None:
        """Sent before a downgrade, and executed after it: the lease would hold for writing again."""
        client = connect()
        lease = client.lock("late update", ttl=LONG).acquire(PATIENCE)
        (key,) = queue_of(server, "lockkit/late update/")
        backend = cast("EtcdBackend", client._engine.client.ready())
        contender = cast("Contender", lease._record.grant.state)
        lease_id = session_of(server, key)
        late = keys.change_key(contender.key, contender.mod_revision, b"late", lease_id)
        lease.downgrade()

        answer = drive(backend.cluster.call(TXN, late, resend=False))

        assert not answer.succeeded
        assert value_of(server, key).startswith(b"\0shared ")
        lease.release()
