"""Notes of the application on a lock: what is refused, and what a foreign or damaged note does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import lockkit
from lockkit.errors import ConfigurationError, LockError, LockLost, Unsupported
from lockkit.runtime import drive
from lockkit.testing.face_driver import FaceDriver
from tests.engine.scripted import MovableClock, scripted
from tests.faces import both_faces, scripted_for


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """In memory, apart from other tests."""
    made, _ = scripted()
    with made:
        yield made


@both_faces
async def test_value_that_cannot_be_stored_leaves_the_note_as_it_is(driver: FaceDriver) -> None:
    """The error says what a note may be; nothing is sent."""
    client, _ = scripted_for(driver)
    async with client.lock("x") as lease:
        await lease.write_note("good")
        with pytest.raises(ConfigurationError, match="the note on lock 'x' cannot be stored") as error:
            await lease.write_note(float("nan"))
        assert error.value.name == "x"
        note = await client.read_note("x")
        assert note.value == "good"
    await client.close()


@both_faces
async def test_note_of_a_lease_that_is_released_meanwhile(driver: FaceDriver) -> None:
    """By another thread or task: the holder is told so, as by every other call."""
    client, backend = scripted_for(driver)
    lease = await client.lock("x").acquire()

    async def refuse(*_: object) -> bool:
        await client._engine.releases.release(lease._record)
        return False

    backend.write_note = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(LockLost, match="was released"):
        await lease.write_note("value")
    await client.close()


@pytest.mark.parametrize("value", [0, False, "", [], {}])
def test_value_that_is_false_is_a_note(client: lockkit.Client, value: object) -> None:
    """Only None is none."""
    with client.lock("x") as lease:
        lease.write_note(value)
    note = client.read_note("x")
    assert note is not None
    assert note.value == value


@pytest.mark.parametrize("keep", [0, -1, float("inf"), "a day", timedelta(days=40_000)])
def test_life_that_is_no_time_is_refused(client: lockkit.Client, keep: Any) -> None:  # noqa: ANN401 - wrong on purpose
    """As every other time span."""
    with client.lock("x") as lease, pytest.raises(ConfigurationError, match="keep"):
        lease.write_note("value", keep=keep)
    assert client.read_note("x") is None


def test_shared_leases_and_permits_have_no_note(client: lockkit.Client) -> None:
    """They would overwrite each other's."""
    rwlock = client.rwlock("x")
    for held in (rwlock.read().acquire(), client.semaphore("y", 2).acquire()):
        with pytest.raises(LockError, match="not held exclusively"):
            held.write_note("value")
        held.release()
    with rwlock.write() as lease:
        lease.write_note("value")


def test_released_and_paused_holders_write_nothing() -> None:
    """The clock comes first: nothing is sent then."""
    clock = MovableClock()
    client, _ = scripted(clock)
    lease = client.lock("x").acquire()
    lease.release()
    with pytest.raises(LockLost, match="was released"):
        lease.write_note("value")
    lease = client.lock("x", ttl=10).acquire()
    clock.added += 60
    with pytest.raises(LockLost, match="lost lock"):
        lease.write_note("value")
    clock.added = 0
    assert client.read_note("x") is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"token":1}', '{"token":"1","value":2}', "\x1b[31m", "[" * 100])
def test_foreign_note_is_named_and_not_taken_for_a_value(client: lockkit.Client, text: str) -> None:
    """Somebody else's text is data."""
    with client.lock("x") as lease:
        backend = client._engine.client.ready()
        assert drive(backend.write_note(lease._record.grant, text, 60))
    with pytest.raises(LockError, match=r"the note on lock 'x' at .* was not written by lease.write_note"):
        client.read_note("x")


def test_backend_without_notes_says_so(client: lockkit.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is sent."""
    from dataclasses import replace  # noqa: PLC0415 - here only

    backend = client._engine.client.ready()
    monkeypatch.setattr(backend, "capabilities", replace(backend.capabilities, notes=False))
    with client.lock("x") as lease, pytest.raises(Unsupported, match=r"write_note\(\) needs notes on locks"):
        lease.write_note("value")
    with pytest.raises(Unsupported, match=r"read_note\(\) needs notes on locks"):
        client.read_note("x")


def test_names_are_checked(client: lockkit.Client) -> None:
    """As those of locks; those of other kinds are not reached by them."""
    with pytest.raises(ConfigurationError, match="NUL"):
        client.read_note("\0once\0x")
    with client.once("x", keep=60) as attempt:
        attempt.done("paid")
    assert client.read_note("x") is None
