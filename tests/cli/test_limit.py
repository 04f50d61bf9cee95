"""``lockkit limit``."""

from __future__ import annotations

import json

import lockkit
from tests.cli.support import Cli


def test_cap_is_shown_set_and_removed(cli: Cli) -> None:
    """For the clients of an application, whose own limit is larger."""
    url = f"file://{cli.home}/locks"
    assert "has no cap" in cli.run("limit", "api", "--url", url).stdout

    assert "is capped at 1" in cli.run("limit", "api", "1", "--url", url).stdout

    with lockkit.connect(url) as client, client.semaphore("api", limit=5):
        assert client.semaphore("api", limit=5).try_acquire() is None
    assert "new permits are paused" in cli.run("limit", "api", "0", "--url", url).stdout
    with lockkit.connect(url) as client:
        assert client.semaphore("api", limit=5).available() == 0
    shown = json.loads(cli.run("limit", "api", "--json", "--url", url).stdout)
    assert (shown["name"], shown["cap"]) == ("api", 0)
    assert "has no cap" in cli.run("limit", "api", "none", "--url", url).stdout


def test_wrong_caps_and_backends(cli: Cli) -> None:
    """In the words of the command line."""
    for cap in ("x", "-1", "1.5", "1001"):
        done = cli.run("limit", "api", "--url", f"file://{cli.home}/locks", "--", cap)
        assert done.returncode in {2, 78}
        assert "Traceback" not in done.stderr
        assert cap in done.stderr
    done = cli.run("limit", "api", "1", "--url", "redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3")
    assert done.returncode == 78
    assert "cannot cap" in done.stderr
