"""``lockkit holders`` and ``lockkit break``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

import lockkit
from lockkit_tools.servers import RedisServer
from tests.cli.support import PATIENCE, Cli, run_here
from tests.cli.terminal import COMMANDS, Tty


@pytest.fixture
def lease(url: str) -> Iterator[lockkit.Lease]:
    """Lock ``a``, held by this process."""
    with lockkit.connect(url) as client:
        lock = client.lock("a", metadata={"ticket": "OPS-7", "screen": "\x1b[2J[red]"}, raise_on_lost=False)
        with lock as lease:
            yield lease


def test_holders_shows_who_holds(url: str, lease: lockkit.Lease) -> None:
    """Owner, token, process and what the application added; control characters do not reach the terminal."""
    done = run_here("holders", "a", "--url", url)

    assert done.exit_code == 0
    for value in (lease.owner, str(lease.token), str(os.getpid()), "OPS-7", r"\x1b[2J[red]"):
        assert value in done.stdout
    assert "\x1b" not in done.stdout


def test_holders_as_json(tmp_path: Path, url: str, lease: lockkit.Lease) -> None:
    """The same for programs."""
    done = run_here("holders", "a", "--url", url, "--json")

    found = json.loads(done.stdout)
    assert (found["name"], found["backend"]) == ("a", f"file://{tmp_path}/locks")
    (holder,) = found["holders"]
    assert (holder["owner"], holder["token"]) == (lease.owner, lease.token)
    assert 0 < holder["remaining"] <= 30
    assert holder["metadata"]["screen"] == "\x1b[2J[red]"


def test_holders_of_a_free_lock(url: str) -> None:
    """Free is no error."""
    done = run_here("holders", "a", "--url", url)

    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("nobody holds 'a' at file://")
    assert json.loads(run_here("holders", "a", "--url", url, "--json").stdout)["holders"] == []


def test_break_with_yes_frees_the_lock(tmp_path: Path, url: str, lease: lockkit.Lease) -> None:
    """The holder no longer holds, and the next token is higher. There is nothing to ask about a free lock."""
    done = run_here("break", "a", "--yes", "--url", url)

    assert (done.exit_code, done.stdout) == (0, f"broke 'a' at file://{tmp_path}/locks\n")
    assert not lease.confirm()
    free, as_json = run_here("break", "a", "--url", url), run_here("break", "a", "--yes", "--json", "--url", url)
    assert (free.exit_code, free.stdout) == (0, f"nobody held 'a' at file://{tmp_path}/locks\n")
    assert json.loads(as_json.stdout)["broken"] is False
    with lockkit.connect(url) as client, client.lock("a") as following:
        assert following.token > lease.token


def test_break_frees_one_permit(url: str) -> None:
    """The others stay held, and so does the lock of that name; ``holders`` shows both kinds."""
    with lockkit.connect(url) as client, client.lock("pool") as lock, client.semaphore("pool", 2) as first:
        second = client.semaphore("pool", 2).acquire()
        kinds = [
            row["kind"] for row in json.loads(run_here("holders", "pool", "--url", url, "--json").stdout)["holders"]
        ]

        done = run_here("break", "pool", "--permit", "1", "--yes", "--url", url)
        again = run_here("break", "pool", "--permit", "1", "--yes", "--url", url)

        assert kinds == ["lock", "semaphore", "semaphore"]
        assert (done.exit_code, done.stdout[:34]) == (0, "broke permit 1 of semaphore 'pool'")
        assert (again.exit_code, again.stdout[:40]) == (0, "nobody held permit 1 of semaphore 'pool'")
        assert not second.confirm()
        assert first.confirm()
        assert lock.confirm()
        lock.release()
        nobody = run_here("break", "pool", "--yes", "--url", url)
        assert nobody.exit_code == 1
        assert "'pool' is a semaphore, of which permits are held (0): give --permit N" in nobody.stderr


def test_break_leaves_data_of_an_application_alone() -> None:
    """With an empty prefix, unless by force; hostile text beside it breaks neither list nor watch."""
    with RedisServer() as server, Redis(host=server.host, port=server.port) as redis:
        redis.set("user:1", "kept")
        redis.set("x", "o", px=60_000)
        redis.set("{x}:fence", "1795000000000000 o " + "[" * 4000)
        url = f"{server.url}?prefix="

        refused = run_here("break", "user:1", "--yes", "--url", url)
        kept = redis.get("user:1")
        listed = json.loads(run_here("list", "--json", "--url", url).stdout)["locks"]
        watched = run_here("watch", "--once", "--url", url)
        forced = run_here("break", "user:1", "--yes", "--force", "--url", url)

        assert (refused.exit_code, kept) == (1, b"kept")
        assert "may be data of an application" in refused.stderr
        assert "--force" in refused.stderr
        assert [(row["name"], row["metadata"]["text"][:3], row["since"]) for row in listed] == [("x", "[[[", 1795e6)]
        assert "appeared   'x'" in watched.stdout
        assert (forced.exit_code, redis.get("user:1")) == (0, None)


def test_break_without_a_terminal_needs_yes(url: str, lease: lockkit.Lease) -> None:
    """A script must say that it means it."""
    done = run_here("break", "a", "--url", url)

    assert done.exit_code == 2
    assert "give --yes" in done.stderr
    assert lease.confirm()


def test_break_spares_a_holder_that_was_not_shown(cli: Cli, url: str) -> None:
    """The one that was shown has ended while the user read the question."""
    with lockkit.connect(url) as client:
        shown = client.lock("a", metadata="the first").acquire(0)
        tty = Tty(cli, "break", "a", "--url", url)
        tty.expect("the first")
        tty.expect("[y/N]")
        shown.release()
        with client.lock("a") as lease:
            tty.type("y\n")

            tty.expect("'a' has another holder by now: not broken")
            assert tty.end() == 1
            assert lease.confirm()


def test_signal_ends_the_question(cli: Cli, url: str, lease: lockkit.Lease) -> None:
    """With its own status: it is no answer."""
    tty = Tty(cli, "break", "a", "--url", url)
    tty.expect("[y/N]")

    tty.process.send_signal(signal.SIGTERM)
    try:
        tty.process.wait(PATIENCE / 4)
    except subprocess.TimeoutExpired:
        # It came in the last microseconds before the read, and Python runs handlers between instructions only.
        tty.process.send_signal(signal.SIGTERM)

    assert tty.end() == 128 + signal.SIGTERM
    assert lease.confirm()


@pytest.mark.parametrize("where", ["pipe", "terminal"])
def test_nothing_of_a_holder_is_cut(cli: Cli, url: str, where: str) -> None:
    """In a pipe a value stays on its line, for grep; a narrow terminal folds it."""
    text = "https://ci.example/" + "0123456789" * 12
    with lockkit.connect(url) as client, client.lock("a" * 150, metadata=text):
        for args in (["holders", "a" * 150], ["list"] if where == "pipe" else ["watch", "--once"]):
            if where == "pipe":
                shown = cli.run(*args, "--url", url).stdout
                assert any(text in line or "a" * 150 in line for line in shown.splitlines())
            else:
                cli.env["COLUMNS"] = "70"
                tty = Tty(cli, *args, "--url", url)
                assert tty.end() == 0
                shown = tty.seen
                assert shown.count("a") > 150
            assert "…" not in shown


@pytest.mark.parametrize("name", ["orders:customer-1234567 of May, the second half of it", "a"])
def test_narrow_terminal_breaks_no_name(cli: Cli, url: str, name: str) -> None:
    """The backend gets a line of its own, where both are too long for one."""
    with lockkit.connect(url) as client, client.lock(name):
        tty = Tty(cli, "holders", name, "--url", url, columns=60)
        assert tty.end() == 0

    shown = COMMANDS.sub("", tty.seen).splitlines()
    assert shown[:2] == [repr(name), f"at file://{cli.home}/locks"]


@pytest.mark.parametrize("answer", ["y", ""])
def test_break_asks_on_a_terminal(cli: Cli, url: str, lease: lockkit.Lease, answer: str) -> None:
    """It shows the holder, and takes no answer for a no."""
    tty = Tty(cli, "break", "a", "--url", url)
    tty.expect("OPS-7")
    tty.expect("[y/N]")

    tty.type(f"{answer}\n")

    assert tty.end() == (0 if answer == "y" else 1)
    assert lease.confirm() is (answer != "y")
