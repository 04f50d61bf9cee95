"""
Runs kazoo's own tests of its ``Lock`` on lockkit: ``python -m tests.interop.kazoo_suite SDIST [pytest …]``.

`nox -s kazoo-suite` does it.
"""

from __future__ import annotations

import sys

from lockkit_tools.servers import ZooKeeperServer
from tests.interop.foreign_suite import run
from tests.interop.kazoo_differences import CASES, DIFFERENCES

if __name__ == "__main__":
    with ZooKeeperServer() as server:
        # All of kazoo: its tests are a part of it, and import their neighbours.
        tests = [f"{file}::{CASES}" for file in DIFFERENCES]
        sys.exit(run("kazoo_differences", "kazoo/", tests, LOCKKIT_KAZOO_SUITE_SERVER=server.address))
