"""
A pytest plugin: redis-py's tests of its ``Lock`` run on lockkit, and differ where `DIFFERENCES` says so.

A test that fails and is not in the table fails the run; one that is in the table and passes does, too; and so does a
line of the table without a test. docs/explanation/redis-py-differences.md has the same table for people.
"""

from __future__ import annotations

import importlib

import pytest
import redis.asyncio.lock
import redis.lock

_ENDLESS = "a lock without timeout is not kept for ever: it has a ttl and is renewed, so a dead holder is replaced"
_OWNER = "the owner id is always drawn at random: one that callers choose could be the same for two of them"
_SLEEPS = "a waiter is woken by the release and does not sleep in steps, so there are none to count by a patched clock"

DIFFERENCES: dict[str, dict[str, str]] = {
    "tests/test_lock.py": {
        "test_lock": _ENDLESS,
        "test_lock_token": _OWNER,
        "test_lock_token_thread_local_false": _OWNER,
        "test_blocking_timeout": _SLEEPS,
        "test_context_manager_blocking_timeout": _SLEEPS,
    },
    "tests/test_asyncio/test_lock.py": {
        "test_lock": _ENDLESS,
        "test_lock_token": _OWNER,
        "test_lock_token_thread_local_false": _OWNER,
        "test_blocking_timeout": _SLEEPS,
    },
}
"""Tests that fail, by file, and why."""


def pytest_configure() -> None:
    """Give the tests our ``Lock`` before they import it."""
    # By its bare name, from PYTHONPATH: in this run the package `tests` is redis-py's.
    adapter = importlib.import_module("redis_py_adapter")
    redis.lock.Lock = adapter.Lock  # type: ignore[misc]
    redis.asyncio.lock.Lock = adapter.AsyncLock  # type: ignore[misc]


@pytest.hookimpl(tryfirst=True)  # before -k leaves some out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the differences, and nothing else."""
    importlib.import_module("foreign_suite").expect(items, DIFFERENCES)
