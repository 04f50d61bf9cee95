"""``lockkit run`` loses its lease while the command runs: the whole process group is gone before the deadline."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from subprocess import CompletedProcess, Popen

import pytest

import lockkit
from lockkit.runtime import monotonic
from lockkit.testing.stopwatch import Stopwatch
from tests.cli.support import Cli, alive, children, pids
from tests.tries import until

TTL = 6.0
MANNERS = ["meek", "apart"] if sys.platform == "linux" else ["meek"]  # elsewhere only the group can be found
GRACE = 0.5
"""A process that stands still for longer cannot be ended in time, seconds."""

# A command with a child, which may leave the session. Each writes its id once, and the time (the clock of deadlines)
# again and again.
PULSE = """
import os, pathlib, signal, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0 and sys.argv[1] == "apart":
    os.setsid()
with open("pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
while True:
    beat = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
    pathlib.Path(f"beat-{os.getpid()}.new").write_text(str(beat))
    os.replace(f"beat-{os.getpid()}.new", f"beat-{os.getpid()}")
    time.sleep(0.01)
"""


def start(cli: Cli, *options: str, manners: str = "meek", ttl: float = TTL) -> tuple[Popen[str], list[int]]:
    """Starts a run of the command above; gives it, and the ids of both processes of the command."""
    command = (sys.executable, "-c", PULSE, manners)
    running = cli.start("run", "a", "--ttl", str(ttl), *options, "--", *command)
    return running, pids(cli.home / "pids", 2)


def last_beat(home: Path, members: list[int]) -> float:
    """When the command was last seen at work."""
    return max(float((home / f"beat-{pid}").read_text()) for pid in members)


def in_time(beat: float, deadline: float, watch: Stopwatch) -> bool:
    """Whether the last step was before the deadline, unless the machine itself stood still beyond it."""
    watch.stop()
    return beat < deadline or watch.longest_stall > GRACE


def assert_lost(running: Popen[str], members: list[int]) -> str:
    """The run ends with 79, the command and its child are gone; gives what was said."""
    _, said = running.communicate(timeout=60)
    assert running.returncode == 79, said
    assert [pid for pid in members if alive(pid)] == []
    return said


@pytest.mark.slow
@pytest.mark.parametrize("manners", [*MANNERS, "stubborn"])
def test_broken_lock_ends_the_group_before_the_deadline(cli: Cli, manners: str) -> None:
    """Told by the next renewal: SIGTERM, and SIGKILL for those that ignore it."""
    running, members = start(cli, "--no-wait-children", manners=manners)

    assert cli.run("break", "a", "--yes").returncode == 0
    broken, watch = monotonic(), Stopwatch()
    said = assert_lost(running, members)

    assert in_time(last_beat(cli.home, members), broken + TTL, watch)
    assert "freed by force" in said
    assert ("were killed," if manners == "stubborn" else "were ended with SIGTERM,") in said
    assert "before the deadline" in said


@pytest.mark.slow
def test_failing_renewals_end_the_group_before_the_next_holder_starts(cli: Cli) -> None:
    """The backend frees the lock at its ttl: by then nobody of the group is at work."""
    running, members = start(cli, "--url", f"faulty:{cli.home}/locks", manners="stubborn")
    script = "import time; print(time.clock_gettime(getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC)))"
    waiter = cli.start("run", "a", "--url", f"file:{cli.home}/locks", "--", sys.executable, "-c", script)

    (cli.home / "locks.renew").touch()
    failed, watch = monotonic(), Stopwatch()
    said = assert_lost(running, members)
    next_started = float(waiter.communicate(timeout=60)[0])

    assert in_time(last_beat(cli.home, members), min(next_started, failed + TTL), watch)
    assert "was not renewed" in said
    assert "were killed" in said  # on a busy machine by the guard


@pytest.mark.slow
def test_renewals_that_succeed_again_spare_the_command(cli: Cli) -> None:
    """An outage shorter than the lease is not a loss."""
    url = f"faulty:{cli.home}/locks"
    running, _ = start(cli, "--url", url, "--signal-grace", "0.2", ttl=20)
    members = pids(cli.home / "pids", 2)
    with lockkit.connect(f"file:{cli.home}/locks") as client:

        def remaining() -> float:
            (holder,) = client.holders("a")
            assert holder.remaining is not None
            return holder.remaining

        first = remaining()

        (cli.home / "locks.renew").touch()
        until(lambda: remaining() < first / 2)
        (cli.home / "locks.renew").unlink()
        until(lambda: remaining() > first / 2)

    assert all(alive(pid) for pid in members)
    running.terminate()
    assert running.wait(timeout=60) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_command_may_tidy_up(cli: Cli) -> None:
    """The grace is for that; the status is 79 whatever the command ends with."""
    script = 'trap "echo tidied > tidied; exit 0" TERM; echo $$ > pids; while :; do sleep 0.05; done'
    running = cli.start("run", "a", "--ttl", f"{TTL}", "--", "sh", "-c", script)
    members = pids(cli.home / "pids", 1)

    cli.run("break", "a", "--yes")

    assert_lost(running, members)
    assert (cli.home / "tidied").exists()


@pytest.mark.slow
def test_stopped_command_is_ended_too(cli: Cli) -> None:
    """A process that is stopped takes SIGTERM only when it goes on."""
    running, members = start(cli)
    for pid in members:
        os.kill(pid, signal.SIGSTOP)

    cli.run("break", "a", "--yes")

    assert "ended with SIGTERM" in assert_lost(running, members)


@pytest.mark.slow
def test_command_runs_for_longer_than_the_ttl(cli: Cli) -> None:
    """As long as it likes: the lease is renewed, and the guard told so."""

    def run(ttl: int) -> CompletedProcess[str]:
        return cli.run("run", "a", "--ttl", f"{ttl}", "--", "sh", "-c", f"sleep {2 * ttl + 1}; echo done")

    done = run(1)
    if done.returncode == 79:  # the machine stood still for most of this ttl
        done = run(6)

    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_loss_that_the_release_finds_is_79(cli: Cli) -> None:
    """A command that ended by itself, but not protected to its end."""
    script = f"{sys.executable} -m lockkit.cli break a --yes; exit 3"
    done = cli.run("run", "a", "--", "sh", "-c", script)

    assert done.returncode == 79
    assert "had already ended, with status 3" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("manners", MANNERS)
def test_guard_ends_the_group_while_lockkit_is_stopped(cli: Cli, manners: str) -> None:
    """A lockkit that cannot renew cannot end its command either: the guard does, before the deadline."""
    running, members = start(cli, manners=manners)

    running.send_signal(signal.SIGSTOP)
    stopped, watch = monotonic(), Stopwatch()
    until(lambda: not any(alive(pid) for pid in members))
    gone_while_stopped = running.poll() is None
    running.send_signal(signal.SIGCONT)

    assert gone_while_stopped
    assert in_time(last_beat(cli.home, members), stopped + TTL, watch)
    assert "were killed by the guard," in assert_lost(running, members)


@pytest.mark.parametrize("manners", MANNERS)
def test_killed_lockkit_takes_the_whole_group_along(cli: Cli, manners: str) -> None:
    """Its lock is free at once: so nobody of the group may go on, nor one that has left it."""
    running, members = start(cli, manners=manners, ttl=60)

    running.kill()

    until(lambda: not any(alive(pid) for pid in members))
    assert cli.run("run", "a", "--on-busy=fail", "--", "true").returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_command_dies_when_both_processes_of_lockkit_are_killed(cli: Cli) -> None:
    """The guard is no single point of failure."""
    running, members = start(cli, ttl=60)
    command = next(pid for pid in members if pid in children(running.pid))
    (guard,) = set(children(running.pid)) - {command}

    running.send_signal(signal.SIGSTOP)  # so that it cannot act on the death of its guard
    os.kill(guard, signal.SIGKILL)
    running.kill()

    until(lambda: not alive(command))
    for pid in members:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
