"""``lockkit list``, ``wait`` and ``ping``, and the completion of names: in this process, which is quicker."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import Result

import lockkit
from lockkit.cli import app
from lockkit.cli.app import complete_name
from lockkit.testing.timing import PATIENCE
from tests.cli.support import Cli
from tests.cli.support import run_here as run
from tests.cli.terminal import Tty

# -- list --------------------------------------------------------------------------------------------------------------


def test_list_shows_who_holds_what(url: str, client: lockkit.Client) -> None:
    """Name, process, token, time left, waiters; only what is held."""
    with client.lock("seat:1", metadata={"pid2": 1}) as lease, client.lock("seat:2[red]\x1b[2J"), client.lock("other"):
        client.lock("seat:3").acquire(0).release()

        done = run("list", "seat:", "--url", url)

    assert done.exit_code == 0, done.stderr
    (first,) = (line for line in done.stdout.splitlines() if "seat:1" in line)
    for value in (os.uname().nodename, str(os.getpid()), str(lease.token)):
        assert value in first
    assert r"seat:2[red]\x1b[2J" in done.stdout
    assert "seat:3" not in done.stdout
    assert "other" not in done.stdout


@pytest.mark.parametrize("width", [60, 10])
def test_narrow_list_breaks_no_name(cli: Cli, width: int, url: str, client: lockkit.Client) -> None:
    """It leaves out columns first: the name, with its spaces, and who holds it, stay."""
    name = "orders:customer-1234567 of May"
    with client.lock(name), client.lock("short"):
        tty = Tty(cli, "list", "--url", url, columns=width)
        assert tty.end() == 0

    (row,) = (line for line in tty.seen.splitlines() if name in line)
    assert str(os.getpid()) in row
    assert "pid" in tty.seen


def test_list_shows_all_kinds_and_since_when(url: str, client: lockkit.Client) -> None:
    """Locks, permits with their slots, runs of once, in the order of names; the grant's time, not the client's."""
    with client.semaphore("pool", 3), client.semaphore("pool", 3), client.once("charge", keep=60.0) as attempt:
        with client.lock("a") as lease:
            done = run("list", "--url", url)
            listed = json.loads(run("list", "--url", url, "--json").stdout)
        attempt.done()

    found = listed["locks"]
    assert (listed["prefix"], listed["backend"]) == ("", client.url)
    assert [(row["name"], row["kind"], row["slot"]) for row in found] == [
        ("a", "lock", None), ("charge", "once", None), ("pool", "semaphore", 0), ("pool", "semaphore", 1),
    ]  # fmt: skip
    assert (found[0]["token"], found[0]["metadata"]["pid"]) == (lease.token, os.getpid())
    for words in ("lock", "once", "semaphore 0", "semaphore 1"):
        assert f" {words} " in done.stdout
    assert all(row["since"] > row["metadata"]["started"] for row in found)
    assert "unknown" not in done.stdout


def test_list_of_nothing(url: str) -> None:
    """Is no error, and says so."""
    done = run("list", "seat:", "--url", url)

    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("no lock whose name begins with 'seat:' is held at file://")
    assert json.loads(run("list", "--url", url, "--json").stdout)["locks"] == []


def test_list_of_a_url_says_where_it_belongs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other commands take it as their argument. Here it is the beginning of a name, which it could be."""
    monkeypatch.setenv("LOCKKIT_URL", url)

    done = run("list", "redis://127.0.0.1:1")

    assert done.exit_code == 0
    assert done.stderr == "lockkit: to list the locks of another backend, give its URL with --url\n"
    assert done.stdout.startswith("no lock whose name begins with 'redis://127.0.0.1:1' is held at file://")


@pytest.mark.parametrize("prefix", ["x" * 256, "é" * 128])
def test_list_refuses_what_cannot_begin_a_name(url: str, prefix: str) -> None:
    """With the status of wrong configuration."""
    done = run("list", prefix, "--url", url)

    assert done.exit_code == 78
    assert "at most 255 UTF-8 bytes" in done.stderr


# -- wait --------------------------------------------------------------------------------------------------------------


def test_wait_ends_when_the_lock_is_free(url: str, client: lockkit.Client) -> None:
    """At once if nobody holds it; and the lock is still free then."""
    assert run("wait", "a", "--url", url, "--timeout", "0").exit_code == 0
    lease = client.lock("a").acquire(0)
    done: list[Result] = []
    thread = threading.Thread(target=lambda: done.append(run("wait", "a", "--url", url)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()

    lease.release()

    thread.join(PATIENCE)
    assert [one.exit_code for one in done] == [0]
    assert client.holders("a") == []


def test_wait_gives_up_at_its_timeout(url: str, client: lockkit.Client) -> None:
    """With the status of a busy lock, in one line."""
    with client.lock("a"):
        done = run("wait", "a", "--url", url, "--timeout", "100ms")

    assert done.exit_code == 75
    assert done.stderr.startswith(f"lockkit: lock 'a' at {client.url} is still held: waited 0.")
    assert done.stderr.count("\n") == 1


def test_wait_tells_once_that_it_retries(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute without a word looks as if it hung."""
    answers: list[Any] = [lockkit.BackendUnavailable("no answer"), lockkit.BackendUnavailable("no answer"), []]

    def holders(self: lockkit.Client, name: str) -> list[Any]:
        del self, name
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    monkeypatch.setattr(lockkit.Client, "holders", holders)

    done = run("wait", "a", "--url", url)

    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "lockkit: no answer; lockkit retries\n")


# -- ping --------------------------------------------------------------------------------------------------------------


def test_ping_times_an_answer(url: str, client: lockkit.Client) -> None:
    """In words, and for programs."""
    done, found = run("ping", url), json.loads(run("ping", url, "--json").stdout)

    assert done.exit_code == 0
    assert done.stdout.startswith(f"{client.url} answers in ")
    assert found["backend"] == client.url
    assert found["round_trip_seconds"] >= 0
    assert found["first_seconds"] >= 0


# -- completion --------------------------------------------------------------------------------------------------------


def test_names_are_completed(url: str, client: lockkit.Client) -> None:
    """Those that are held; not those that a shell would run."""
    with client.lock("seat:1"), client.lock("seat:2"), client.lock("seat:$(reboot)"), client.lock("seat: 3"):
        assert complete_name("seat:", url, None) == ["seat:1", "seat:2"]
        assert complete_name("", url, None) == ["seat:1", "seat:2"]
        assert complete_name("s*", url, None) == []


@pytest.mark.parametrize("name", ["--help", "-x", "-", "--", "--url=redis://evil", "=ls", "a\n--help", "-rf", "é b"])
def test_name_that_means_something_on_a_command_line_is_not_completed(
    url: str, client: lockkit.Client, name: str
) -> None:
    """Any client chooses names: ``lockkit break <TAB>`` must not offer an option."""
    with client.lock(name), client.lock("a-b=c"), client.lock("é"):
        assert complete_name("", url, None) == ["a-b=c", "é"]
        assert complete_name(name[0], url, None) == ([name[0]] if name[0] == "é" else ["a-b=c"] * (name[0] == "a"))


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "redsi://h", "postgresql://127.0.0.1:1/x?mode=row"])
def test_no_names_without_an_answer(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And no error in the middle of the user's line."""
    assert complete_name("", url, None) == []
    assert capfd.readouterr() == ("", "")


def test_completion_does_not_wait_for_a_server_that_hangs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell gets what was found by then."""
    go_on = threading.Event()

    def names(self: lockkit.Client, prefix: str) -> Iterator[str]:
        del self
        yield f"{prefix}1"
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(lockkit.Client, "names", names)
    monkeypatch.setattr(app, "COMPLETION_SECONDS", 0.1)

    assert complete_name("a", url, None) in ([], ["a1"])
    go_on.set()


def test_shell_gets_commands_options_and_names(cli: Cli) -> None:
    """As bash asks: through the environment."""

    def words(line: str) -> list[str]:
        cli.env |= {"_LOCKKIT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        return cli.run().stdout.split()

    with lockkit.connect(f"file:{cli.home}/locks") as client, client.lock("nightly"):
        assert {"run", "list", "wait", "ping"} <= set(words("lockkit "))
        assert "--timeout" in words("lockkit wait --t")
        assert words(f"lockkit holders --url file:{cli.home}/locks n") == ["nightly"]
        assert words(f"lockkit list --url file:{cli.home}/locks n") == ["nightly"]


def test_completion_prints_no_warning(cli: Cli) -> None:
    """Of a Redlock with few nodes, or about a wrong form: it would be in the middle of the user's line."""
    for words in ("holders --url redlock://127.0.0.1:1 n", "run -- echo a", "limit a -1 b", "status a"):
        line = f"lockkit {words}"
        cli.env |= {"_LOCKKIT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}

        done = cli.run()

        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


# -- verbose -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "shown"), [([], {"WARNING"}), (["-v"], {"WARNING", "INFO"}), (["-vv"], {"WARNING", "INFO", "DEBUG"})]
)
def test_verbose_shows_what_the_library_logs(
    url: str, monkeypatch: pytest.MonkeyPatch, given: list[str], shown: set[str]
) -> None:
    """On stderr, and as before afterwards."""

    def names(self: Any, prefix: str, kind: str) -> Iterator[str]:  # noqa: ANN401 - a client
        del self, prefix, kind
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger("lockkit").log(level, "seen %s", logging.getLevelName(level))
        return iter(())

    monkeypatch.setattr(lockkit.Client, "names", names)

    done = run(*given, "list", "--url", url)

    assert {line.removeprefix("lockkit: seen ") for line in done.stderr.splitlines()} == shown
    assert "seen" not in done.stdout
    assert logging.getLogger("lockkit").level == logging.NOTSET
