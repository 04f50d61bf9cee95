from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from lockkit import expiry
from lockkit.backend import Busy, Gone, Renewed, Request, Unknown
from lockkit.backends.object_store import backend as module
from lockkit.backends.object_store.backend import ObjectBackend
from lockkit.backends.object_store.record import Version
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.runtime import drive
from lockkit.testing.stopwatch import Stopwatch
from tests.backends.object_store.conftest import Client
from tests.backends.support import granted

Make = Callable[[], Client]


def lose_answers(monkeypatch: pytest.MonkeyPatch, backend: ObjectBackend) -> list[tuple[str, bytes, Version | None]]:
    """Have the next write reach the store, and its answer be lost; return the writes."""
    write, sent = backend._store.write, []

    async def lose(name: str, content: bytes, expected: Version | None) -> Version | None:
        monkeypatch.setattr(backend._store, "write", write)
        sent.append((name, content, expected))
        await write(name, content, expected)
        raise BackendUnavailable("the answer was lost")

    monkeypatch.setattr(backend._store, "write", lose)
    return sent


def given_up(backend: ObjectBackend, request: Request, call: Coroutine[Any, Any, object]) -> tuple[Any, ...]:
    """Give up a call whose write is still on its way, and abandon its request; return the write."""
    late: list[tuple[Any, ...]] = []

    async def delay(*arguments: object) -> None:
        late.append(arguments)
        raise BackendUnavailable("no answer yet")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend._store, "write", delay)
        with pytest.raises(BackendUnavailable):
            drive(call)
    request.uncertain = True
    drive(backend.abandon(request))
    return late[0]


def test_renewal_is_seen_by_a_waiter(client: Make) -> None:
    """Without the nonce a renewal writes the same bytes, the waiter takes a living holder's lock, and two have it."""
    (holder, ours, _), (waiter, theirs, clock) = client(), client()
    grant = granted(drive(holder.try_acquire(ours.request(owner="holder"))))
    request = theirs.request(owner="waiter")
    assert isinstance(drive(waiter.try_acquire(request)), Busy)
    clock.time += 29.0
    assert drive(holder.renew([grant])) == [Renewed()]
    assert isinstance(drive(waiter.try_acquire(request)), Busy)
    clock.time += 2.0

    outcome = drive(waiter.try_acquire(request))

    assert isinstance(outcome, Busy)
    assert outcome.retry_after == 28.0


def test_write_of_an_abandoned_request_comes_too_late(client: Make) -> None:
    """`abandon` writes the object anew. With the same bytes the late write would still find what it expects."""
    (backend, host, _), (other, *_) = client(), client()
    drive(backend.release(granted(drive(backend.try_acquire(host.request())))))
    request = host.request(owner="abandoned")
    late = given_up(backend, request, backend.try_acquire(request))

    assert drive(backend._store.run(backend._store.write(*late))) is None

    assert drive(other.holders("x")) == []


def test_request_that_stalls_costs_no_other_lease(client: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one of the shortest ttl: the renewals of a client that come after it do not wait for it so long."""
    backend, host, _ = client()
    grants = [granted(drive(backend.try_acquire(host.request(name, ttl=ttl)))) for name, ttl in (("a", 60), ("b", 5))]
    write = backend._store.write

    async def stall(name: str, content: bytes, expected: Version | None) -> Version | None:
        if name.startswith("a"):
            await asyncio.Event().wait()
        return await write(name, content, expected)

    monkeypatch.setattr(backend._store, "write", stall)
    watch = Stopwatch()
    outcomes = drive(backend.renew(grants[:1])), drive(backend.renew(grants[1:]))

    assert watch.stop() < grants[1].ttl * 2 / 3
    assert [type(outcome) for (outcome,) in outcomes] == [Unknown, Renewed]


def test_dead_holders_lock_is_taken_by_who_has_seen_it_for_a_ttl(client: Make) -> None:
    """By the waiter's own clock; a client that has just come waits a whole ttl, however long the holder is dead."""
    (holder, ours, _), (waiter, theirs, clock), (late, other, _) = client(), client(), client()
    dead = granted(drive(holder.try_acquire(ours.request(ttl=20.0))))
    request = theirs.request()
    busy = drive(waiter.try_acquire(request))
    assert isinstance(busy, Busy)
    assert busy.retry_after == 20.0
    assert [found.remaining for found in drive(waiter.holders("x"))] == [20.0]
    clock.time += 19.9
    assert isinstance(drive(waiter.try_acquire(request)), Busy)
    clock.time += 0.2
    assert drive(waiter.holders("x")) == []
    assert drive(waiter.names("")).names == []
    assert not drive(waiter.break_lock("x"))
    assert isinstance(drive(late.try_acquire(other.request())), Busy)

    taken = granted(drive(waiter.try_acquire(request)))

    assert taken.token > dead.token
    assert drive(holder.renew([dead])) == [Gone("taken")]
    assert not drive(holder.release(dead))


def test_grant_that_its_caller_never_got_is_undone(client: Make) -> None:
    """
    The write was answered, and the caller cancelled before the grant reached it.

    Found by test_cancelled_acquisitions_of_a_free_lock_leave_nothing_behind: the lock stayed until its ttl.
    """
    (backend, host, _), (other, theirs, _) = client(), client()
    request = host.request()
    granted(drive(backend.try_acquire(request)))
    request.uncertain = True

    drive(backend.abandon(request))

    granted(drive(other.try_acquire(theirs.request())))


def test_own_write_is_recognised_after_its_answer_was_lost(client: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal, a note and a release that the engine repeats find what they have written themselves."""
    backend, host, _ = client()
    grant = granted(drive(backend.try_acquire(host.request())))
    lose_answers(monkeypatch, backend)
    (unknown,) = drive(backend.renew([grant]))
    assert isinstance(unknown, Unknown)
    assert drive(backend.renew([grant])) == [Renewed()]
    lose_answers(monkeypatch, backend)
    with pytest.raises(BackendUnavailable):
        drive(backend.write_note(grant, "text", 60.0))
    assert drive(backend.write_note(grant, "text", 60.0))
    lose_answers(monkeypatch, backend)
    with pytest.raises(BackendUnavailable):
        drive(backend.release(grant))

    assert drive(backend.release(grant))

    assert drive(backend.holders("x")) == []
    assert not drive(backend.write_note(grant, "after the release", 60.0))
    assert drive(backend.renew([grant])) == [Gone("gone")]
    assert drive(backend.update(grant, "{}")) == Gone("gone")


def test_take_over_whose_answer_was_lost_is_repeated(client: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same grant; if it is given up instead, the lock stays with the giver, whom the late write cannot replace."""
    backend, host, _ = client()
    given = granted(drive(backend.try_acquire(host.request(owner="giver"))))
    request = host.request()
    sent = lose_answers(monkeypatch, backend)
    with pytest.raises(BackendUnavailable):
        drive(backend.take_over(request, "giver"))

    taken = drive(backend.take_over(request, "giver"))

    assert taken is not None
    assert taken.token > given.token
    assert drive(backend.take_over(host.request(), "giver")) is None
    assert len(sent) == 1


def test_take_over_that_is_given_up_leaves_the_lock_to_its_giver(client: Make) -> None:
    """Its write may still be on its way: it expects a version that the object then no longer has."""
    backend, host, _ = client()
    granted(drive(backend.try_acquire(host.request(owner="giver"))))
    request = host.request()
    late = given_up(backend, request, backend.take_over(request, "giver"))

    assert drive(backend._store.run(backend._store.write(*late))) is None
    assert [holder.owner for holder in drive(backend.holders("x"))] == ["giver"]


def test_holder_is_told_that_its_lock_was_broken(client: Make) -> None:
    """Not only that it is gone."""
    (backend, host, _), (other, *_) = client(), client()
    grant = granted(drive(backend.try_acquire(host.request())))

    assert drive(other.break_lock("x"))

    assert drive(backend.renew([grant])) == [Gone("broken")]


def test_free_lock_costs_one_request_and_is_found_free_by_a_single_try(
    client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was last seen free is written at once; if it has changed meanwhile, it is read and tried again."""
    (backend, host, _), (other, theirs, _) = client(), client()
    drive(backend.release(granted(drive(backend.try_acquire(host.request())))))
    read, reads = backend._store.read, []

    async def count(name: str) -> tuple[bytes, Version] | None:
        reads.append(name)
        return await read(name)

    monkeypatch.setattr(backend._store, "read", count)
    drive(backend.release(granted(drive(backend.try_acquire(host.request())))))
    assert reads == []
    drive(other.release(granted(drive(other.try_acquire(theirs.request())))))

    granted(drive(backend.try_acquire(host.request())))

    assert reads == ["x"]


def test_lock_that_was_forgotten_is_read_again(client: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many are remembered."""
    monkeypatch.setattr(expiry, "NAMES_MAX", 2)
    backend, host, _ = client()
    grants = [granted(drive(backend.try_acquire(host.request(name)))) for name in "abc"]

    assert drive(backend.renew(grants)) == [Renewed()] * 3
    assert [drive(backend.release(grant)) for grant in grants] == [True] * 3


def test_listing_goes_on_behind_a_page(client: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each held lock once, also those of a space, and one whose name is the prefix."""
    monkeypatch.setattr(module, "PAGE_LOCKS", 2)
    backend, host, _ = client()
    held = ["a", "a/b", "a" * 255, "ab", "a\u00e9", "b", "\0once\0a", "\0once\0ab", "\0once\0b"]
    for name in held:
        granted(drive(backend.try_acquire(host.request(name))))

    def listed(prefix: str) -> list[str]:
        page = drive(backend.names(prefix))
        names = [*page.names]
        while page.next is not None:
            page = drive(backend.names(prefix, page))
            names += page.names
        return sorted(names)

    assert listed("") == sorted(held[:6])
    assert listed("a") == sorted(held[:5])
    assert listed("\0once\0") == held[6:]
    assert listed("\0once\0a") == held[6:8]
    assert listed("aa") == ["a" * 255]
    drive(backend.erase())
    assert listed("") == []


def test_data_of_an_application_are_left_alone(client: Make) -> None:
    """They are no lock: neither acquired, broken, listed nor deleted."""
    backend, host, _ = client()
    drive(backend._store.run(backend._store.write("data", b'{"mine": 1}', None)))
    granted(drive(backend.try_acquire(host.request("data2"))))

    for call in (backend.try_acquire(host.request("data")), backend.break_lock("data"), backend.holders("data")):
        with pytest.raises(ConfigurationError, match=r"'data'.*not written by lockkit"):
            drive(call)
    assert drive(backend.names("")).names == ["data2"]
    drive(backend.erase())
    assert drive(backend._store.run(backend._store.read("data"))) is not None
