"""Fencing tokens: above 0 and strictly increasing in the order of the grants, whatever ended the lease before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lockkit.testing.conformance.base import Cases, FaceDriver, case
from lockkit.testing.timing import PATIENCE


class Tokens(Cases):
    """Token order."""

    backend_part = (
        "`Grant.token`: the server raises it in the same atomic step as the grant. The counter survives release, "
        "break and expiry; renewal leaves the token unchanged."
    )

    @case()
    async def test_tokens_increase_from_grant_to_grant(self, driver: FaceDriver) -> None:
        """Each grant has a higher token than the one before, by whichever client."""
        clients = [await driver.connect() for _ in range(3)]
        name = driver.name()
        tokens = [0]

        for number in range(12):
            async with clients[number % 3].lock(name, ttl=driver.timing.long, timeout=20) as lease:
                assert isinstance(lease.token, int)
                tokens.append(lease.token)

        expect_increase(tokens)

    @case()
    async def test_token_stays_while_held(self, driver: FaceDriver) -> None:
        """Renewal and extension change neither token nor owner."""
        name = driver.name()
        client = await driver.connect()
        lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        token, owner = lease.token, lease.owner

        await lease.extend()
        await lease.extend(driver.timing.long / 2)

        assert (lease.token, lease.owner) == (token, owner)
        (holder,) = await client.holders(name)
        assert (holder.token, holder.owner) == (token, owner)
        await lease.release()

    @case()
    async def test_owners_are_never_the_same(self, driver: FaceDriver) -> None:
        """An owner is of one acquisition: not of a client, thread, task or process."""
        client = await driver.connect()
        lock = client.lock(driver.name(), ttl=driver.timing.long)
        owners = set()
        for _ in range(5):
            async with lock as lease:
                owners.add(lease.owner)

        assert len(owners) == 5


def expect_increase(tokens: Sequence[int]) -> None:
    """Assert that each token is higher than the one before."""
    assert all(one < next_one for one, next_one in pairwise(tokens)), f"tokens do not increase: {tokens}"
