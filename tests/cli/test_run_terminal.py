"""``lockkit run`` on a terminal: the command reads from it, and keys that send signals do what they always do."""

from __future__ import annotations

import os
import signal

import pytest

from tests.cli.support import Cli, alive, children, pids, state
from tests.cli.terminal import Tty
from tests.tries import until

CTRL_C = "\x03"
CTRL_Z = "\x1a"
LOOP = "echo $$ > pids; echo up; while :; do sleep 0.05; done"
# `exec`, so that keys meet one process: in the middle of its vfork a shell loses SIGINT, and hides that it was stopped.
SLEEP = "echo $$ > pids; echo up; exec sleep 600"


def test_command_reads_from_the_terminal(cli: Cli) -> None:
    """It is lent the foreground when it asks for it."""
    tty = Tty(cli, "run", "a", "--", "sh", "-c", 'echo up; read line; echo "got <$line>"; exit 3')
    tty.expect("up")

    tty.type("hello\n")

    tty.expect("got <hello>")
    assert tty.end() == 3


def test_ctrl_c_ends_the_command(cli: Cli) -> None:
    """Whether or not it has the foreground."""
    tty = Tty(cli, "run", "a", "--", "sh", "-c", LOOP)
    tty.expect("up")
    tty.type(CTRL_C)
    assert tty.end() == 128 + signal.SIGINT

    tty = Tty(cli, "run", "a", "--", "sh", "-c", "read line; echo got $line; exec cat")
    tty.type("it\n")
    tty.expect("got it")
    tty.type(CTRL_C)
    assert tty.end() == 128 + signal.SIGINT
    assert cli.holders("a") == []


def test_ctrl_c_is_the_commands_to_take(cli: Cli) -> None:
    """A command with a handler lives on, once for each key."""
    tty = Tty(cli, "run", "a", "--", "sh", "-c", f"trap 'echo caught' INT; trap 'exit 5' QUIT; {LOOP}")
    tty.expect("up")

    for _ in range(3):
        tty.type(CTRL_C)
        tty.expect("caught")
    tty.type("\x1c")

    assert tty.end() == 5


@pytest.mark.parametrize("script", [SLEEP, f"read line; {SLEEP}"])
def test_ctrl_z_stops_both_and_fg_continues_them(cli: Cli, script: str) -> None:
    """As a job of a shell, from the background and from the foreground of the terminal."""
    tty = Tty(cli, "run", "a", "--ttl", "60", "--", "sh", "-c", script, jobs=True)
    tty.type("\n")
    tty.expect("up")
    (command,) = pids(cli.home / "pids", 1)

    tty.type(CTRL_Z)
    tty.expect("job stopped")
    until(lambda: state(command) == "T")
    tty.type("fg\n")
    until(lambda: state(command) != "T")
    tty.type(CTRL_C)

    tty.expect(f"job ended with {128 + signal.SIGINT}")
    tty.end()


@pytest.mark.slow
def test_job_that_was_stopped_for_too_long_does_not_take_another_step(cli: Cli) -> None:
    """Its lease ended while it was stopped: it is killed then, and fg ends with 79."""
    tty = Tty(cli, "run", "a", "--ttl", "4", "--", "sh", "-c", SLEEP, jobs=True)
    tty.expect("up")
    (command,) = pids(cli.home / "pids", 1)

    tty.type(CTRL_Z)
    tty.expect("job stopped")
    until(lambda: not alive(command))
    tty.type("fg\n")

    tty.expect("job ended with 79")
    tty.end()


def test_command_that_is_stopped_on_purpose_keeps_its_lock(cli: Cli) -> None:
    """SIGSTOP for the command is not meant for lockkit, which goes on renewing."""
    running = cli.start("run", "a", "--ttl", "60", "--", "sh", "-c", LOOP)
    (command,) = pids(cli.home / "pids", 1)

    os.kill(command, signal.SIGSTOP)
    until(lambda: state(command) == "T")

    assert command in children(running.pid)
    assert state(running.pid) != "T"
    assert len(cli.holders("a")) == 1
    os.kill(command, signal.SIGCONT)
    running.terminate()
    assert running.wait(timeout=60) == 128 + signal.SIGTERM


def test_lock_of_one_machine_is_told_at_the_terminal(cli: Cli) -> None:
    """Who tries a job by hand sees that other machines would run it too; cron has no terminal, and mails nothing."""
    tty = Tty(cli, "run", "a", "--", "echo", "up")

    tty.expect("locks out processes of this machine only")
    assert tty.end() == 0


def test_wait_tells_at_the_terminal_who_holds_the_lock(cli: Cli) -> None:
    """A second after it began; cron has no terminal, and mails nothing."""
    holder = cli.start("run", "a", "--", "sh", "-c", SLEEP)
    (command,) = pids(cli.home / "pids", 1)
    tty = Tty(cli, "run", "a", "--", "echo", "mine")

    tty.expect(f"waiting for lock 'a' (held by {os.uname().nodename} {holder.pid} since ")
    os.kill(command, signal.SIGTERM)

    tty.expect("mine")
    assert tty.end() == 0
    assert holder.wait(timeout=60) == 128 + signal.SIGTERM
