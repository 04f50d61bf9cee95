"""``lockkit watch``: what it makes of looks, the table and its keys, the lines, and the real thing in a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lockkit
from lockkit.backend import Holder
from lockkit.cli import sightings
from lockkit.cli.holders import Held
from lockkit.cli.sightings import Look, Looker, Sighting, Watched
from lockkit.cli.watch import Breaking, View, draw, split_url
from lockkit_tools.servers import RedisServer, require
from tests.cli.support import Cli, run_here
from tests.cli.terminal import Tty

TTL = 30.0
INTERVAL = "--interval=100ms"
CTRL_C = "\x03"
CTRL_Z = "\x1a"
UP = "\x1b[A"
DOWN = "\x1b[B"


def held(name: str, owner: str = "ann", *, remaining: float | None = TTL, **more: Any) -> Held:
    """One holder of one lock."""
    return Held(name, "lock", Holder(owner, more.pop("token", 1), remaining, **more))


def looked(at: float, *held: Held, took: float = 0.0) -> Look:
    """A look that ended at a time, and saw these."""
    return Look([Sighting(one, at - took, at) for one in held], at, 1e9 + at, cut=False)


def kinds(watched: Watched, look: Look) -> list[tuple[str, str]]:
    """What a look has changed."""
    return [(change.event, change.held.name) for change in watched.see(look)]


# -- changes -----------------------------------------------------------------------------------------------------------


def test_holders_appear_change_and_go() -> None:
    """Each is one event, in the order of the names."""
    watched = Watched()
    assert kinds(watched, looked(0, held("b"), held("a"))) == [("appeared", "a"), ("appeared", "b")]
    assert kinds(watched, looked(1, held("b", remaining=29), held("a", remaining=29))) == []

    (changed, released) = watched.see(looked(2, held("a", "bob", token=2)))

    assert (changed.event, changed.held.holder.owner) == ("changed", "bob")
    assert changed.previous is not None
    assert changed.previous.owner == "ann"
    assert (released.event, released.held.name) == ("released", "b")
    assert watched.see(looked(3)) == [("released", changed.held, None)]


def reader(owner: str, token: int = 1) -> Held:
    """One of several holders of ``a``."""
    return held("a", owner, mode="shared", token=token)


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(
            [(looked(0, held("a", token=1)), ["appeared"]), (looked(1, held("a", token=2)), ["changed"])],
            id="same owner with another token: a foreign client may use one owner id for ever",
        ),
        pytest.param(
            [
                (looked(0, reader("ann"), reader("bob", 2)), ["appeared", "appeared"]),
                (looked(1, reader("bob", 2), reader("eve")), ["released", "appeared"]),
            ],
            id="readers come and go one by one: none follows another",
        ),
        pytest.param(
            [
                (looked(0, held("a", remaining=30)), ["appeared"]),
                (looked(5, held("a", remaining=25.1), took=0.2), []),
                (looked(10, held("a", remaining=30), took=0.2), ["renewed"]),
            ],
            id="a renewal moves the expiry by more than the time that the question took",
        ),
        pytest.param(
            [
                (looked(0, held("a", remaining=28.0)), ["appeared"]),
                (looked(0.9, held("a", remaining=28.0)), []),
                (looked(5, held("a", remaining=29.0)), ["renewed"]),
            ],
            id="whole seconds, as of etcd: the time left may stay the same for a second",
        ),
        pytest.param(
            [
                (looked(0, held("a", remaining=30)), ["appeared"]),
                (looked(19, held("a", remaining=11)), []),
                (looked(21, held("a", remaining=9)), ["expiring"]),
                (looked(22, held("a", remaining=8)), []),
                (looked(23, held("a", remaining=30)), ["renewed"]),
                (looked(45, held("a", remaining=8)), ["expiring"]),
            ],
            id="expiring is said once below a third of the ttl, and again after a renewal",
        ),
    ],
)
def test_look_has_these_events(looks: list[tuple[Look, list[str]]]) -> None:
    """In comparison with those before it."""
    watched = Watched()
    for look, expected in looks:
        assert kinds(watched, look) == [(kind, "a") for kind in expected]


def test_lock_that_never_ends_is_not_expiring() -> None:
    """And nothing can be told of its renewals."""
    watched = Watched()
    watched.see(looked(0, held("a", remaining=None)))

    assert kinds(watched, looked(100, held("a", remaining=None))) == []
    (record,) = watched.records
    assert (record.remaining(101), record.missed) == (None, None)


def test_missed_renewals_are_counted_only_when_their_distance_is_known() -> None:
    """From the renewals that were seen: one that is a little late is not missed."""
    watched = Watched()
    watched.see(looked(0, held("a", remaining=30)))
    watched.see(looked(9, held("a", remaining=21)))
    (record,) = watched.records
    assert record.missed is None

    missed: dict[int, int | None] = {}
    for at in (10, 20, 30):
        watched.see(looked(at, held("a", remaining=30)))
        missed[at] = record.missed
    for at in (39, 41, 43, 51, 53, 59):
        watched.see(looked(at, held("a", remaining=60 - at)))
        missed[at] = record.missed

    assert missed == {10: 0, 20: 0, 30: 0, 39: 0, 41: 0, 43: 1, 51: 1, 53: 2, 59: 2}


# -- which locks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "url", "patterns"),
    [
        ([], None, []),
        (["seat:1"], None, ["seat:1"]),
        (["seat:*", "a"], None, ["seat:*", "a"]),
        (["redis://h:1/0", "seat:*"], "redis://h:1/0", ["seat:*"]),
        (["file:", "a"], "file:", ["a"]),
        (["postgresql+psycopg://h/d"], "postgresql+psycopg://h/d", []),
        (["nosuch://h"], "nosuch://h", []),
    ],
)
def test_url_is_told_from_names(given: list[str], url: str | None, patterns: list[str]) -> None:
    """By the scheme of a backend, or by //: names may have colons."""
    assert split_url(given) == (url, patterns)


def seen(look: Look) -> set[str]:
    """The locks of a look."""
    return {sighting.held.name for sighting in look.sightings}


def test_patterns_and_names(client: lockkit.Client) -> None:
    """``*`` and ``?`` are wildcards, and nothing else is; what is free is not there."""
    with client.lock("seat:1"), client.lock("seat:12"), client.lock("seat:[1]"), client.lock("x"):
        assert seen(Looker(client, []).look()) == {"seat:1", "seat:12", "seat:[1]", "x"}
        assert seen(Looker(client, ["seat:?"]).look()) == {"seat:1"}
        assert seen(Looker(client, ["*2", "x", "free"]).look()) == {"seat:12", "x"}
        assert seen(Looker(client, ["seat:[1]"]).look()) == {"seat:[1]"}


def test_too_many_locks_are_cut(client: lockkit.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look says so; those that were seen stay, so that they do not seem to come and go."""
    monkeypatch.setattr(sightings, "NAMES_MAX", 2)
    looker = Looker(client, [])
    with client.lock("1"), client.lock("2"):
        assert not looker.look().cut
        with client.lock("0"), client.lock("3"):
            look = looker.look()

    assert (seen(look), look.cut) == ({"1", "2"}, True)


def test_break_spares_a_holder_that_the_user_was_not_shown(client: lockkit.Client) -> None:
    """It may have been granted while the user read the question."""
    looker = Looker(client, [])
    with client.lock("a"):
        assert looker.break_lock("a", {"another"}) == "'a' has another holder by now: not broken"
        (holder,) = client.holders("a")
    lease = client.lock("b", raise_on_lost=False).acquire(10)
    (holder,) = client.holders("b")

    assert looker.break_lock("b", {holder.owner}) == "broke 'b'"
    assert looker.break_lock("b", {holder.owner}) == "nobody held 'b' any more"
    with pytest.raises(lockkit.LockLost):
        lease.release()


# -- the table ---------------------------------------------------------------------------------------------------------


def watching(*looks: Look) -> Watched:
    """What was seen in some looks."""
    watched = Watched()
    for look in looks:
        watched.see(look)
    return watched


def drawn(view: View, watched: Watched, now: float, *, width: int = 120, height: int = 12) -> list[str]:
    """The lines of a screen."""
    view.url, view.seen = "redis://h", now
    view.arrange(watched.records, now)
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as capture:
        console.print(draw(view, now, (width, height)))
    return [line.rstrip() for line in capture.get().splitlines()]


def press(view: View, keys: str | list[str]) -> list[Breaking]:
    """Press keys, none of which quits; gives what was confirmed."""
    return [done for key in keys if (done := view.press(key)) is not None]


ABOUT = {"host": "web1", "pid": 7, "started": 0.0, "ticket": "OPS-7"}


def test_table_shows_all_that_is_known() -> None:
    """And what is not known as a dash."""
    watched = watching(
        looked(0, held("a", metadata=ABOUT, waiters=3, token=17), held("b", "foreign", token=None, remaining=None)),
        looked(10, held("a", metadata=ABOUT, waiters=3, token=17), held("b", "foreign", token=None, remaining=None)),
    )

    lines = drawn(View(), watched, 150)

    assert lines[0] == "redis://h"
    assert lines[1].split() == ["name↑", "holder", "kind", "token", "left", "waiters", "age", "missed"]
    assert lines[2].split() == ["a", "web1", "7", "lock", "17", "0.0", "s!", "3", ">", "2", "m", "0"]
    assert lines[3].split() == ["b", "foreign", "lock", "-", "-", "-", ">", "2", "m", "-"]
    assert lines[-2:] == ["2 locks held", "q quit  ↑↓ select  s sort  r reverse  / filter  m metadata  b break"]
    assert len(lines) == 12


@pytest.mark.parametrize(("width", "height"), [(120, 24), (80, 24), (60, 10), (40, 6), (20, 3)])
def test_table_fits_the_terminal(width: int, height: int) -> None:
    """It leaves out columns, then rows; the selected one is always there."""
    watched = watching(looked(0, *(held(f"lock {n}", f"owner {n}", metadata=ABOUT) for n in range(50))))
    view = View(metadata=True)
    drawn(view, watched, 1, width=width, height=height)
    press(view, [DOWN] * 30)

    lines = drawn(view, watched, 1, width=width, height=height)

    assert all(len(line) <= width for line in lines)
    assert len(lines) <= max(height, 5)
    chosen = view.rows[view.selected].held.name
    assert any(chosen in line for line in lines)


def test_escape_sequences_in_names_are_only_shown() -> None:
    """Any client chooses names and metadata."""
    watched = watching(looked(0, held("a\x1b[2J", "o\x07", metadata={"k\x1b": "v\x1b"})))
    view = View(metadata=True)

    text = "\n".join(drawn(view, watched, 1))

    assert "\x1b" not in text
    assert "\x07" not in text
    assert r"a\x1b[2J" in text
    assert r"v\x1b" in text


def test_keys_sort_filter_and_show_metadata() -> None:
    """The selection stays on its lock."""
    watched = watching(
        looked(0, held("a", token=3, metadata=ABOUT), held("b", token=1, remaining=5), held("c", token=2, remaining=9))
    )
    view = View()
    drawn(view, watched, 0)
    press(view, [DOWN, DOWN, DOWN, UP])
    assert view.rows[view.selected].held.name == "b"

    press(view, "sss")
    drawn(view, watched, 0)
    assert [row.held.name for row in view.rows] == ["b", "c", "a"]
    assert view.rows[view.selected].held.name == "b"
    press(view, "r")
    drawn(view, watched, 0)
    assert [row.held.name for row in view.rows] == ["a", "c", "b"]
    press(view, "m")
    assert not any("OPS-7" in line for line in drawn(view, watched, 0))
    press(view, [UP, "k"])
    assert "  ticket: OPS-7" in drawn(view, watched, 0)

    press(view, ["/", "w", "e", "B", "x", "\x7f"])
    assert drawn(view, watched, 0)[-1] == "filter: weB▏"
    press(view, "\r")
    assert "1 lock held  |  filter 'weB'" in drawn(view, watched, 0)
    assert [row.held.name for row in view.rows] == ["a"]
    press(view, "\x1b")
    drawn(view, watched, 0)
    assert len(view.rows) == 3


def test_break_asks_first() -> None:
    """Only y breaks; the question names the holder, and all holders count, also those that the filter hides."""
    watched = watching(
        looked(0, held("a", metadata=ABOUT), held("b", "x", mode="shared"), held("b", "y", mode="shared"))
    )
    view = View()
    drawn(view, watched, 0)

    press(view, "b")
    assert drawn(view, watched, 0)[-1].startswith("Break it? (y/n)  'a' is held by web1 7, which keeps working")
    assert press(view, "q") == []
    assert press(view, "bn") == []
    press(view, "/x\r")
    drawn(view, watched, 0)
    press(view, "b")

    assert press(view, "y") == [Breaking("b", frozenset({"x", "y"}), "2 holders")]
    assert press(view, "y") == []


def test_nothing_to_break() -> None:
    """An empty table has no selection."""
    view = View()
    lines = drawn(view, watching(looked(0)), 0)
    press(view, [DOWN, "b", "m"])

    assert lines[-2] == "0 locks held"
    assert view.asking is None


def test_status_line_says_what_is_wrong() -> None:
    """And since when."""
    (line,) = (
        line
        for line in drawn(View(problem="no route", cut=True, said="broke 'a'"), watching(looked(0)), 5)
        if "no route" in line
    )

    assert "no answer, seen 0 s ago: no route" in line
    assert "the first 1000 only: give a PATTERN" in line
    assert "broke 'a'" in line


# -- lines -------------------------------------------------------------------------------------------------------------


run = partial(run_here, "watch")


def test_once_prints_a_line_for_each_lock(url: str, client: lockkit.Client) -> None:
    """The URL as an argument or as the option, like the other commands."""
    with client.lock("seat:1") as lease, client.lock("other\x1b[2J"):
        done = run(url, "seat:*", "--once")
        same = run("--url", url, "seat:*", "--once")
        everything = run(url, "--once")

    assert done.exit_code == 0, done.stderr
    assert f"appeared   'seat:1': {os.uname().nodename} {os.getpid()}, token {lease.token}, " in done.stdout
    assert done.stdout.count("\n") == 1
    assert same.stdout[8:40] == done.stdout[8:40]
    assert r"other\x1b[2J" in everything.stdout


def test_once_as_json(url: str, client: lockkit.Client) -> None:
    """One object a line, with the fields of ``lockkit list``."""
    with client.lock("b", metadata="why") as lease, client.lock("a"):
        lines = run(url, "--once", "--json").stdout.splitlines()

    first, second = map(json.loads, lines)
    assert (first["event"], first["name"]) == ("appeared", "a")
    assert (second["name"], second["token"], second["metadata"]["text"]) == ("b", lease.token, "why")
    assert 0 < second["remaining"] <= TTL


def events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The events as they come."""
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


@contextmanager
def renewing(client: lockkit.Client) -> Iterator[None]:
    """Have leases of a client renewed every now and then, long before that is due."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.3):
            client._engine.confirm_soon()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_events_follow_a_lock_until_it_is_released(cli: Cli) -> None:
    """And an outage of the backend, through which the watch goes on."""
    backend = cli.home / "locks"
    gone = Path(f"{backend}.names")
    process = cli.start("watch", f"faulty://{backend}", "--json", INTERVAL)
    coming = events(process)
    with lockkit.connect(f"file://{backend}") as client, renewing(client):
        # The rest waits until the first look is over: an exclusive lock that is there from the beginning.
        lease = client.lock("a", ttl=TTL).acquire(10)
        appeared = next(coming)
        renewed = next(coming)
        gone.touch()
        unreachable = next(event for event in coming if event["event"] != "renewed")
        gone.unlink()
        reachable = next(coming)
        lease.release()
        released = next(event for event in coming if event["event"] not in {"renewed", "expiring"})
    process.terminate()

    assert [appeared["event"], renewed["event"], released["event"]] == ["appeared", "renewed", "released"]
    assert appeared["token"] == renewed["token"] == released["token"] == lease.token
    assert (unreachable["event"], "no answer to names" in unreachable["error"]) == ("unreachable", True)
    assert reachable["event"] == "reachable"
    assert process.wait(timeout=60) == 128 + signal.SIGTERM


def test_reader_that_has_enough_ends_it(cli: Cli) -> None:
    """As with ``| head -1``: without a traceback."""
    url = f"file://{cli.home}/locks"
    with lockkit.connect(url) as client, client.lock("a", ttl=TTL), renewing(client):
        process = cli.start("watch", url, INTERVAL)
        assert process.stdout is not None
        assert process.stderr is not None
        assert "appeared" in process.stdout.readline()
        process.stdout.close()

        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == ""


# -- in a terminal -----------------------------------------------------------------------------------------------------

HIDDEN = "\x1b[?1049h"
BACK = "\x1b[?25h\x1b[?1049l"
"""The cursor and the first screen are there again."""


class Watching(Tty):
    """``lockkit watch`` in a terminal."""

    def __init__(self, cli: Cli, *args: str, jobs: bool = False) -> None:
        cli.env |= {"TERM": "xterm-256color", "COLUMNS": "50"}  # the last is that of another terminal
        super().__init__(cli, "watch", *args, INTERVAL, jobs=jobs)
        self.modes_before = self.modes
        self.resize(110, 12)

    def finish(self) -> int:
        """Wait for the end, and see that the terminal is as it was."""
        status = self.end()
        assert BACK in self.seen
        assert HIDDEN not in self.seen.rpartition(BACK)[2]
        assert self.modes_left == self.modes_before
        return status


def test_table_in_a_terminal(cli: Cli) -> None:
    """Locks come and go; keys filter, show metadata and break; q ends it and gives the terminal back."""
    url = f"file://{cli.home}/locks"
    with lockkit.connect(url) as client:
        watch = Watching(cli, url)
        watch.expect_screen("0 locks held", "q quit")
        lease = client.lock("seat:1", metadata={"ticket": "OPS-7"}, raise_on_lost=False).acquire(10)
        watch.expect_screen("1 lock held", "seat:1", str(lease.token), " lock ")
        with client.lock("other"):
            watch.expect_screen("2 locks held", "other")
            watch.type("/seat\r")
            watch.expect_screen("1 lock held", "filter 'seat'", without="other")
        watch.type("m")
        watch.expect_screen("ticket: OPS-7")
        watch.type("b")
        watch.expect_screen("Break it? (y/n)  'seat:1' is held by")
        watch.type("n")
        watch.expect_screen("'seat:1' was not broken")
        assert len(client.holders("seat:1")) == 1
        watch.type("b")
        watch.expect_screen("Break it?")
        watch.type("y")
        watch.expect_screen("broke 'seat:1'", "0 locks held")
        assert client.holders("seat:1") == []

        watch.type("q")

        assert watch.finish() == 0
        with pytest.raises(lockkit.LockLost):
            lease.release()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_signal_ends_it_and_the_terminal_is_as_before(cli: Cli, signum: signal.Signals) -> None:
    """Ctrl-C too; its size is that of the terminal, also after a change, whatever COLUMNS says."""
    watch = Watching(cli, f"file://{cli.home}/locks")
    assert "missed" in watch.expect_screen("0 locks held")
    watch.resize(30, 8)
    screen = watch.expect_screen("0 locks held", without="missed")
    assert len(screen.splitlines()) == 8

    if signum == signal.SIGINT:
        watch.type(CTRL_C)
    else:
        watch.process.send_signal(signum)

    assert watch.finish() == 128 + signum


def test_error_ends_it_and_the_terminal_is_as_before(cli: Cli) -> None:
    """The message is readable there; before that, a server that does not answer is only shown."""
    backend = cli.home / "locks"
    watch = Watching(cli, f"faulty://{backend}")
    watch.expect_screen("0 locks held")
    Path(f"{backend}.names").touch()
    watch.expect_screen("no answer, seen", "s ago: no answer to names")
    Path(f"{backend}.names").unlink()
    watch.expect_screen("0 locks held", without="no answer")

    Path(f"{backend}.rights").touch()

    assert watch.finish() == 78
    assert "lockkit: no rights to names" in watch.seen.rpartition(BACK)[2]


def test_ctrl_z_gives_the_terminal_to_the_shell(cli: Cli) -> None:
    """And fg takes it again."""
    watch = Watching(cli, f"file://{cli.home}/locks", jobs=True)
    watch.expect_screen("0 locks held")

    watch.type(CTRL_Z)
    watch.expect(BACK)
    watch.expect("job stopped")
    watch.type("fg\n")
    watch.expect_screen("0 locks held")
    watch.type("q")

    watch.expect("job ended with 0")
    watch.end()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server that the tests may freeze and kill."""
    require("redis")
    with RedisServer() as server:
        yield server


def test_server_that_goes_and_comes_back(cli: Cli, server: RedisServer) -> None:
    """The watch shows it and goes on; keys are answered while the server hangs."""
    with lockkit.connect(server.url) as client:
        watch = Watching(cli, server.url, "a*")
        with client.lock("a1"), client.lock("b1"):
            watch.expect_screen("1 lock held", "a1", without="b1")
        watch.expect_screen("0 locks held")
    server.kill()
    watch.expect_screen("no answer, seen")
    server.start()
    watch.expect_screen("0 locks held", without="no answer")

    server.pause()
    try:
        watch.type("m")
        watch.type("s")
        watch.expect_screen("holder↑")
        watch.type("q")
        assert watch.finish() == 0
    finally:
        server.resume()
