"""Lock names: every byte counts, nothing in them means anything; and what is no name is refused."""

from __future__ import annotations

import secrets
import unicodedata

from lockkit.testing.conformance.base import Cases, FaceDriver, case
from lockkit.testing.timing import PATIENCE

WHOLE = [".", "..", " ", "%", "/", "*", "-", "{}", "0", "\n", "ß", "None", "null"]


FORMS = (
    "N ", " N", "N\t", "N\n", "\nN", "N\r\n", "N-E-A-O", "N/", "/N", "N/b", "N//b", "N/./b", "N/../b", "../N",
    "N%2Fb", "N%2fb", "N%252Fb", "N%", "N%%", "N{", "N}", "N{}", "{N}", "{N}:fence", "N:fence", "N*", "N?", "N[a]",
    "N_", "N'", 'N"', "N`", "N\\", "N\\\\", "N;--", "N.", ".N", "N~", "~N", "${N}", "N\x01", "N\x7f", "N\u0085",
    "N\u200b", "N\ufeff", "N\uf8ff", "N\ufffd", "N\uffff", "N\U0001f512", "N\U0001f513", "N\u0130", "Ni",
    "N\xdf", "Nss",
)  # fmt: skip
"""Names that stores have confused, with N for a word. Neighbours differ in the least way in which names can differ."""


def unusual(mark: str) -> list[str]:
    """Give names that stores have confused, with a word in them that makes them this test's own."""
    composed = unicodedata.normalize("NFC", f"{mark}-\xe9-\xe5-\xf6")
    filled = (mark + "x" * 255)[:255]
    return [
        *(mark, mark.upper(), composed, unicodedata.normalize("NFD", composed)),
        *(form.replace("N", mark) for form in FORMS),
        *(filled, filled[:254] + "y", filled[:254], mark + "\U0001f512" * ((255 - len(mark)) // 4)),
        *(mark + filler * (255 - len(mark)) for filler in "/%."),
    ]


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
