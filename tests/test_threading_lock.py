"""The adapter for ``threading.Lock``: CPython's own tests, where Python comes with its package ``test``, and more."""

from __future__ import annotations

import importlib
import itertools
import threading
import unittest
from contextlib import suppress
from types import ModuleType

import pytest

import lockkit
from lockkit.sync import ThreadingLock

LOCK_TESTS: ModuleType | None = None
with suppress(ImportError):
    LOCK_TESTS = importlib.import_module("test.lock_tests")

# Private: it makes a held lock free, for the child of a fork, and a lock at a server is not freed by that.
NOT_PROMISED = {"test_at_fork_reinit"}
CASES = [] if LOCK_TESTS is None else [*unittest.TestLoader().getTestCaseNames(LOCK_TESTS.LockTests)]


@pytest.mark.filterwarnings("ignore:lease of lock .* was dropped without release:ResourceWarning")
@pytest.mark.parametrize("name", [case for case in CASES if case not in NOT_PROMISED])
def test_cpython_lock_test(name: str) -> None:
    """Some of them drop a lock that is held: `threading.Lock` says nothing then, lockkit warns."""
    assert LOCK_TESTS is not None
    result = unittest.TestResult()
    numbers = itertools.count()
    # They count threads: that of the client is to be there before, and none to be started for renewals.
    with lockkit.connect("memory://", ttl=1000) as client, client.lock(f"cpython-{name}", renew=False):

        def make() -> ThreadingLock:
            return client.lock(f"cpython-{name}-{next(numbers)}", renew=False).as_threading_lock()

        case = type("Adapter", (LOCK_TESTS.LockTests,), {"locktype": staticmethod(make)})
        case(name).run(result)

    assert result.testsRun == 1
    assert [*result.failures, *result.errors] == []


def test_close_during_a_block_is_loss() -> None:
    """Another client may hold the lock at once: leaving must not look as if the block had been protected."""
    client = lockkit.connect("memory://")

    with pytest.raises(lockkit.LockLost, match="client, session"), client.lock("a").as_threading_lock():
        client.close()


def test_condition_on_it_leaves_it_free() -> None:
    """A wait releases the lock inside the block, and acquires it again."""
    with lockkit.connect("memory://threading-condition") as client:
        lock = client.lock("a").as_threading_lock()
        condition = threading.Condition(lock)  # type: ignore[arg-type] # for its signatures
        with condition:
            waited = condition.wait(0.01)
            assert lock.locked()
        assert not waited
        assert not lock.locked()


def test_reentrant_block_that_releases_early_leaves_the_outer_one_its_lock() -> None:
    """As a block of the lock itself does; all is given back at the end."""
    with lockkit.connect("memory://threading-reentrant") as client:
        lock = client.lock("a", reentrant=True).as_threading_lock()
        with lock:
            with lock:
                lock.release()
            assert lock.locked()
        assert not lock.locked()
