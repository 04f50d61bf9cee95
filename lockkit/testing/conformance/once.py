"""Once per key, and the notes that carry it."""

from __future__ import annotations

from typing import Any

import pytest

import lockkit
from lockkit import aio
from lockkit.backend import apart
from lockkit.primitives.once import SPACE
from lockkit.testing.conformance.base import Cases, FaceDriver, case, needs
from lockkit.testing.timing import PATIENCE

KEEP = 600.0
"""Life of the records, seconds: they end in no case by themselves."""

PAUSE = 0.05


async def _break(client: aio.Client, key: str) -> bool:
    """Free the lock of a run by force, as its end of lease would."""
    return await client._engine.client.ready().break_lock(apart(SPACE, key))


class _Refused(Exception):
    """An error that counts as completion."""


class Onces(Cases):
    """Work that is done once per key."""

    backend_part = (
        "`write_note`: in one atomic step, the server compares the owner and writes. `read_note` returns the note "
        "until its life ends by the clock of the server, also after the lock was released."
    )

    @case(needs.notes)
    async def test_first_call_runs_and_the_others_get_its_result(self, driver: FaceDriver) -> None:
        """Also those of another client, and each key for itself."""
        client, other = await driver.connect(), await driver.connect()
        key, runs = driver.name(), []
        result = {"id": "ch_1", "parts": [1, 2.5, None, True], "text": 'caf\u00e9 \u2028 \n"'}

        async def charge(order: int) -> Any:  # noqa: ANN401 - JSON
            runs.append(order)
            return {**result, "order": order}

        template = f"{key}:{{order}}"
        first = client.once(template, keep=KEEP, ttl=driver.timing.long, timeout=PATIENCE)(charge)
        second = other.once(template, keep=KEEP, ttl=driver.timing.long, timeout=PATIENCE)(charge)

        assert await first(1) == {**result, "order": 1}
        assert await second(1) == {**result, "order": 1}
        assert await second(2) == {**result, "order": 2}
        assert runs == [1, 2]

    @case(needs.notes)
    async def test_key_is_done_only_when_the_block_says_so(self, driver: FaceDriver) -> None:
        """Leaving without done() means that the next attempt runs; the key is the same for each."""
        client = await driver.connect()
        key = driver.name()
        once = client.once(key, keep=KEEP, ttl=driver.timing.long, timeout=PATIENCE)

        async with once as attempt:
            assert attempt.first
            assert attempt.key == key
            assert attempt.result is None
        async with once as attempt:
            assert attempt.first
            await attempt.done({"id": 17})
            assert attempt.result == {"id": 17}
        async with once as attempt:
            assert not attempt.first
            assert attempt.key == key
            assert attempt.result == {"id": 17}
            with pytest.raises(lockkit.LockError, match="done before"):
                await attempt.done("again")

    @case(needs.notes)
    async def test_lock_of_the_same_name_is_another(self, driver: FaceDriver) -> None:
        """Who holds the lock does not disturb the run, and the run leaves no lock."""
        client = await driver.connect()
        name = driver.name()

        async with client.lock(name, ttl=driver.timing.long, timeout=PATIENCE):
            async with client.once(name, keep=KEEP, ttl=driver.timing.long, timeout=PATIENCE) as attempt:
                assert attempt.first
                await attempt.done()
            assert len(await client.holders(name)) == 1
        assert await client.holders(name) == []

    @case(needs.notes)
    async def test_other_match_runs_nothing(self, driver: FaceDriver) -> None:
        """One key for two different things is a mistake, and found."""
        client = await driver.connect()
        key = driver.name()
        async with client.once(key, keep=KEEP, match="5:EUR", timeout=PATIENCE) as attempt:
            await attempt.done("paid")

        with pytest.raises(lockkit.KeyReused, match="another match") as caught:
            async with client.once(key, keep=KEEP, match="6:EUR", timeout=PATIENCE):
                pytest.fail("the body ran")

        assert caught.value.name == key
        assert caught.value.backend == client.url
        async with client.once(key, keep=KEEP, match="5:EUR", timeout=PATIENCE) as attempt:
            assert not attempt.first

    @case(needs.notes)
    async def test_repeat_waits_for_the_run_under_way(self, driver: FaceDriver) -> None:
        """Or raises LockTimeout with timeout=0; nothing runs beside it."""
        client, other = await driver.connect(), await driver.connect()
        key = driver.name()
        began = driver.signal()

        async def repeat() -> Any:  # noqa: ANN401 - JSON
            began.set()
            async with other.once(key, keep=KEEP, ttl=driver.timing.long, timeout=PATIENCE) as attempt:
                assert not attempt.first
                return attempt.result

        async with client.once(key, keep=KEEP, ttl=driver.timing.long, timeout=PATIENCE) as attempt:
            assert attempt.first
            with pytest.raises(lockkit.LockTimeout) as caught:
                await driver.answered(
                    lambda: other.once(key, keep=KEEP, ttl=driver.timing.long, timeout=0).__aenter__(),
                )
            waiter = driver.spawn(repeat())
            await began.wait()
            await attempt.done("the first's")

        assert caught.value.name == key
        assert await waiter.result() == "the first's"

    @case(needs.notes)
    async def test_run_that_lost_its_lease_stores_nothing(self, driver: FaceDriver) -> None:
        """The result of the run that took over stays."""
        client, other = await driver.connect(), await driver.connect()
        key = driver.name()

        with pytest.raises(lockkit.LockLost) as caught:  # noqa: PT012 - leaving the block is the point, too
            async with client.once(key, keep=KEEP, ttl=driver.timing.long, timeout=PATIENCE) as stale:
                assert await _break(other, key)
                async with other.once(key, keep=KEEP, ttl=driver.timing.long, timeout=PATIENCE) as attempt:
                    assert attempt.first
                    with pytest.raises(lockkit.LockLost):
                        await stale.done("stale")
                    await attempt.done("fresh")
                with pytest.raises(lockkit.LockLost):
                    await stale.done("stale")

        assert caught.value.name == key
        async with client.once(key, keep=KEEP, timeout=PATIENCE) as attempt:
            assert attempt.result == "fresh"

    @case(needs.notes)
    async def test_only_the_present_holder_writes_a_note(self, driver: FaceDriver) -> None:
        """The backend itself compares the owner: neither one whose lock was broken writes, nor one that released it."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()
        backend, elsewhere = client._engine.client.ready(), other._engine.client.ready()
        stale = await client.lock(name, ttl=driver.timing.long, renew=False).acquire(PATIENCE)
        grant = stale._record.grant
        assert await backend.read_note(name) is None
        assert await backend.write_note(grant, "first", KEEP)
        assert await other.break_lock(name)

        assert not await backend.write_note(grant, "of nobody's lock", KEEP)
        async with await other.lock(name, ttl=driver.timing.long).acquire(PATIENCE) as lease:
            assert not await backend.write_note(grant, "of another's lock", KEEP)
            found = await elsewhere.read_note(name)
            assert found is not None
            assert found.text == "first"
            assert found.remaining is None or 0 < found.remaining <= KEEP + 1
            released = lease._record.grant
            assert await elsewhere.write_note(released, "second", KEEP)
        assert not await elsewhere.write_note(released, "after the release", KEEP)

        found = await backend.read_note(name)
        assert found is not None
        assert found.text == "second"
        with pytest.raises(lockkit.LockLost):
            await stale.release()

    @case(needs.notes)
    async def test_state_of_a_key_is_seen_and_a_done_one_forgotten(self, driver: FaceDriver) -> None:
        """None, running with its holder, done with its result or error; then it runs again."""
        client, other = await driver.connect(), await driver.connect()
        key = driver.name()
        once = client.once(key, keep=KEEP, ttl=driver.timing.long, match="m", store_errors=_Refused, timeout=PATIENCE)
        seen = other.once(key, keep=1.0)
        assert await seen.state() is None
        assert not await seen.forget()

        async with once as attempt:
            running = await seen.state()
            assert isinstance(running, lockkit.OnceRunning)
            (holder,) = await client._engine.holders_in(SPACE, key)
            assert (running.holder.owner, running.holder.mode) == (holder.owner, "exclusive")
            assert not await seen.forget()
            await attempt.done({"id": 1})
        done = await seen.state()
        assert isinstance(done, lockkit.OnceDone)
        assert (done.result, done.error) == ({"id": 1}, None)
        assert done.match is not None
        assert done.since is not None
        assert done.until is None or abs(done.until - done.since - KEEP) < PATIENCE

        assert await seen.forget()
        assert await seen.state() is None
        assert not await seen.forget()

        async def refuse() -> None:
            raise _Refused(key)

        with pytest.raises(_Refused):
            await once(refuse)()
        done = await seen.state()
        assert isinstance(done, lockkit.OnceDone)
        assert (done.result, done.error) == (None, ("_Refused", key))
        assert await seen.forget()

    @case(needs.notes)
    async def test_record_ends(self, driver: FaceDriver) -> None:
        """After that the key is unknown again."""
        client = await driver.connect()
        once = client.once(driver.name(), keep=driver.timing.short, ttl=driver.timing.long, timeout=PATIENCE)
        async with once as attempt:
            await attempt.done(1)

        for _ in range(int(PATIENCE / PAUSE)):
            async with once as attempt:
                if attempt.first:
                    return
            await driver.sleep(PAUSE)
        pytest.fail("the record was kept")

    @case(needs.notes)
    async def test_errors_count_as_done_only_if_listed(self, driver: FaceDriver) -> None:
        """After any other the next attempt runs."""
        client = await driver.connect()
        errors: list[Exception] = [ValueError("no answer"), _Refused("card declined")]

        async def charge() -> None:
            raise errors.pop(0)

        decorated = client.once(driver.name(), keep=KEEP, store_errors=(_Refused,), timeout=PATIENCE)(charge)

        with pytest.raises(ValueError, match="no answer"):
            await decorated()
        with pytest.raises(_Refused):
            await decorated()
        with pytest.raises(lockkit.StoredError, match="_Refused: card declined") as caught:
            await decorated()

        assert caught.value.type_name == "_Refused"
        assert caught.value.text == "card declined"

    @case(needs.notes)
    async def test_result_that_cannot_be_stored_is_done_without_one(self, driver: FaceDriver) -> None:
        """The work has happened: it must not happen again."""
        client = await driver.connect()
        for result in (object(), "x" * (64 * 1024 - 1)):
            once = client.once(driver.name(), keep=KEEP, timeout=PATIENCE)

            with pytest.raises(lockkit.ConfigurationError, match="is done, but its result is not stored"):
                async with once as attempt:
                    await attempt.done(result)

            async with once as attempt:
                assert not attempt.first
                assert attempt.result is None

    @case(needs.notes)
    async def test_largest_result_is_stored(self, driver: FaceDriver) -> None:
        """64 KiB of JSON text, also in characters of several bytes."""
        client = await driver.connect()
        result = "\u00e9" * (32 * 1024 - 1)
        once = client.once(driver.name(), keep=KEEP, timeout=PATIENCE)

        async with once as attempt:
            await attempt.done(result)

        async with once as attempt:
            assert attempt.result == result

    @case(needs.no_notes)
    async def test_once_without_notes_is_refused(self, driver: FaceDriver) -> None:
        """Before anything is sent, with what to use instead."""
        client = await driver.connect()

        with pytest.raises(lockkit.Unsupported, match=r"notes on locks.* Use ") as caught:
            client.once(driver.name(), keep=KEEP)

        assert caught.value.backend == client.url
