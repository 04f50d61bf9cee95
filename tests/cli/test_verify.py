"""`lockkit verify` runs the suite in a place of its own, says what holds, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
import sqlalchemy as sa

import lockkit
from lockkit.testing.verification import scratch_space, verify
from lockkit.url import parse
from lockkit_tools.history import MODELS, check, read
from lockkit_tools.servers import RedisNodes, RedisServer, require
from tests.cli.support import Cli

FEW = ("--only", "owners_are_never_the_same", "--face=sync")


def test_report_says_what_holds_and_what_is_not_promised(cli: Cli) -> None:
    """
    By what it is about; with 0, as all holds that is promised.

    The settings of pytest do not count, neither those of the directory nor those of the environment. And the directory
    stays as it was, which is also where temporary files go: cases write some, this one counts in one.
    """
    (cli.home / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    cli.env["PYTEST_ADDOPTS"] = "--no-such-option"
    before = sorted(cli.home.iterdir())
    cases = "ping or processes_exclude or owners_are_never or actors_of_one_client_exclude"
    done = cli.run("verify", "memory://", "--only", cases)

    assert done.returncode == 0, done.stderr
    assert sorted(cli.home.iterdir()) == before
    assert done.stdout.startswith("memory://\n")
    assert "Exclusion" in done.stdout
    assert "not promised: it excludes only within one process" in done.stdout
    assert "conforms: " in done.stdout
    assert ", 0 failed, " in done.stdout
    assert done.stderr == ""


def test_json_names_every_case(cli: Cli) -> None:
    """With its face, promise and outcome; one face can be chosen."""
    done = cli.run("verify", "memory://", "--only", "ping or processes_exclude", "--face=sync", "--json")

    found = json.loads(done.stdout)
    assert (found["backend"], found["conforms"], found["complete"]) == ("memory://", True, True)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 0, 0)
    assert found["not_promised"] == len(found["cases"]) - 1 >= 1
    (passed,) = [case for case in found["cases"] if case["outcome"] == "passed"]
    assert "ping" in passed["name"]
    assert (passed["face"], passed["reason"]) == ("sync", "")
    assert all(case["promise"] and case["group"] and case["backend_part"] for case in found["cases"])


def use_as_the_suite_does(url: str) -> None:
    """Lock something in the suite's own place, and have that removed."""
    place = scratch_space(parse(url), {})
    with lockkit.connect(place.url.text, **place.options) as client, client.lock("a"):
        pass
    place.erase()


@pytest.mark.parametrize("there", [False, True])
def test_directory_is_as_it_was(tmp_path: Path, *, there: bool) -> None:
    """The suite has one of its own inside, so on the same file system; whatever the directory is called."""
    directory = tmp_path / "locks? 50%"
    if there:
        directory.mkdir(mode=0o700)

    use_as_the_suite_does(f"file://{quote(str(directory))}")

    assert directory.exists() is there
    assert not there or [*directory.iterdir()] == []


def test_options_of_the_url_count() -> None:
    """They are part of what is checked."""
    place = scratch_space(parse("file:///nowhere/locks?group=1&ttl=5"), {})

    assert place.url.path.startswith("/nowhere/locks/lockkit_verify_")
    assert dict(place.url.query) == {"group": "1", "ttl": "5"}


def test_database_is_as_it_was(tmp_path: Path) -> None:
    """The suite has a table of its own."""
    path = tmp_path / "locks.db"
    use_as_the_suite_does(f"sqlite:///{path}")

    engine = sa.create_engine(f"sqlite:///{path}")
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()


def test_report_outlives_a_server_that_is_not_there_at_the_end(cli: Cli) -> None:
    """Minutes of work are not lost because something could not be removed."""
    (cli.home / "locks.erase").touch()

    done = cli.run("verify", f"faulty://{cli.home}/locks", *FEW)

    assert done.returncode == 0, done.stderr
    assert "conforms: " in done.stdout
    assert "and removed it" not in done.stdout
    assert "could not be removed: no answer to erase" in done.stderr


def test_redis_is_as_it_was(cli: Cli) -> None:
    """The suite has a prefix of its own; a password is shown nowhere."""
    require("redis", local=True)
    with (
        RedisServer(password="s3cret") as server,  # noqa: S106 - of a throw-away server
        redis.Redis(port=server.port, password="s3cret") as data,  # noqa: S106 - as above
    ):
        data.set("lockkit:mine", "stays")
        done = cli.run("verify", server.url, *FEW)
        assert data.keys() == [b"lockkit:mine"]

    assert done.returncode == 0, done.stdout + done.stderr
    assert "and removed it" in done.stdout
    assert "s3cret" not in done.stdout + done.stderr


def test_history_of_contending_callers_is_linearizable(cli: Cli, tmp_path: Path) -> None:
    """On a real server: threads, tasks and processes, locks and semaphores; every call, in Jepsen's format."""
    require("redis", local=True)
    only = "processes_exclude or critical_section"
    with RedisServer() as server:
        done = cli.run("verify", server.url, f"--only={only}", f"--history={tmp_path / 'h.edn'}")

    assert done.returncode == 0, done.stdout + done.stderr
    locks = read((tmp_path / "h.edn").read_text())
    ended = [[call.returned is not None for call in calls] for calls in locks.values()]
    semaphores = {name for name, calls in locks.items() if calls[0].limit == 2}
    assert sorted(map(len, ended)) == [36, 36, 240, 240]
    assert all(map(all, ended))
    assert len(semaphores) == 2
    for name, calls in locks.items():
        assert check(calls, MODELS["semaphore" if name in semaphores else "fenced-mutex"]), name


def test_backend_that_lets_two_in_does_not_conform(cli: Cli, tmp_path: Path) -> None:
    """The report names the case, what must hold and what was seen; the checker of histories finds it, too."""
    path = tmp_path / "h.json"
    done = cli.run("verify", f"sieve://{cli.home}/locks", "--only=clients_exclude", "--face=sync", f"--history={path}")

    assert done.returncode == 1
    assert "does not conform: " in done.stdout
    assert "  must hold: " in done.stdout
    assert "  seen: " in done.stdout
    assert "  the backend: `" in done.stdout
    (calls,) = read(path.read_text()).values()
    assert check(calls, MODELS["fenced-mutex"]).word == "invalid"


def test_redlock_nodes_are_as_they_were() -> None:
    """Each of them, but for the marker that says that they belong together."""
    require("redlock", local=True)
    with RedisNodes(3) as nodes:
        use_as_the_suite_does(nodes.url)
        for node in nodes.nodes:
            with redis.Redis(port=node.port) as data:
                assert data.keys("*verify*") == []


def test_what_cannot_be_run_is_told(cli: Cli) -> None:
    """Before any case, with the status of its kind, and by a search for cases that finds none."""
    with pytest.raises(lockkit.BackendUnavailable, match=r"127\.0\.0\.1:1"):
        verify("redis://127.0.0.1:1")
    with pytest.raises(lockkit.ConfigurationError, match="nonsense"):
        verify("nonsense://")
    with pytest.raises(lockkit.ConfigurationError, match=r"written to /nowhere/h\.edn: No such file"):
        verify("memory://", history=Path("/nowhere/h.edn"))

    done = cli.run("verify", "memory://", "--only", "no_such_case")

    assert (done.returncode, done.stdout) == (78, "")
    assert "see whether one has 'no_such_case' in its name" in done.stderr
    assert "Traceback" not in done.stderr
