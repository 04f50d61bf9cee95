"""``lockkit demo``: the lock makes the difference, and the demo can tell."""

from __future__ import annotations

import json
import re
import signal

import pytest

from lockkit.cli.demo import is_right
from lockkit.cli.seller import Sale
from tests.cli.support import Cli, alive, children
from tests.tries import until

SMALL = ("--seats", "40", "--processes", "4")


def test_demo_sells_each_seat_once_under_the_lock(cli: Cli) -> None:
    """And more than once without it: on files that are gone at the end. There is no progress in a pipe."""
    cli.env["LOCKKIT_SCOPE"] = "network"  # of other locks
    done = cli.run("demo", *SMALL, "--json")

    assert (done.returncode, done.stderr) == (0, "")
    whole = json.loads(done.stdout)
    without, locked = whole["rounds"]
    assert whole["ok"] is True
    assert without["sold_again"] > 0
    assert (locked["tickets"], locked["seats_sold"], locked["sold_again"]) == (40, 40, 0)
    assert sum(locked["tickets_by_seller"]) == 40
    assert len(locked["tickets_by_seller"]) == 4
    assert locked["tokens"]["increasing"] is True
    assert list(cli.home.glob("lockkit-demo-*")) == []
    assert not (cli.home / "state").exists()


def test_demo_fails_where_the_lock_does_not_hold(cli: Cli) -> None:
    """With a backend that grants every request."""
    done = cli.run("demo", *SMALL, "--url", f"sieve:{cli.home}/locks")

    assert done.returncode == 1
    assert "THE LOCK DID NOT HOLD" in done.stdout
    assert re.search(r"seats sold again +. +[1-9]\d* +. +[1-9]", done.stdout)
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("sales", "right"),
    [
        ([(1, 10), (2, 11)], True),
        ([(1, 10), (2, 10)], False),
        ([(1, 11), (2, 10)], False),
        ([(1, 10), (1, 11)], False),
        ([(1, 10)], False),
        ([(1, 10), (2, None)], False),
        ([(1, 10), (2, 11), (2, 12)], False),
    ],
)
def test_round_is_right_only_with_all_seats_once_and_increasing_tokens(
    sales: list[tuple[int, int | None]], *, right: bool
) -> None:
    """Seat and token of each ticket; there are two seats."""
    assert is_right([Sale(seat, 0, token) for seat, token in sales], 2) is right


def test_demo_shows_a_table(cli: Cli) -> None:
    """With the lock where the user wants it."""
    done = cli.run("demo", "--seats", "10", "--processes", "2", "--url", f"file:{cli.home}/locks")

    assert (done.returncode, done.stderr) == (0, "")
    assert "10 of 10" in done.stdout
    assert "tickets were for seats already sold; with a lock, none." in done.stdout


def test_demo_says_why_a_seller_failed(cli: Cli) -> None:
    """The status is that of the failure; nothing is left."""
    (cli.home / "locks.rights").touch()

    done = cli.run("demo", "--seats", "5", "--processes", "2", "--url", f"faulty:{cli.home}/locks")

    assert (done.returncode, done.stdout) == (78, "")
    assert "a seller ended with 78: no rights to acquire" in done.stderr
    assert list(cli.home.glob("lockkit-demo-*")) == []


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_demo_leaves_nothing(cli: Cli, signum: signal.Signals, status: int) -> None:
    """Neither its processes nor its directory."""
    running = cli.start("demo", "--seats", "50000", "--processes", "3")
    until(lambda: any(path.stat().st_size for path in cli.home.glob("lockkit-demo-*/tickets.jsonl")))
    sellers = children(running.pid)

    running.send_signal(signum)
    _, said = running.communicate(timeout=60)

    assert running.returncode == status
    assert "Traceback" not in said
    assert len(sellers) == 4  # with the one that watches over the others' resources
    until(lambda: not any(alive(pid) for pid in sellers))
    assert list(cli.home.glob("lockkit-demo-*")) == []
