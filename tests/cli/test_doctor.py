"""``lockkit doctor``: what it prints, and what it ends with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockkit_tools.servers import RedisServer
from tests.cli.support import Cli, run_here
from tests.cli.terminal import Tty

SECRET = "hunter2"  # noqa: S105 - of a server that lives for these tests


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server with one warning (no persistence) and nothing worse."""
    with RedisServer(password=SECRET) as made:
        yield made


@pytest.fixture
def shared(tmp_path: Path) -> str:
    """A directory that anybody may write to, which is an error."""
    path = tmp_path / "locks"
    path.mkdir()
    path.chmod(0o777)
    return f"file:{path}"


def test_shows_what_was_found_and_what_fixes_it(server: RedisServer) -> None:
    """Name, severity and the rest; the password nowhere."""
    done = run_here("doctor", server.url)

    assert (done.exit_code, done.stderr) == (0, "")
    assert f"redis://:***@{server.address}/0, ttl 30 s" in done.stdout
    assert f"warning  redis-no-persistence at {server.address}" in done.stdout
    page = "https://lockkit.readthedocs.io/en/stable/backends/redis/#"
    for part in ("appendonly is no", "frees every lock", "CONFIG SET appendonly yes", page):
        assert part in done.stdout
    assert done.stdout.endswith("\n1 warning\n")
    assert SECRET not in done.stdout


def test_terminal_gets_lines_of_its_width(cli: Cli, shared: str) -> None:
    """Sentences are broken, and begin below one another; a command stays one line, to be copied."""
    cli.env["COLUMNS"] = "50"
    tty = Tty(cli, "doctor", shared)

    tty.expect("\n         held, so lockkit refuses")
    tty.expect(f"o-w {shared.removeprefix('file:')}")
    assert tty.end() == 1


def test_nothing_found(tmp_path: Path) -> None:
    """That is said too."""
    (tmp_path / "locks").mkdir(mode=0o700)
    done = run_here("doctor", f"file:{tmp_path}/locks")

    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.endswith("\nnothing found\n")


def test_json(server: RedisServer) -> None:
    """All that is known, for programs."""
    done = run_here("doctor", server.url, "--json", "--ttl", "0.5")

    assert SECRET not in done.stdout
    diagnosis = json.loads(done.stdout)
    assert diagnosis["ttl"] == 0.5
    findings = {finding["id"]: finding for finding in diagnosis["findings"]}
    # On a machine that is very busy the round trip may be found too long as well.
    assert {"ttl-short", "redis-no-persistence"} <= findings.keys()
    assert sum(diagnosis["counts"].values()) == len(diagnosis["findings"])
    assert findings["redis-no-persistence"]["where"] == [server.address]
    assert set(findings["ttl-short"]) == {"id", "severity", "where", "seen", "risk", "fix", "page"}


def test_status_by_the_threshold(server: RedisServer, shared: str) -> None:
    """A warning fails only who asks for that, an error everybody."""
    assert run_here("doctor", server.url).exit_code == 0
    assert run_here("doctor", server.url, "--fail-on=error").exit_code == 0
    assert run_here("doctor", server.url, "--fail-on=warning").exit_code == 1
    assert run_here("doctor", shared).exit_code == 1
    assert run_here("doctor", shared, "--fail-on=warning", "--json").exit_code == 1
    assert run_here("doctor", "memory:", "--fail-on=warning").exit_code == 0


def test_wrong_password(server: RedisServer) -> None:
    """A matter of configuration."""
    done = run_here("doctor", server.url.replace(SECRET, "hunter3"))

    assert (done.exit_code, done.stdout) == (78, "")
    assert "hunter" not in done.stderr


def test_url_of_the_environment(cli: Cli, server: RedisServer) -> None:
    """So that no password stands in the list of processes."""
    cli.env["LOCKKIT_URL"] = server.url

    assert "redis-no-persistence" in cli.run("doctor").stdout


def test_nothing_that_names_a_backend_is_a_finding(cli: Cli) -> None:
    """And is said on stderr too; `--fail-on=warning` stops the deployment."""
    del cli.env["LOCKKIT_URL"]

    done = cli.run("doctor", "--json", "--fail-on=warning")

    assert done.returncode == 1
    assert "this-machine-only" in {finding["id"] for finding in json.loads(done.stdout)["findings"]}
    assert done.stderr.startswith(f"lockkit: nothing names a backend, so locks are files in {cli.home}/state/locks, ")
    assert "this machine only" in done.stderr
    assert cli.run("doctor", "file:", "--fail-on=warning").returncode == 0


def test_third_party_backend_is_not_examined(cli: Cli) -> None:
    """It says that it knows nothing, and not that all is well."""
    done = cli.run("doctor", f"faulty:{cli.home}/x")

    assert done.returncode == 0
    assert "not-examined" in done.stdout
