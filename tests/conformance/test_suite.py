"""
The public conformance suite on every backend of the registry, both faces.

Without ``--nightly`` some cases run on some targets only: `tests.conformance.selection`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from uuid import uuid4

import pytest

from lockkit.testing.conformance import ConformanceSuite, Target
from lockkit.testing.conformance.base import FaceDriver, case
from lockkit.testing.timing import PATIENCE
from tests.conformance.loops import EventLoops
from tests.conformance.selection import EngineCases, is_daily
from tests.conformance.targets import TARGETS, Entry


class TestConformance(ConformanceSuite, EngineCases, EventLoops):
    """All cases, with those that the engine alone decides, each on all targets that it is to run on."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each case its targets, and its faces."""
        nightly = metafunc.config.getoption("nightly")
        only = metafunc.config.getoption("target") or [entry.id for entry in TARGETS]
        case = metafunc.function.__name__
        chosen = [entry for entry in TARGETS if entry.id in only and (nightly or is_daily(case, entry.id))]
        metafunc.parametrize("entry", chosen, ids=[entry.id for entry in chosen])
        super().pytest_generate_tests(metafunc)

    @case()
    async def test_built_in_backends_know_since_when(self, driver: FaceDriver) -> None:
        """Others may not; of readers and permits too, and after a downgrade the time stays."""
        client, other = await driver.connect(), await driver.connect()
        name, ttl = driver.name(), driver.timing.long
        before = time.time() - 1.0  # servers of the tests have this machine's clock, ZooKeeper's in milliseconds
        async with client.lock(f"{name}:alone", ttl=ttl), client.semaphore(name, limit=2, ttl=ttl) as permit:
            shares = driver.capabilities.shared_mode
            lock = client.rwlock(name, ttl=ttl).write() if shares else client.lock(name, ttl=ttl)
            lease = await lock.acquire(PATIENCE)
            found = [*await other.holders(f"{name}:alone"), *await other.holders(name)]
            found += await other.semaphore(name, limit=2).holders()
            assert [holder.owner for holder in found][1:] == [lease.owner, permit.owner]
            for holder in found:
                assert holder.since is not None
                assert before <= holder.since <= time.time() + 1.0
                assert "lockkit:since" not in holder.metadata
            if driver.capabilities.metadata_update:
                await lease.update({"x": 1})
            if driver.capabilities.downgrade:
                await lease.downgrade()
            (later,) = await other.holders(name)
            assert (later.since, later.metadata["pid"]) == (found[1].since, os.getpid())
            await lease.release()

    @pytest.fixture
    def lockkit_target(self, entry: Entry, service_url: Callable[[Entry], str]) -> Target:
        """The target of this test, its service running."""
        url = service_url(entry)
        if entry.id in {"memory", "file"}:  # a case sets the wall clock forward, and the tokens never go back
            url = f"{url}-{uuid4().hex}"
        return Target(url, entry.options)
