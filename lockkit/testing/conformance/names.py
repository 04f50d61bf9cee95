"""Lock names: every byte counts, nothing in them means anything; and what is no name is refused."""

from __future__ import annotations

import secrets
import unicodedata

from lockkit.testing.conformance.base import Cases, FaceDriver, case
from lockkit.testing.timing import PATIENCE

WHOLE = [".", "..", " ", "%", "/", "*", "-", "{}", "0", "\n", "ß", "None", "null"]


def unusual(mark: str) -> list[str]:
    """
    Names that stores have confused, with a word in them that makes them this test's own.

    Neighbours in the list differ in the least way in which names can differ.
    """
    composed = unicodedata.normalize("NFC", f"{mark}-é-å-ö")
    plain = [
        mark,
        mark.upper(),
        f"{mark} ",
        f" {mark}",
        f"{mark}\t",
        f"{mark}\n",
        f"\n{mark}",
        f"{mark}\r\n",
        composed,
        unicodedata.normalize("NFD", composed),
        f"{mark}-E-A-O",
        f"{mark}/",
        f"/{mark}",
        f"{mark}/b",
        f"{mark}//b",
        f"{mark}/./b",
        f"{mark}/../b",
        f"../{mark}",
        f"{mark}%2Fb",
        f"{mark}%2fb",
        f"{mark}%252Fb",
        f"{mark}%",
        f"{mark}%%",
        f"{mark}{{",
        f"{mark}}}",
        f"{mark}{{}}",
        f"{{{mark}}}",
        f"{{{mark}}}:fence",
        f"{mark}:fence",
        f"{mark}*",
        f"{mark}?",
        f"{mark}[a]",
        f"{mark}_",
        f"{mark}'",
        f'{mark}"',
        f"{mark}`",
        f"{mark}\\",
        f"{mark}\\\\",
        f"{mark};--",
        f"{mark}.",
        f".{mark}",
        f"{mark}~",
        f"~{mark}",
        f"${{{mark}}}",
        f"{mark}\x01",
        f"{mark}\x7f",
        f"{mark}\u0085",
        f"{mark}\u200b",
        f"{mark}\ufeff",
        f"{mark}\uf8ff",
        f"{mark}\ufffd",
        f"{mark}\uffff",
        f"{mark}\U0001f512",
        f"{mark}\U0001f513",
        f"{mark}İ",
        f"{mark}i",
        f"{mark}ß",
        f"{mark}ss",
    ]
    long = [
        (mark + "x" * 255)[:255],
        (mark + "x" * 255)[:254] + "y",
        (mark + "x" * 255)[:254],
        mark + "\U0001f512" * ((255 - len(mark)) // 4),
        mark + "/" * (255 - len(mark)),
        mark + "%" * (255 - len(mark)),
        mark + "." * (255 - len(mark)),
    ]
    return [*plain, *long]


class Names(Cases):
    """Names that differ in any byte are different locks."""

    backend_part = (
        "Names that differ in any byte must be different keys at the server, whatever its rules for case, trailing "
        "spaces and special characters. Encode what has a meaning there."
    )

    @case()
    async def test_unusual_names_are_all_different_locks(self, driver: FaceDriver) -> None:
        """All of them can be held at once, and each is its own when it is asked for."""
        client, other = await driver.connect(), await driver.connect()
        names = unusual(f"n{secrets.token_hex(4)}")
        assert len(set(names)) == len(names)

        leases = {name: await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE) for name in names}

        for name, lease in leases.items():
            assert [holder.owner for holder in await other.holders(name)] == [lease.owner], name
        for name, lease in leases.items():
            await lease.release()
            assert not await other.lock(name).locked(), name
        assert [name for name, lease in leases.items() if lease.lost] == []

    @case()
    async def test_each_unusual_name_excludes(self, driver: FaceDriver) -> None:
        """A second client is refused, and granted after the release."""
        client, other = await driver.connect(), await driver.connect()
        for name in unusual(f"n{secrets.token_hex(4)}"):
            async with client.lock(name, ttl=driver.timing.long) as lease:
                assert await driver.answered(other.lock(name, ttl=driver.timing.long).try_acquire) is None, name
                assert lease.name == name
            async with other.lock(name, ttl=driver.timing.long, timeout=20) as after:
                assert after.token > lease.token, name

    @case()
    async def test_names_with_a_meaning_elsewhere_are_names_here(self, driver: FaceDriver) -> None:
        """A dot, two dots, a slash, a space: as whole names."""
        client, other = await driver.connect(), await driver.connect()
        # Others may run this case on the same backend at the same time: in one order, and waiting for each other.
        leases = [await client.lock(name, ttl=driver.timing.long).acquire(60) for name in sorted(WHOLE)]

        for lease in leases:
            assert [holder.owner for holder in await other.holders(lease.name)] == [lease.owner], lease.name
        for lease in reversed(leases):
            await lease.release()

    @case()
    async def test_unusual_names_can_be_waited_for_and_broken(self, driver: FaceDriver) -> None:
        """Whatever a backend makes of a name, it makes the same of it everywhere."""
        client, other = await driver.connect(), await driver.connect()
        mark = f"n{secrets.token_hex(4)}"
        for name in (f"{mark}/../%2F{{}} é\n", mark + "\U0001f512" * 60, f"{mark}*?[\\"):
            lease = await client.lock(name, ttl=driver.timing.long, renew=False).acquire(PATIENCE)
            waiting = driver.spawn(other.lock(name, ttl=driver.timing.long).acquire())
            await driver.until_waiting(other, name)

            assert await client.break_lock(name)

            after = await waiting.result()
            assert after.token > lease.token
            assert not await lease.confirm()
            await after.release()
