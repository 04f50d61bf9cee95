"""Tickets: what ends with one, who may take it, and answers that were lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from lockkit.backend import Grant, Request
from lockkit.engine.ticket import Handed, read
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockLost, Unsupported
from lockkit.runtime import wall_clock
from lockkit.testing.face_driver import FaceDriver
from tests.engine.scripted import MovableClock, ScriptedBackend, scripted
from tests.faces import both_faces, scripted_for
from tests.test_observers import Recorder, observed
from tests.tries import wait_for_observers

NO_ANSWER = BackendUnavailable("no answer")


@both_faces
async def test_giver_ends_and_the_taker_holds_with_a_larger_token(driver: FaceDriver) -> None:
    """The giver's block ends without a word; what it asks is answered with what happened."""
    giver, backend = scripted_for(driver)
    taker, _ = scripted_for(driver, backend.space)
    async with giver.lock("seat:12A", ttl=30) as lease:
        ticket = await lease.ticket()
        assert not lease.held
        assert not lease.lost
        assert lease.remaining() == 0.0
        with pytest.raises(LockError, match="was handed over with a ticket") as error:
            lease.check()
        assert not isinstance(error.value, LockLost)
        assert "released" in repr(lease)
        taken = await taker.take(ticket, ttl=20, metadata="worker")
    await lease.release()
    assert "release" not in backend.calls

    assert taken.name == "seat:12A"
    assert taken.token > lease.token
    assert taken.owner != lease.owner
    assert 19 < taken.remaining() <= 20
    (holder,) = await giver.holders("seat:12A")
    assert (holder.owner, holder.token, holder.metadata["text"]) == (taken.owner, taken.token, "worker")
    await taken.release()
    assert await giver.holders("seat:12A") == []
    await giver.close()
    await taker.close()


def test_taker_whose_answer_came_too_late_has_lost_it() -> None:
    """As with a ticket whose time has passed: `take` waits for nobody, so nothing has timed out."""
    clock = MovableClock()
    client, backend = scripted(clock)
    ticket = client.lock("x", ttl=30).acquire().ticket()
    take_over: Callable[[Request, str], Any] = backend.take_over

    async def slow(request: Request, owner: str) -> Grant | None:
        grant: Grant | None = await take_over(request, owner)
        clock.added += 11
        return grant

    backend.take_over = slow  # type: ignore[method-assign]
    with pytest.raises(LockLost, match="the answer took longer than its ttl of 10 s"):
        client.take(ticket, ttl=10)
    assert client.holders("x") == []
    client.close()


@both_faces
async def test_lost_answer_of_take_is_asked_again(driver: FaceDriver) -> None:
    """By the same owner, so that the server gives what it gave: the taker does not shut itself out."""
    client, backend = scripted_for(driver)
    ticket = await (await client.lock("x", ttl=30).acquire()).ticket()
    asked = _failing_once_after(backend)

    taken = await client.take(ticket)

    assert len(asked) == 2
    assert len(set(asked)) == 1
    assert taken.owner == asked[0]
    assert await taken.confirm()
    await taken.release()
    await client.close()


def _failing_once_after(backend: ScriptedBackend) -> list[str]:
    """Lose the first answer of `take_over`; returns the owners that ask."""
    asked: list[str] = []
    real: Callable[[Request, str], Any] = backend.take_over

    async def take_over(request: Request, owner: str) -> Grant | None:
        grant: Grant | None = await real(request, owner)
        asked.append(request.owner)
        if len(asked) == 1:
            raise NO_ANSWER
        return grant

    backend.take_over = take_over  # type: ignore[method-assign]
    return asked


def test_take_without_any_answer_gives_up_and_leaves_nothing() -> None:
    """For as long as a call may take; the lock that it may have got is undone."""
    client, backend = scripted(unavailable_after=0.05)
    ticket = client.lock("x", ttl=30).acquire().ticket()
    real = backend.take_over

    async def take_over(request: Request, owner: str) -> Grant | None:
        await real(request, owner)
        raise NO_ANSWER

    backend.take_over = take_over  # type: ignore[method-assign]
    with pytest.raises(BackendUnavailable, match="could not acquire lock 'x'"):
        client.take(ticket)
    assert client.holders("x") == []
    client.close()


@both_faces
async def test_lost_answer_of_ticket_leaves_the_lease_as_it_was(driver: FaceDriver) -> None:
    """No ticket, so the giver goes on holding."""
    client, backend = scripted_for(driver)

    async def detach(_: Grant) -> Any:  # noqa: ANN401 - never returns
        raise NO_ANSWER

    lease = await client.lock("x", ttl=30).acquire()
    real, backend.detach = backend.detach, detach  # type: ignore[method-assign, assignment]
    with pytest.raises(BackendUnavailable, match="could not hand over lock 'x'"):
        await lease.ticket()
    assert lease.held
    backend.detach = real  # type: ignore[method-assign]
    taken = await client.take(await lease.ticket())
    await taken.release()
    await client.close()


@both_faces
async def test_leases_that_others_rely_on_have_no_ticket(driver: FaceDriver) -> None:
    """They stay held."""
    client, _ = scripted_for(driver)
    lock = client.lock("x", reentrant=True)
    outer = await lock.acquire()
    inner = await lock.acquire()
    rwlock, semaphore = client.rwlock("r"), client.semaphore("s", 2)
    leases = await client.locks(["a", "b"]).acquire()
    refused = {
        "entered again": inner,
        "held together with others": await rwlock.read().acquire(),
        "together": await semaphore.acquire(),
        "part of a set of locks": leases["a"],
        "part of a term": await client.election("e").campaign(),
    }
    for reason, lease in refused.items():
        with pytest.raises(LockError, match=reason):
            await lease.ticket()
        assert lease.held
    await inner.release()
    await outer.ticket()
    await client.close()


@both_faces
async def test_backend_that_cannot_says_so_before_anything_is_sent(driver: FaceDriver) -> None:
    """By capability."""
    from dataclasses import replace  # noqa: PLC0415 - here only

    client, backend = scripted_for(driver)
    lease = await client.lock("x").acquire()
    backend.capabilities = replace(backend.capabilities, transfer=False)
    calls = len(backend.calls)
    with pytest.raises(Unsupported, match=r"ticket\(\) needs .*capabilities\.transfer"):
        await lease.ticket()
    with pytest.raises(Unsupported, match=r"take\(\) needs"):
        await client.take("lk1-x")
    assert len(backend.calls) == calls
    assert lease.held
    await client.close()


GOOD = str(Handed("x", "0" * 32, 7, 2e9))


@pytest.mark.parametrize(
    "text",
    ["", "seat:12A", "lk1-", GOOD[:-20], f"{GOOD}!", f" {GOOD}", f"{GOOD}\n", "lk1-" + "A" * 2000, 7, None, b"lk1-",
     str(Handed("\0", "0" * 32, 7, 0.0)), str(Handed("x" * 300, "0" * 32, 7, 0.0))],
)  # fmt: skip
def test_text_that_is_no_ticket_is_refused_and_not_shown(text: Any) -> None:  # noqa: ANN401 - wrong on purpose
    """It may be a good one with a typing error, and those are secrets."""
    client, backend = scripted()
    with pytest.raises(ConfigurationError, match=r"take\(\) takes the text that lease.ticket\(\) returned") as error:
        client.take(text)
    assert not (isinstance(text, str) and len(text) > 3 and text in str(error.value))
    assert backend.calls == []
    client.close()


@pytest.mark.parametrize("name", ["x", "seat:12A", "é" * 127, "\x01" * 255, "name with spaces/and?more#"])
def test_ticket_is_short_safe_text(name: str) -> None:
    """For a URL, a header or a message; it shows neither name nor server to whoever glances at it."""
    client, _ = scripted()
    ticket = client.lock(name, ttl=30).acquire().ticket(ttl=12)
    assert re.fullmatch(r"[A-Za-z0-9_.~-]{1,1024}", ticket)
    assert "memory" not in ticket
    handed = read(ticket, "memory://")
    assert handed.name == name
    assert handed.until == pytest.approx(wall_clock() + 12, abs=5)
    client.take(ticket).release()
    client.close()


@pytest.mark.parametrize("options", [{"ttl": -1}, {"stall": 0}, {"timeout": 5}])
def test_wrong_options_leave_the_ticket_good(options: dict[str, Any]) -> None:
    """They are refused before anything is sent."""
    client, _ = scripted()
    ticket = client.lock("x").acquire().ticket()
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        client.take(ticket, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'wait'"):
        client.take(ticket, wait=True)
    client.take(ticket).release()
    client.close()


def test_observers_are_told_of_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what counts leases counts right."""
    wait_for_observers(monkeypatch)
    recorder = Recorder()
    with observed(recorder):
        client, _ = scripted()
        ticket = client.lock("x").acquire().ticket()
        client.take(ticket).release()
        with pytest.raises(LockLost):
            client.take(ticket)
        client.close()
    assert [(call, event.reason) for call, event in recorder.events if call != "renewed"] == [
        ("granted", None), ("released", "handed_over"), ("granted", None), ("released", None), ("refused", "error"),
    ]  # fmt: skip
