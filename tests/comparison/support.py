"""What the tests of the comparison share: how long, and a pause that is over as soon as it has been felt."""

from __future__ import annotations

import redis

from lockkit_tools.servers import wait_until

PATIENCE = 60.0
"""Seconds that anything may take on a busy machine."""

LONG = 120.0
"""A ttl that does not run out while a test runs."""


def run_out(client: redis.Redis, key: str) -> None:
    """
    Let the ttl of a key run out now: whoever counted on it has been paused for as long.

    The server itself ends the key. Only the waiting is left out.
    """
    assert client.pexpire(key, 1), f"{key} is not there"
    wait_until(lambda: f"{key} is still there" if client.exists(key) else None)
