"""
A pytest plugin: kazoo's tests of its ``Lock`` run on lockkit, and differ where `DIFFERENCES` says so.

A test that fails and is not in the table fails the run; one that is in the table and passes does, too; and so does a
line of the table without a test. docs/explanation/kazoo-differences.md has the same table for people.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any, NamedTuple

import kazoo.client
import pytest

CASES = "KazooLockTests"

_STAYS = "there is no lock that stays when its holder is gone: a dead holder would keep it for ever"

DIFFERENCES = {"kazoo/tests/test_lock.py": {"test_lock_ephemeral": _STAYS}}
"""Tests that fail, by file, and why."""

ELSEWHERE = {"test_read_lock", "test_write_lock", "test_rw_lock"}
"""Tests of kazoo's ``ReadLock`` and ``WriteLock``, which lockkit has no counterpart of."""


def pytest_configure() -> None:
    """Give the tests our ``Lock``, and our server in place of the cluster that they would start."""
    kazoo.client.Lock = importlib.import_module("kazoo_adapter").Lock
    # kazoo's own cluster, which is not started, and needs packages for its certificates.
    common: Any = ModuleType("kazoo.testing.common")
    common.ZookeeperCluster = None
    sys.modules[common.__name__] = common
    harness: Any = importlib.import_module("kazoo.testing.harness")
    harness.get_global_cluster = lambda: _Cluster([_Server(os.environ["LOCKKIT_KAZOO_SUITE_SERVER"])])


class _Server(NamedTuple):
    """As the tests see it."""

    address: str
    running: bool = True


class _Cluster(list[_Server]):
    """What kazoo's tests would start and end themselves."""

    def terminate(self) -> None:
        """Leave it: `tests.interop.kazoo_suite` ends it."""


@pytest.hookimpl(tryfirst=True)  # before -k leaves some out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the differences, and nothing else."""
    items[:] = [item for item in items if item.name not in ELSEWHERE]
    importlib.import_module("foreign_suite").expect(items, DIFFERENCES)
