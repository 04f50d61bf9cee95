"""Many processes take several locks in opposite orders; the witness stands outside of the backends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockkit.testing.witness import Witness
from lockkit_tools.servers import RedisServer
from tests.primitives import opposite_orders

SECONDS = 110.0


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A server."""
    with RedisServer() as server:
        yield server


@pytest.mark.parametrize(
    ("kinds", "rounds"), [(("redis",), 63), (("file", "redis"), 20)], ids=["redis", "file and redis"]
)
def test_opposite_orders_never_deadlock(
    kinds: tuple[str, ...], rounds: int, redis: RedisServer, tmp_path: Path
) -> None:
    """A thousand rounds of sixteen processes: all come to their end, and never two inside with one lock."""
    urls = [redis.url if kind == "redis" else f"file://{tmp_path}/locks" for kind in kinds]
    program = [sys.executable, opposite_orders.__file__, str(tmp_path), str(rounds), *urls]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)

    assert done.returncode == 0, done.stderr
    stays: Counter[str] = Counter()
    for number in range(opposite_orders.PROCESSES):
        stays.update(dict.fromkeys(opposite_orders.pair(number), rounds))
    for name, count in stays.items():
        Witness(tmp_path / name).report().expect_exclusion(count)
