"""Fencing tokens: above 0 and strictly increasing in the order of the grants, whatever ended the lease before."""

from __future__ import annotations

from lockkit.testing.conformance.base import Cases, Stage, case, needs
from lockkit.testing.face_driver import PATIENCE


class Tokens(Cases):
    """Token order."""

    @case()
    async def test_tokens_increase_from_grant_to_grant(self, stage: Stage) -> None:
        """Each grant has a higher token than the one before, by whichever client."""
        clients = [await stage.connect() for _ in range(3)]
        name = stage.name()
        tokens = [0]

        for number in range(12):
            async with clients[number % 3].lock(name, ttl=stage.timing.long, timeout=20) as lease:
                assert isinstance(lease.token, int)
                tokens.append(lease.token)

        assert tokens == sorted(set(tokens))

    @case()
    async def test_token_increases_when_a_lease_expired(self, stage: Stage) -> None:
        """Who comes after a holder that vanished has the higher token."""
        name = stage.name()
        client, other = await stage.connect(), await stage.connect()
        before = await client.lock(name, ttl=stage.timing.short, renew=False).acquire(20)

        after = await other.lock(name, ttl=stage.timing.long).acquire(stage.timing.beyond(before.ttl))

        assert after.token > before.token
        await after.release()

    @case()
    async def test_token_increases_when_a_lock_was_broken(self, stage: Stage) -> None:
        """The token of a broken lease is never given again."""
        name = stage.name()
        client, other = await stage.connect(), await stage.connect()
        before = await client.lock(name, ttl=stage.timing.long).acquire(PATIENCE)
        assert await other.break_lock(name)

        after = await other.lock(name, ttl=stage.timing.long).acquire(20)

        assert after.token > before.token
        await after.release()
        assert not await before.confirm()

    @case()
    async def test_token_increases_across_clients_that_come_and_go(self, stage: Stage) -> None:
        """Nothing of the order is kept in a client: also when nobody uses the lock in between."""
        name = stage.name()
        tokens = []
        for _ in range(4):
            client = await stage.connect()
            async with client.lock(name, ttl=stage.timing.long, timeout=20) as lease:
                tokens.append(lease.token)
            await client.close()

        assert tokens == sorted(set(tokens))

    @case()
    async def test_token_stays_while_held(self, stage: Stage) -> None:
        """Renewal and extension change neither token nor owner."""
        name = stage.name()
        client = await stage.connect()
        lease = await client.lock(name, ttl=stage.timing.long).acquire(PATIENCE)
        token, owner = lease.token, lease.owner

        await lease.extend()
        await lease.extend(stage.timing.long / 2)

        assert (lease.token, lease.owner) == (token, owner)
        (holder,) = await client.holders(name)
        assert (holder.token, holder.owner) == (token, owner)
        await lease.release()

    @case()
    async def test_owners_are_never_the_same(self, stage: Stage) -> None:
        """An owner is of one acquisition: not of a client, thread, task or process."""
        client = await stage.connect()
        lock = client.lock(stage.name(), ttl=stage.timing.long)
        owners = set()
        for _ in range(5):
            async with lock as lease:
                owners.add(lease.owner)

        assert len(owners) == 5

    @case(needs.processes)
    async def test_token_increases_when_the_holder_was_killed(self, stage: Stage) -> None:
        """A crash takes no token back."""
        name = stage.name()
        worker = await stage.process()
        before = await stage.call(lambda: worker.acquire(name, ttl=stage.timing.kept))
        client = await stage.connect()

        await stage.call(worker.kill)
        after = await client.lock(name, ttl=stage.timing.long).acquire(stage.timing.beyond(stage.timing.kept))

        assert after.token > before.token
        await after.release()
