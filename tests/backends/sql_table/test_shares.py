"""Readers and permits in the lock table: what is in the row, who else may write to it, and what it costs."""

from __future__ import annotations

import json
from typing import Any

import pytest

import lockkit
from lockkit.backend import Gone, Grant, Renewed, apart
from lockkit.backends.sql_table import backend as sql_table
from lockkit.backends.sql_table.backend import SqlTableBackend
from lockkit.backends.sql_table.statements import SHARED
from lockkit.errors import BackendUnavailable
from lockkit.runtime import drive
from lockkit.sync import Client, Lease
from lockkit_tools.servers import wait_until
from tests.backends.sql_table.support import Look, counted, now_us, waits
from tests.backends.support import Connect
from tests.tries import beside, busy, tried

PATIENCE = 60.0
LONG = 600.0


def backend_of(client: Client) -> SqlTableBackend:
    """Give the backend of a client."""
    return client._engine.client.ready()  # type: ignore[return-value]


def stored(look: Look) -> dict[str, Any]:
    """Give the shares of the only row."""
    ((shares,),) = look.run("SELECT shares FROM lockkit_locks")
    return shares if isinstance(shares, dict) else json.loads(shares or "{}")


def read(client: Client, ttl: float = LONG) -> Lease:
    """Read-lock ``x``, in a thread of its own: in one thread a read inside a read is the same lease."""
    return beside(client.rwlock("x", ttl=ttl).read().acquire, PATIENCE).result(PATIENCE)


def try_read(client: Client) -> Lease | None:
    """Try the same once."""
    return beside(tried, client.rwlock("x", ttl=LONG).read()).result(2 * PATIENCE)


class TestRow:
    """The columns that are a contract hold for readers, too."""

    def test_readers_hold_the_row_to_the_end_of_the_latest(self, url: str, connect: Connect) -> None:
        """So a foreign writer that knows nothing of readers waits for them; the last one frees it."""
        client, look = connect(url), Look(url)

        first, second = read(client, ttl=100), read(client, ttl=300)
        owner, token, until = look.row("x")
        assert (owner, token) == (SHARED, second.token)
        assert abs(until - now_us() - 300e6) < 60e6
        assert stored(look).keys() == {first.owner, second.owner}

        second.release()
        owner, _, until = look.row("x")
        assert owner == SHARED
        assert abs(until - now_us() - 100e6) < 60e6  # lowered: a writer waits for the first one only

        first.release()
        assert look.row("x") == (None, second.token, 0)
        assert stored(look) == {}

    def test_read_and_permit_are_three_statements_each(
        self, url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The row is read, written, and freed; beside others it is read for the release, too."""
        client, other = connect(url), connect(url)

        def pass_through() -> list[str]:
            with counted(monkeypatch) as statements:
                read(client).release()
                client.semaphore("x", limit=3, ttl=LONG).acquire(PATIENCE).release()
            return statements

        pass_through()
        assert len(pass_through()) == 6
        held, permit = read(other), other.semaphore("x", limit=3, ttl=LONG).acquire(PATIENCE)
        assert len(pass_through()) == 8
        assert client.semaphore("x", limit=3).available() == 2
        assert [holder.owner for holder in client.holders("x")] == [held.owner]
        held.release()
        permit.release()

    def test_metadata_of_readers(self, url: str, connect: Connect) -> None:
        """Each has its own, whatever is in it, before and after an update or a downgrade."""
        client = connect(url)
        odd = {"text": 'é "quoted" \\ % $1 \x00 {}', "null": None}
        first = beside(client.rwlock("x", ttl=LONG, metadata=odd).read().acquire, PATIENCE).result(PATIENCE)
        second = read(client)
        assert {holder.owner: holder.metadata.get("text") for holder in client.holders("x")} == {
            first.owner: odd["text"], second.owner: None,
        }  # fmt: skip
        for _ in range(2):
            second.update({"text": "new"})
        assert {holder.metadata.get("text") for holder in client.holders("x")} == {odd["text"], "new"}
        first.release()
        second.release()

        written = client.rwlock("y", ttl=LONG, metadata=odd).write().acquire(PATIENCE)
        written.downgrade()
        (holder,) = client.holders("y")
        assert (holder.mode, holder.token, holder.metadata["text"]) == ("shared", written.token, odd["text"])
        assert abs((holder.remaining or 0) - LONG) < 60
        written.update({"text": "later"})
        written.release()
        assert client.holders("y") == []


class TestLeases:
    """Renewal, loss and what had no answer."""

    def test_renewals_in_batches(self, url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
        """Readers and permits of several names together with locks; each is told of its own."""
        client = connect(url)
        backend = backend_of(client)
        leases = [read(client) for _ in range(3)]
        leases += [client.rwlock(f"y{index}", ttl=LONG).read().acquire(PATIENCE) for index in range(2)]
        alone = client.lock("z", ttl=LONG).acquire(PATIENCE)
        lost = read(client)
        lost_grant = lost._record.grant
        lost.release()
        grants = [lease._record.grant for lease in [*leases, alone]]

        with counted(monkeypatch) as statements:
            outcomes = drive(backend.renew([*grants, lost_grant]))

        assert outcomes == [Renewed()] * 6 + [Gone("gone")]
        assert len(statements) == 3
        for lease in [*leases, alone]:
            lease.release()

    def test_renewal_writes_again_only_what_others_have_changed(
        self, url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or many busy rows in one batch would hold it up."""
        client, other = connect(url), connect(url)
        backend, written = backend_of(client), list[list[str]]()
        leases = [client.rwlock(name, ttl=LONG).read().acquire(PATIENCE) for name in "xyz"]
        write = backend._write

        async def write_second(rows: Any, **how: Any) -> bool:  # noqa: ANN401 - as `_write`
            written.append([row.key for row in rows])
            if len(written) == 1:
                read(other).release()
            return await write(rows, **how)

        monkeypatch.setattr(backend, "_write", write_second)
        assert drive(backend.renew([lease._record.grant for lease in leases])) == [Renewed()] * 3
        assert written == [["x", "y", "z"], ["x"]]
        for lease in leases:
            lease.release()

    def test_renewal_moves_its_own_end_only(self, url: str, connect: Connect) -> None:
        """And the row's."""
        client, look = connect(url), Look(url)
        first, second = read(client, ttl=100), read(client, ttl=200)
        before = stored(look)

        first.extend()

        after = stored(look)
        assert after[first.owner]["e"] > before[first.owner]["e"]
        assert after[second.owner] == before[second.owner]
        assert look.row("x")[2] == max(share["e"] for share in after.values())
        first.release()
        second.release()

    def test_expired_permit_is_not_renewed_once_it_was_given_away(self, url: str, connect: Connect) -> None:
        """Not even by a clock reading from before its end: it is gone from the row."""
        client, look = connect(url), Look(url)
        short = client.semaphore("s", limit=1, ttl=0.2, renew=False).acquire(PATIENCE)
        again = client.semaphore("s", limit=1, ttl=LONG).acquire(PATIENCE)

        assert stored(look).keys() == {again.owner}
        assert drive(backend_of(client).renew([short._record.grant])) == [Gone("gone")]
        again.release()

    def test_broken_and_taken_are_told_apart(self, url: str, connect: Connect) -> None:
        """Why a reader lost its lease."""
        client = connect(url)
        backend = backend_of(client)
        lease = read(client)
        assert drive(backend.confirm(lease._record.grant)) is None
        assert client.break_lock("x")
        assert drive(backend.confirm(lease._record.grant)) == Gone("broken")
        assert drive(backend.renew([lease._record.grant])) == [Gone("broken")]
        with client.lock("x", timeout=PATIENCE):
            assert drive(backend.renew([lease._record.grant])) != [Renewed()]
            assert not drive(backend.release(lease._record.grant))
        assert not client.break_lock("x")
        assert not lease.confirm()

    def test_downgrade_that_did_not_arrive(self, url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
        """The lease goes on and is renewed; called again, it is what the call says."""
        client = connect(url)
        lease = client.lock("x", ttl=LONG).acquire(PATIENCE)

        async def lose_request(*_: Any, **__: Any) -> None:
            raise BackendUnavailable

        with monkeypatch.context() as patch:
            patch.setattr(backend_of(client), "_change_one", lose_request)
            with pytest.raises(lockkit.BackendUnavailable):
                lease.downgrade()

        assert lease.confirm()
        lease.extend()
        lease.update({"still": "here"})
        (holder,) = client.holders("x")
        assert (holder.mode, holder.metadata["still"]) == ("exclusive", "here")
        lease.downgrade()
        assert [holder.mode for holder in client.holders("x")] == ["shared"]
        lease.release()
        assert client.holders("x") == []

    @pytest.mark.parametrize("mode", ["shared", "permit"])
    def test_lost_answer_is_undone_or_repeated(self, url: str, connect: Connect, mode: Any) -> None:  # noqa: ANN401 - a mode
        """The same owner asks again: one share, a new token. Given up: none."""
        client, look = connect(url), Look(url)
        backend = backend_of(client)
        name = "x" if mode == "shared" else apart("sem", "x")
        runtime = backend._runtime
        request = lockkit.backend.Request(name, "a" * 32, LONG, "{}", queue=True, runtime=runtime, mode=mode, limit=1)

        first, second = drive(backend.try_acquire(request)), drive(backend.try_acquire(request))

        assert isinstance(first, Grant)
        assert isinstance(second, Grant)
        assert second.token > first.token
        assert first.slot == second.slot == (None if mode == "shared" else 0)
        assert stored(look).keys() == {"a" * 32}
        request.uncertain = True
        drive(backend.abandon(request))
        drive(backend.abandon(request))
        assert stored(look) == {}

    def test_client_that_closes_releases_all_together(
        self, url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One statement for each batch of locks, two for the others."""
        monkeypatch.setattr(sql_table, "BATCH", 2)
        client, look = connect(url), Look(url)
        leases = [read(client) for _ in range(3)]
        leases += [client.semaphore("x", limit=2, ttl=LONG).acquire(PATIENCE)]
        leases += [client.lock(f"z{number}", ttl=LONG).acquire(PATIENCE) for number in range(3)]

        with counted(monkeypatch) as statements:
            client.close()

        assert not any(lease.held for lease in leases)
        assert len(statements) == 4
        assert look.run("SELECT COUNT(*) FROM lockkit_locks WHERE owner IS NOT NULL") == [(0,)]


def test_mark_ends_with_the_wait(url: str, connect: Connect) -> None:
    """Given up: readers get in at once. Granted: they get in after it."""
    client, writer = connect(url), connect(url)
    held = read(client)
    assert busy(writer.lock("x", ttl=LONG), 0.2)
    lease = try_read(client)
    assert lease is not None
    lease.release()

    waiting = beside(writer.lock("x", ttl=LONG).acquire, PATIENCE)
    wait_until(lambda: None if waits(writer, "x") else "nobody waits")
    assert try_read(client) is None
    held.release()
    waiting.result(PATIENCE).release()
    lease = try_read(client)
    assert lease is not None
    lease.release()


def test_mark_of_a_dead_writer_ends_by_the_server_s_clock(url: str, connect: Connect) -> None:
    """It stops readers for a few seconds, not for ever; its owner does not matter then."""
    client, look = connect(url), Look(url)
    held = read(client)
    for until_us, granted in ((now_us() + 60_000_000, False), (now_us() - 1_000_000, True)):
        look.run("UPDATE lockkit_locks SET writer = 'dead', writer_until_us = :until", until=until_us)
        lease = try_read(client)
        assert (lease is not None) is granted
        if lease is not None:
            lease.release()
    held.release()


def test_waiting_readers_of_one_client_are_all_woken(postgresql_url: str, connect: Connect) -> None:
    """By one notification on one connection; else each would wait for the ttl of the writer."""
    client, writer = connect(postgresql_url), connect(postgresql_url)
    written = writer.lock("x", ttl=LONG).acquire(PATIENCE)
    reading = [beside(read, client) for _ in range(5)]
    wait_until(lambda: None if client._engine.acquisitions.waiting_count("x") == 5 else "not all wait")
    written.release()
    for call in reading:
        call.result(PATIENCE).release()


def test_waiter_for_a_permit_is_woken(postgresql_url: str, connect: Connect) -> None:
    """By the release of one of several; else it would wait for the ttl of all of them."""
    holder, other = connect(postgresql_url), connect(postgresql_url)
    permits = [holder.semaphore("x", limit=2, ttl=LONG).acquire(PATIENCE) for _ in range(2)]
    waiting = beside(other.semaphore("x", limit=2, ttl=LONG).acquire, PATIENCE)
    wait_until(lambda: None if other._engine.acquisitions.waiting else "nobody waits")
    wait_until(lambda: None if Look(postgresql_url).run("SELECT 1 FROM lockkit_locks WHERE wanted") else "not wanted")
    permits.pop().release()
    waiting.result(PATIENCE / 2).release()
    permits.pop().release()
