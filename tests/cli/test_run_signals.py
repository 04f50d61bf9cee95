"""Signals for ``lockkit run``: forwarded to the command, or the end of the wait."""

from __future__ import annotations

import os
import signal
import sys
from subprocess import Popen

import pytest

from tests.cli.support import Cli, alive, children, pids
from tests.tries import until

FORWARDED = ["HUP", "INT", "QUIT", "TERM", "USR1", "USR2"]


def start(cli: Cli, script: str, *options: str) -> Popen[str]:
    """Starts a shell script under the lock that has said when it is ready."""
    running = cli.start(
        "run", "a", *options, "--", "sh", "-c", f"{script}; echo $$ > pids; while :; do sleep 0.05; done"
    )
    pids(cli.home / "pids", 1)
    return running


def start_behind_another(cli: Cli) -> tuple[Popen[str], Popen[str]]:
    """Starts a run that holds the lock, and one that waits for it."""
    holder = start(cli, "true")
    waiter = cli.start("run", "a", "--", "touch", "ran")
    until(lambda: cli.holders("a")[0].waiters == 1)
    return holder, waiter


@pytest.mark.parametrize("name", FORWARDED)
def test_signal_is_forwarded(cli: Cli, name: str) -> None:
    """The command decides; its status is the run's, and the lock is free."""
    running = start(cli, f'trap "exit 7" {name}')

    running.send_signal(signal.Signals[f"SIG{name}"])

    out, said = running.communicate(timeout=60)
    assert (out, running.returncode) == ("", 7)
    assert "lockkit" not in said  # the shell may tell of its own child
    assert cli.holders("a") == []


def test_command_that_ignores_sigterm_is_killed_in_the_end(cli: Cli) -> None:
    """So that a service manager's stop comes to an end."""
    running = start(cli, 'trap "" TERM', "--kill-after", "0.3")

    running.terminate()
    _, said = running.communicate(timeout=60)

    assert running.returncode == 128 + signal.SIGKILL
    assert "--kill-after" in said
    assert cli.holders("a") == []


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_signal_ends_the_wait(cli: Cli, name: str) -> None:
    """Nothing of the waiter is left: neither a process nor a place in the queue."""
    holder, waiter = start_behind_another(cli)
    helpers = children(waiter.pid)
    signum = signal.Signals[f"SIG{name}"]

    waiter.send_signal(signum)

    assert waiter.communicate(timeout=60) == ("", "")
    assert waiter.returncode == 128 + signum
    assert len(helpers) == 2
    until(lambda: not any(alive(pid) for pid in helpers))
    until(lambda: cli.holders("a")[0].waiters == 0)
    holder.terminate()
    holder.wait(timeout=60)
    assert not (cli.home / "ran").exists()


def test_signal_that_ends_the_command_ends_min_hold_too(cli: Cli) -> None:
    """A pod that is deleted has no minutes to spare."""
    running = start(cli, "true", "--min-hold", "600")

    running.terminate()

    assert running.wait(timeout=60) == 128 + signal.SIGTERM
    assert cli.holders("a") == []


def test_killed_waiter_leaves_no_process(cli: Cli) -> None:
    """Not even SIGKILL leaves the forked command waiting for a grant that nobody can pass on."""
    holder, waiter = start_behind_another(cli)
    helpers = children(waiter.pid)

    waiter.kill()

    until(lambda: not any(alive(pid) for pid in helpers))
    holder.terminate()
    holder.wait(timeout=60)
    assert not (cli.home / "ran").exists()


def test_ignored_signal_stays_ignored(cli: Cli) -> None:
    """Under nohup neither lockkit nor the command ends with the terminal."""
    script = f"trap '' HUP; exec {sys.executable} -m lockkit.cli run a -- sh -c 'echo $$ > pids; cat'"
    running = cli.start_program("sh", "-c", script, stdin=-1)
    (command,) = pids(cli.home / "pids", 1)

    running.send_signal(signal.SIGHUP)
    os.kill(command, signal.SIGHUP)
    out, _ = running.communicate("still here\n", timeout=60)

    assert (running.returncode, out) == (0, "still here\n")


def test_signal_reaches_the_whole_group(cli: Cli) -> None:
    """A shell that waits for a program does not pass signals on: lockkit sends them to both."""
    script = "trap : TERM; sh -c 'echo $$ > pids; exec sleep 600'; exit 7"
    running = cli.start("run", "a", "--", "sh", "-c", script)
    (program,) = pids(cli.home / "pids", 1)

    running.send_signal(signal.SIGTERM)

    assert running.wait(timeout=60) == 7
    assert not alive(program)
