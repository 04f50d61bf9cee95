"""State with the lock: a value that only its holder writes, and that outlives the lease."""

from __future__ import annotations

from datetime import timedelta

import pytest

import lockkit
from lockkit.testing.conformance.base import Cases, FaceDriver, case, needs
from lockkit.testing.timing import PATIENCE


class Notes(Cases):
    """`Lease.write_note` and `Client.read_note`."""

    backend_part = (
        "`write_note`: in one atomic step, the server compares the owner and writes. `read_note` returns the note "
        "until its life ends by the clock of the server, also after the lock was released."
    )

    @case(needs.notes)
    async def test_next_holder_finds_what_the_last_one_wrote(self, driver: FaceDriver) -> None:
        """From any client, held or free, with the token of its writer; None takes it away."""
        client, other = await driver.connect(), await driver.connect()
        name, value = driver.name(), {"row": 17, "parts": [1, 2.5, None, True], "text": 'caf\u00e9 \u2028 \n"'}
        assert await client.read_note(name) is None

        async with client.lock(name, ttl=driver.timing.long, timeout=PATIENCE) as first:
            await first.write_note("begun")
            await first.write_note(value)
            while_held = await other.read_note(name)
        async with other.lock(name, ttl=driver.timing.long, timeout=PATIENCE) as second:
            note = await other.read_note(name)

            assert while_held is not None
            assert note is not None
            assert (note.value, note.token) == (while_held.value, while_held.token) == (value, first.token)
            assert note.remaining is None or 0 < note.remaining <= timedelta(days=30).total_seconds()
            assert await client.read_note(f"{name}:other") is None
            await second.write_note(None)

        assert await client.read_note(name) is None

    @case(needs.notes)
    async def test_holder_that_lost_the_lock_writes_nothing(self, driver: FaceDriver) -> None:
        """The server compares the owner: what was written before stays."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()
        stale = await client.lock(name, ttl=driver.timing.long, renew=False).acquire(PATIENCE)
        await stale.write_note("of the first")
        assert await other.break_lock(name)
        kept = await other.read_note(name)
        assert kept is not None
        assert kept.value == "of the first"

        with pytest.raises(lockkit.LockLost):
            await stale.write_note("too late")

        assert stale.lost
        again = await other.read_note(name)
        assert again is not None
        assert (again.value, again.token) == ("of the first", stale.token)

    @case(needs.notes)
    async def test_note_ends_with_its_time(self, driver: FaceDriver) -> None:
        """And not with the lease."""
        client = await driver.connect()
        name = driver.name()
        async with client.lock(name, ttl=driver.timing.long, timeout=PATIENCE) as lease:
            await lease.write_note("for a while", keep=driver.timing.short)
            await lease.write_note("for a moment", keep=timedelta(seconds=driver.timing.short))

        async def is_gone() -> bool:
            return await client.read_note(name) is None

        await driver.eventually(is_gone, "the note ends", driver.timing.beyond(driver.timing.short))
