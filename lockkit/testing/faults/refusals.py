"""A server that answers, and refuses: a wrong password, missing rights, no memory or disk left."""

from __future__ import annotations

import pytest

import lockkit
from lockkit.testing.conformance.base import FaceDriver, case
from lockkit.testing.faults.base import FaultCases, Faults, during_fault, expect_message
from lockkit.testing.stopwatch import Stopwatch
from lockkit.testing.target import Target
from lockkit.testing.timing import PATIENCE


class Refusals(FaultCases):
    """What a retry cannot fix raises `ConfigurationError` at once, and shows no password."""

    @case(faults=["wrong_password"])
    async def test_wrong_password(self, driver: FaceDriver, faults: Faults) -> None:
        """An error of configuration."""
        await self._refused(driver, faults, await driver.call(faults.wrong_password))

    @case(faults=["without_rights"])
    async def test_missing_rights(self, driver: FaceDriver, faults: Faults) -> None:
        """Another one."""
        await self._refused(driver, faults, await driver.call(faults.without_rights))

    @staticmethod
    async def _refused(driver: FaceDriver, faults: Faults, target: Target) -> None:
        client, name = await driver.connect(target), driver.name()
        watch = Stopwatch()
        with pytest.raises(lockkit.ConfigurationError) as caught:
            await client.lock(name, ttl=driver.timing.long).acquire(4 * PATIENCE)
        assert watch.stop() < PATIENCE
        expect_message(caught.value, faults.secret)
        assert faults.secret not in repr(client)
        # Nor has the attempt left anything.
        other = await driver.connect()
        await driver.pass_through(other, name)

    @case(faults=["fill"])
    async def test_full_server(self, driver: FaceDriver, faults: Faults) -> None:
        """It grants nothing, which may pass; what is held can be renewed and released."""
        client = await driver.connect()
        ttl = driver.timing.long
        lease = await client.lock(driver.name(), ttl=ttl).acquire(PATIENCE)

        async with during_fault(driver, faults.fill, faults.heal):
            with pytest.raises(lockkit.BackendUnavailable) as caught:
                await client.lock(driver.name(), ttl=ttl).acquire(0.5)
            expect_message(caught.value, faults.secret)
            assert lease.held
            await lease.extend()
            await lease.release()

        await driver.pass_through(client, driver.name())
