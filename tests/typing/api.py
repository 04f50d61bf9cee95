"""
The public API as a user's program has it. Only type-checked, never run.

`assert_type` fails when a type changes; each ``type: ignore`` fails when the mistake below it is no longer noticed.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import assert_type

import lockkit


def lease(client: lockkit.Client) -> None:
    """What a lease offers."""
    with client.lock("seat:12A", ttl=30, timeout=timedelta(seconds=5)) as held:
        assert_type(held, lockkit.Lease)
        assert_type(held.token, int)
        assert_type(held.owner, str)
        assert_type(held.ttl, float)
        assert_type(held.remaining(), float)
        assert_type(held.held, bool)
        assert_type(held.lost, bool)
        assert_type(held.confirm(), bool)
        assert_type(held.wait_lost(timeout=1), bool)
        held.check()
        held.extend()
        held.extend(ttl=timedelta(minutes=1))
        held.on_lost(lambda lost, reason: (lost.token, reason.upper()))
        held.release()


def wait(client: lockkit.Client) -> None:
    """`acquire` gives a lease or raises; `try_acquire` may give None, which must be looked at."""
    lock = client.lock("seat:12A")
    assert_type(lock, lockkit.Lock)
    assert_type(lock.acquire(), lockkit.Lease)
    assert_type(lock.acquire(timeout=None), lockkit.Lease)
    assert_type(lock.try_acquire(), lockkit.Lease | None)
    assert_type(lock.locked(), bool)
    lock.try_acquire().release()  # type: ignore[union-attr]
    threading_lock = lock.as_threading_lock()
    assert_type(threading_lock.acquire(blocking=True, timeout=-1), bool)


def several(client: lockkit.Client, other: lockkit.Client) -> None:
    """A set of locks gives a set of leases."""
    with client.locks(["a", "b"], ttl=30, timeout=timedelta(seconds=5)) as leases:
        assert_type(leases, lockkit.LeaseSet)
        assert_type(leases["a"], lockkit.Lease)
        assert_type(leases.tokens["a"], int)
        assert_type([lease.name for lease in leases], list[str])
        assert_type(leases.confirm(), bool)
    across = lockkit.locks([client.lock("a"), other.lock("a")], timeout=5)
    assert_type(across, lockkit.LockSet)
    assert_type(across.acquire(), lockkit.LeaseSet)
    assert_type(across.try_acquire(), lockkit.LeaseSet | None)


def share(client: lockkit.Client) -> None:
    """Readers and permits have leases as any lock."""
    rwlock = client.rwlock("a", ttl=30)
    assert_type(rwlock, lockkit.RWLock)
    with rwlock.read() as reader, rwlock.write() as writer:
        assert_type(reader, lockkit.Lease)
        writer.downgrade()
    semaphore = client.semaphore("a", limit=5, timeout=5)
    with semaphore as permit:
        assert_type(permit.slot, int | None)
    assert_type(semaphore.try_acquire(), lockkit.Lease | None)
    assert_type(semaphore.available(), int)
    assert_type(semaphore.cap(), int | None)
    client.semaphore("a")  # type: ignore[call-arg]


def work_once(client: lockkit.Client) -> None:
    """The decorator keeps the signature; a result may be any JSON."""

    @client.once("charge:{order}", keep=timedelta(days=1), match="{amount}", store_errors=KeyError)
    def charge(order: int, amount: int) -> dict[str, int]:
        return {"order": order, "amount": amount}

    assert_type(charge(1, amount=2), dict[str, int])
    charge("1", 2)  # type: ignore[arg-type]
    client.once("charge:1")  # type: ignore[call-arg]
    with client.once("charge:1", keep=60) as attempt:
        assert_type(attempt.first, bool)
        assert_type(attempt.key, str)
        attempt.done({"id": 1})


def decorate(client: lockkit.Client) -> None:
    """The decorator keeps the signature."""

    @client.lock("stock:{product_id}", ttl=10)
    def sell(product_id: int, *, amount: int = 1) -> str:
        return f"{product_id} {amount}"

    assert_type(sell(1, amount=2), str)
    sell("tea")  # type: ignore[arg-type]
    sell(1, price=2)  # type: ignore[call-arg]

    @client.lock("report:{day}", on_busy="skip", ttl=10)
    def report(day: str) -> int:
        return len(day)

    assert_type(report("monday"), int | None)
    report(1)  # type: ignore[arg-type]
    assert_type(client.lock("a", on_busy="raise"), lockkit.Lock)

    @client.lock("report:{day}", on_busy="skip")
    async def report_later(day: str) -> int:
        return len(day)

    async def wait() -> None:
        assert_type(await report_later("monday"), int | None)


def ask(client: lockkit.Client) -> None:
    """What can be asked of a client."""
    assert_type(client.holders("a"), list[lockkit.Holder])
    assert_type(list(client.names("a")), list[str])
    assert_type(client.break_lock("a"), bool)
    assert_type(client.capabilities, lockkit.Capabilities)
    client.ping()
    client.close()


def connect() -> None:
    """How a client is made, and what is refused."""
    with lockkit.connect("redis://localhost", ttl=20) as client:
        assert_type(client, lockkit.Client)
    assert_type(lockkit.connect(), lockkit.Client)
    assert_type(lockkit.connect(profile="prod"), lockkit.Client)
    lockkit.connect(1)  # type: ignore[arg-type]
    with lockkit.connect() as client:
        client.lock(b"bytes")  # type: ignore[call-overload]
        client.lock("a", 30)  # type: ignore[call-overload]
        client.lock("a", ttl="30")  # type: ignore[call-overload]
        client.lock("a", cancel_on_lost=True)  # type: ignore[call-overload]
        client.lock("a", blocking=False)  # type: ignore[call-overload]
        client.lock("a").acquire(blocking=False)  # type: ignore[call-arg]
        client.lock("a", on_busy="wait")  # type: ignore[call-overload]
    with client.lock("a").attempt(timeout=1) as lease:
        assert_type(lease, lockkit.Lease | None)


def catch(client: lockkit.Client) -> str | None:
    """Errors by lockkit's names and by the built-in ones."""
    try:
        client.lock("a", timeout=0).acquire()
    except lockkit.LockTimeout as error:
        assert_type(error.name, str | None)
        return error.backend
    except (lockkit.BackendUnavailable, lockkit.LockLost, lockkit.StaleToken, lockkit.Unsupported):
        return None
    except ValueError:
        return None
    return None


def elect(client: lockkit.Client, stop: threading.Event) -> str | None:
    """A campaign gives a term, which is a lease."""
    election = client.election("a", ttl=10, grace=timedelta(seconds=2), value="10.0.0.7:80")
    assert_type(election.leader(), lockkit.Leader | None)
    for leader in election.observe():
        assert_type(leader, lockkit.Leader | None)

    def work(term: lockkit.Term) -> str:
        lease: lockkit.Lease = term
        return lease.name

    assert_type(election.run(work, stop), str | None)
    with election.campaign(timeout=5) as term:
        assert_type(term, lockkit.Term)
        assert_type(term.must_stop(1.0), bool)
        term.resign()
        return "led"
