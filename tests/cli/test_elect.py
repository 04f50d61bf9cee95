"""``lockkit elect``: the command runs while this process leads, and again in the next term."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from subprocess import Popen

import pytest

import lockkit
from lockkit.runtime import monotonic
from lockkit.testing.stopwatch import Stopwatch
from tests.cli.support import Cli, alive, pids
from tests.tries import until

TTL = 6.0

# Writes a line with its id at the start, and on SIGTERM the time (the clock of deadlines); it then ends.
LEAD = """
import os, pathlib, signal, sys, time
def stop(*_):
    now = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
    with open("stopped", "a") as file:
        file.write(f"{now}\\n")
    sys.exit(5)
signal.signal(signal.SIGTERM, stop)
with open("terms", "a") as file:
    file.write(os.environ["LOCKKIT_TOKEN"] + "\\n")
with open("pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
while True:
    time.sleep(0.01)
"""


def start(cli: Cli, *options: str) -> Popen[str]:
    """Start a candidate whose command is the above."""
    return cli.start("elect", "a", "--ttl", str(TTL), *options, "--", sys.executable, "-c", LEAD)


def lines(path: Path) -> list[float]:
    """Return the numbers in a file, one a line."""
    return [float(line) for line in path.read_text().split()]


def test_command_leads_with_its_value_and_decides_on_the_status(cli: Cli) -> None:
    """It sees the term number; the election is vacant afterwards."""
    url = f"file:{cli.home}/locks"
    script = f"{sys.executable} -m lockkit.cli holders a --json --url {url}; echo $LOCKKIT_TOKEN; exit 7"

    done = cli.run("elect", "a", "--url", url, "--value", "10.0.0.7:80", "--", "sh", "-c", script)

    assert done.returncode == 7, done.stderr
    shown, _, token = done.stdout.strip().rpartition("\n")
    (holder,) = json.loads(shown)["holders"]
    assert holder["metadata"]["value"] == "10.0.0.7:80"
    assert holder["token"] == int(token)
    assert cli.holders("a", url) == []


@pytest.mark.slow
def test_command_is_stopped_at_deadline_minus_grace_and_started_again(cli: Cli) -> None:
    """Renewals fail: SIGTERM comes the grace before the deadline; with the backend back, there is a next term."""
    url = f"faulty:{cli.home}/locks"
    running = start(cli, "--url", url, "--grace", "1.8")
    pids(cli.home / "pids", 1)
    candidate = running.pid

    (cli.home / "locks.renew").touch()
    touched, watch = monotonic(), Stopwatch()
    until(lambda: (cli.home / "stopped").exists() and (cli.home / "stopped").read_text().endswith("\n"))
    # Not later than the grace before the last deadline that can have been.
    watch.stop()
    assert lines(cli.home / "stopped")[0] < touched + TTL + watch.longest_stall
    (cli.home / "locks.renew").unlink()
    first, second, *_ = pids(cli.home / "pids", 2)

    assert not alive(first)
    assert alive(second)
    assert running.pid == candidate
    assert running.poll() is None
    terms = lines(cli.home / "terms")
    assert terms[1] > terms[0]
    running.terminate()
    assert running.wait(timeout=60) == 5
    until(lambda: not alive(second))
    assert cli.holders("a", f"file:{cli.home}/locks") == []


@pytest.mark.slow
def test_signal_that_the_command_survived_does_not_end_the_next_campaign(cli: Cli) -> None:
    """SIGHUP tells many daemons to read their configuration again; the term is lost long after that."""
    url = f"file:{cli.home}/locks"
    script = 'trap "echo >> heard" HUP; echo $$ >> pids; while :; do sleep 0.05; done'
    running = cli.start("elect", "a", "--ttl", str(TTL), "--url", url, "--", "sh", "-c", script)
    pids(cli.home / "pids", 1)
    running.send_signal(signal.SIGHUP)
    until((cli.home / "heard").exists)

    assert cli.run("break", "a", "--yes", "--url", url).returncode == 0

    pids(cli.home / "pids", 2)
    running.terminate()
    assert running.wait(timeout=60) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_signal_while_the_command_is_being_ended_ends_the_candidate(cli: Cli) -> None:
    """The term is lost and the command takes its time to stop: what comes now is for lockkit."""
    url = f"file:{cli.home}/locks"
    script = 'trap "echo >> stopping" TERM; echo $$ >> pids; while :; do sleep 0.05; done'
    # The command has nine seconds to stop, in which the machine may stand still.
    running = cli.start("elect", "a", "--ttl", "21", "--grace", "10", "--url", url, "--", "sh", "-c", script)
    (command,) = pids(cli.home / "pids", 1)
    assert cli.run("break", "a", "--yes", "--url", url).returncode == 0
    until((cli.home / "stopping").exists)

    running.send_signal(signal.SIGHUP)

    assert running.wait(timeout=60) == 128 + signal.SIGHUP
    assert not alive(command)
    assert (cli.home / "pids").read_text() == f"{command}\n"


def test_candidate_waits_and_a_signal_ends_the_campaign(cli: Cli) -> None:
    """Its command never runs, and nothing of it is left."""
    url = f"file:{cli.home}/locks"
    with lockkit.connect(url) as client, client.election("a").campaign(timeout=0) as term:
        running = start(cli, "--url", url)
        until(lambda: client.holders("a")[0].waiters == 1)

        running.terminate()

        assert running.wait(timeout=60) == 128 + signal.SIGTERM
        assert not term.must_stop()
    assert not (cli.home / "pids").exists()
