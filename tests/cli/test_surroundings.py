"""What the caller may do to any command: close its streams, set another encoding, or end it at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lockkit
from tests.cli.support import PATIENCE, Cli
from tests.tries import until


def shell(cli: Cli, script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in which $lockkit is the command."""
    script = f"lockkit='{sys.executable} -m lockkit.cli'; {script}"
    process = cli.start_program("sh", "-c", script)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_lead_nowhere(cli: Cli, closed: str) -> None:
    """Daemons close them. The command gets no pipe of lockkit in their place, and the guard does its work."""
    look = "import os, pathlib; led = [os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)]"
    write = "pathlib.Path('streams').write_text(' '.join(led))"

    done = shell(cli, f'$lockkit run a -- {sys.executable} -c "{look}; {write}; exit(5)" {closed}')

    assert (done.returncode, done.stderr) == (5, "")
    streams = (cli.home / "streams").read_text().split()
    numbers = {"<&-": 0, ">&-": 1, "2>&-": 2}
    assert {streams[numbers[stream]] for stream in closed.split()} == {"/dev/null"}


def test_hold_with_a_closed_stdin_releases_at_once(cli: Cli) -> None:
    """A pipe of its own is not its stdin."""
    done = shell(cli, "$lockkit hold a <&-")

    assert done.returncode in {0, 75}  # whether it was granted first depends on the machine
    assert "cannot read" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="no /dev/full")
def test_hold_that_cannot_write_releases(cli: Cli) -> None:
    """Nobody hears of the grant, so nobody works under it."""
    with Path("/dev/full").open("w") as full:
        process = cli.start("hold", "a", stdin=subprocess.PIPE, stdout=full)
        assert process.wait(PATIENCE) == 0

    assert process.stderr is not None
    assert process.stderr.read() == "lockkit: cannot write to stdout: No space left on device\n" * 2
    assert cli.holders("a") == []


@pytest.mark.skipif(sys.platform != "linux", reason="no /dev/full")
@pytest.mark.parametrize(("command", "unbuffered"), [("list", "1"), ("list --json", ""), ("run --help", "")])
def test_full_disk_is_told_in_one_line(cli: Cli, command: str, unbuffered: str) -> None:
    """Wherever the failure shows: at the first character, at the end of the table, or when a buffer is flushed."""
    cli.env["PYTHONUNBUFFERED"] = unbuffered

    done = shell(cli, f"$lockkit {command} > /dev/full")

    assert (done.returncode, done.stderr) == (1, "lockkit: cannot write to stdout: No space left on device\n")


@pytest.mark.parametrize("command", ["list", "--version"])
def test_reader_that_has_ended_ends_a_command_in_silence(cli: Cli, command: str) -> None:
    """It has enough."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        done = cli.run(*command.split(), stdout=nobody)

    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(sys.platform != "linux", reason="no /dev/full")
def test_stderr_that_fails_changes_no_status(cli: Cli) -> None:
    """Neither while the message is written nor when its buffer is flushed at the exit."""
    assert shell(cli, "$lockkit run a -- ./no-such-program 2> /dev/full").returncode == 127


def test_encoding_that_lacks_a_character(cli: Cli) -> None:
    """It is shown with an escape."""
    cli.env |= {"PYTHONIOENCODING": "latin-1", "LOCKKIT_URL": f"file:{cli.home}/locks"}

    with lockkit.connect(cli.env["LOCKKIT_URL"]) as client, client.lock("☃"):
        listed = cli.run("list")
    free = cli.run("holders", "☃")

    assert [done.returncode for done in (listed, free)] == [0, 0], listed.stderr
    assert all(r"\u2603" in done.stdout for done in (listed, free))


def test_backends_of_any_locale(cli: Cli) -> None:
    """Files of lockkit are UTF-8, whatever the locale is."""
    cli.env |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    done = cli.run("backends")

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_command_gets_no_locale_that_python_has_chosen(cli: Cli) -> None:
    """As under cron, where LANG is not set: grep and sort would give other results than without lockkit."""
    cli.env = {name: value for name, value in cli.env.items() if not name.startswith(("LC_", "LANG"))}
    script = 'echo "${LC_CTYPE-none}" >> locales; test $(wc -l < locales) -ge 2 || sleep 60'

    cli.run("elect", "a", "--ttl", "2", "--stall", "0.5", "--", "sh", "-c", script)  # in two terms

    assert (cli.home / "locales").read_text() == "none\n" * 2


@pytest.mark.parametrize("command", ["ping", "doctor"])
def test_what_a_driver_logs_is_not_shown(cli: Cli, command: str) -> None:
    """What kazoo warns of says in Python's words what the one line says in ours."""
    done = cli.run(command, "zookeeper://127.0.0.1:1")

    assert done.returncode == 69
    assert done.stderr.startswith("lockkit: ")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_while_the_command_line_is_loaded(cli: Cli) -> None:
    """No traceback: loading takes a quarter of a second, in which a user may think better of it."""
    (cli.home / "path" / "typer.py").write_text("import signal; signal.raise_signal(signal.SIGINT)\n")

    done = shell(cli, "exec $lockkit ping")

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_bench_that_is_ended_removes_its_files(cli: Cli) -> None:
    """As after Ctrl-C, with what was measured."""
    few = ("--no-peers", "--face", "sync", "--workload", "pair", "--rounds", "1000", "--seconds", "0.05")
    running = cli.start("bench", f"file://{cli.home}/locks", *few)
    until(lambda: any(cli.home.rglob("lockkit-bench-*/*")))  # a worker uses it

    running.send_signal(signal.SIGHUP)
    _, said = running.communicate(timeout=60)

    assert running.returncode == 128 + signal.SIGHUP
    assert "Traceback" not in said
    assert list(cli.home.rglob("lockkit-bench-*")) == []
