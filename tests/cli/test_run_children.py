"""``lockkit run`` and ``elect`` keep the lock while processes that the command started still work."""

from __future__ import annotations

import os
import signal
import sys
from subprocess import Popen

import pytest

import lockkit
from lockkit.errors import LockTimeout
from tests.cli.support import Cli, alive, pids
from tests.tries import until

# Ways in which a command leaves a process behind, which writes its id and works until the file "done" exists.
# Ends by itself: what a test that was killed leaves must not go on for ever.
WORK = "echo $$ >> pids; i=0; while ! [ -e done ] && [ $i -lt 4000 ]; do i=$((i + 1)); sleep 0.02; done"
QUIET = "</dev/null >/dev/null 2>&1"
LEAVE = {
    "child": f"sh -c '{WORK}' {QUIET} &",
    "grandchild": f"(sh -c '{WORK}' {QUIET} &) {QUIET}",
    # It inherits nothing, and stays in the group.
    "closed": f"""{sys.executable} -c 'import subprocess; subprocess.Popen(["sh", "-c", "{WORK}"])' {QUIET}""",
    # It leaves the group, and keeps the descriptor.
    "session": f"""{sys.executable} -c 'import os
if os.fork() == 0:
    os.setsid()
    os.execvp("sh", ["sh", "-c", "{WORK}"])' {QUIET}""",
}


def start(cli: Cli, way: str, *options: str, status: int = 3, command: str = "run") -> tuple[Popen[str], int]:
    """Start a command that leaves a process behind; give its id, when the command itself has ended."""
    script = f"{LEAVE[way]}\nuntil [ -s pids ]; do sleep 0.01; done; touch ended; exit {status}"
    running = cli.start(command, "a", *options, "--", "sh", "-c", script)
    (pid,) = pids(cli.home / "pids", 1)
    until((cli.home / "ended").exists)
    return running, pid


@pytest.mark.parametrize(("way", "command"), [*((way, "run") for way in LEAVE), ("session", "elect")])
def test_lock_is_held_until_the_last_process_has_ended(cli: Cli, way: str, command: str) -> None:
    """The status stays the command's; what is waited for is said after a second, in one line."""
    running, pid = start(cli, way, command=command)
    assert running.stderr is not None

    said = running.stderr.readline()
    assert running.poll() is None
    assert alive(pid)
    with lockkit.connect(f"file:{cli.home}/state/locks") as client, pytest.raises(LockTimeout):
        client.lock("a", timeout=0).acquire()

    (cli.home / "done").touch()
    rest = running.communicate(timeout=60)[1]
    assert running.returncode == 3
    assert rest == ""
    named = (
        f"the processes that it left behind, {pid} (sh)," if sys.platform == "linux" else "the processes of its group"
    )
    assert said.startswith("lockkit: the command ended with status 3; lock 'a' stays held until ")
    assert named in said
    assert said.endswith("have ended too (--no-wait-children does not wait)\n")
    assert cli.holders("a") == []


@pytest.mark.parametrize("way", ["child", "session"])
def test_no_wait_children_frees_at_once(cli: Cli, way: str) -> None:
    """As a command that starts a daemon on purpose wants it."""
    running, pid = start(cli, way, "--no-wait-children")

    out, said = running.communicate(timeout=60)
    assert (running.returncode, out, said) == (3, "", "")
    assert alive(pid)
    assert cli.holders("a") == []
    (cli.home / "done").touch()


def test_daemon_that_closes_what_it_inherited_is_on_its_own(cli: Cli) -> None:
    """As daemons do; nothing of it can be seen."""
    script = f"""import subprocess
subprocess.Popen(["sh", "-c", "exec {QUIET}; {WORK}"], start_new_session=True)"""

    done = cli.run("run", "a", "--", sys.executable, "-c", script)

    assert done.returncode == 0
    (pid,) = pids(cli.home / "pids", 1)
    assert alive(pid)
    (cli.home / "done").touch()


@pytest.mark.parametrize(
    ("name", "status", "way"),
    [("INT", 0, "child"), ("QUIT", 0, "child"), ("HUP", 3, "child")]
    + ([("TERM", 0, "session")] if sys.platform == "linux" else []),
)
def test_signal_while_waiting_ends_what_is_left(cli: Cli, name: str, status: int, way: str) -> None:
    """Shells have their background jobs ignore SIGINT. Interrupted work is no success; another status says more."""
    running, pid = start(cli, way, status=status)
    assert running.stderr is not None
    running.stderr.readline()

    running.send_signal(signal.Signals[f"SIG{name}"])

    assert running.wait(timeout=60) == (status or 128 + signal.Signals[f"SIG{name}"])
    assert not alive(pid)
    assert cli.holders("a") == []


def test_interrupted_children_are_no_success_of_once(cli: Cli) -> None:
    """The next run does the work."""
    running, _ = start(cli, "child", "--once", "k", status=0)
    assert running.stderr is not None
    running.stderr.readline()
    running.terminate()
    running.wait(timeout=60)

    assert cli.run("run", "a", "--once", "k", "--", "echo", "again").stdout == "again\n"


def test_children_that_ignore_sigterm_are_killed(cli: Cli) -> None:
    """After ``--kill-after``."""
    leave = f"sh -c 'trap \"\" TERM; {WORK}' {QUIET} &"
    script = f"{leave}\nuntil [ -s pids ]; do sleep 0.01; done; touch ended"
    running = cli.start("run", "a", "--kill-after", "0.3", "--", "sh", "-c", script)
    (pid,) = pids(cli.home / "pids", 1)
    assert running.stderr is not None
    running.stderr.readline()

    running.terminate()

    assert "within 0.3 s of SIGTERM (--kill-after): killing it" in running.communicate(timeout=60)[1]
    assert running.returncode == 128 + signal.SIGTERM
    assert not alive(pid)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["child", "session"] if sys.platform == "linux" else ["child"])
def test_loss_while_waiting_ends_what_is_left(cli: Cli, way: str) -> None:
    """As it ends a command: before the deadline."""
    running, pid = start(cli, way, "--ttl", "6", status=0)

    assert cli.run("break", "a", "--yes").returncode == 0

    said = running.communicate(timeout=60)[1]
    assert running.returncode == 79, said
    assert not alive(pid)
    assert "before the deadline" in said


@pytest.mark.slow
def test_lease_is_renewed_while_waiting(cli: Cli) -> None:
    """For longer than its ttl."""
    running, _ = start(cli, "child", "--ttl", "6", status=0)
    with lockkit.connect(f"file:{cli.home}/state/locks") as client:
        (first,) = client.holders("a")
        with pytest.raises(LockTimeout):
            client.lock("a", timeout=8).acquire()
        (last,) = client.holders("a")
    assert first.token == last.token

    (cli.home / "done").touch()
    assert running.wait(timeout=60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["child", "session"] if sys.platform == "linux" else ["child"])
def test_guard_ends_what_is_left_when_lockkit_is_killed(cli: Cli, way: str) -> None:
    """As it ends a command."""
    running, pid = start(cli, way)
    assert running.stderr is not None
    running.stderr.readline()

    os.kill(running.pid, signal.SIGKILL)

    until(lambda: not alive(pid))
