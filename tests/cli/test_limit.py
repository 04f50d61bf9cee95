"""``lockkit limit``."""

from __future__ import annotations

import json
from pathlib import Path

import lockkit
from tests.cli.support import run_here


def test_cap_is_shown_set_and_removed(tmp_path: Path) -> None:
    """For the clients of an application, whose own limit is larger."""
    url = f"file://{tmp_path}/locks"
    assert "has no cap" in run_here("limit", "api", "--url", url).stdout

    assert "is capped at 1" in run_here("limit", "api", "1", "--url", url).stdout

    with lockkit.connect(url) as client, client.semaphore("api", limit=5):
        assert client.semaphore("api", limit=5).try_acquire() is None
    assert "new permits are paused" in run_here("limit", "api", "0", "--url", url).stdout
    with lockkit.connect(url) as client:
        assert client.semaphore("api", limit=5).available() == 0
    shown = json.loads(run_here("limit", "api", "--json", "--url", url).stdout)
    assert (shown["name"], shown["cap"]) == ("api", 0)
    assert "has no cap" in run_here("limit", "api", "none", "--url", url).stdout
