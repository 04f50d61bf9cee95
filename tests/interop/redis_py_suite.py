"""
Runs redis-py's own tests of its ``Lock`` on lockkit: ``python -m tests.interop.redis_py_suite SDIST [pytest …]``.

`nox -s redis-py-suite` does it.
"""

from __future__ import annotations

import sys

from lockkit_tools.servers import RedisServer
from tests.interop.foreign_suite import run
from tests.interop.redis_py_differences import DIFFERENCES

SETTINGS = """
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
markers =
    onlynoncluster
"""
"""redis-py's own."""

if __name__ == "__main__":
    with RedisServer() as server:
        # The tests, and not the package: what is installed is tested.
        options = ("--redis-url", server.url)
        sys.exit(run("redis_py_differences", "tests/", DIFFERENCES, *options, settings=SETTINGS))
