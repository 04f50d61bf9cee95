"""The guard process of ``lockkit run``, apart from lockkit."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockkit.cli import processes
from lockkit.cli.processes import Command, Guard, Process
from lockkit.runtime import monotonic
from tests.cli.support import PATIENCE
from tests.tries import until


@pytest.fixture
def command() -> Iterator[Command]:
    """A command that runs."""
    command = Command(["sleep", "600"])
    command.start({})
    yield command
    command.discard()


def ended(command: Command) -> bool:
    """Whether it was killed."""
    command.poll()
    return command.status == 128 + signal.SIGKILL


@pytest.mark.parametrize("seconds", [0.1, 600])
def test_guard_tells_whether_it_killed_even_if_told_of_a_renewal_since(command: Command, seconds: float) -> None:
    """A lockkit that was stopped may renew when it goes on, before it sees that its command is dead."""
    guard = Guard(command)
    try:
        guard.tell(monotonic() + seconds)
        if seconds > 1:
            command.signal(signal.SIGKILL)
        until(lambda: ended(command))
        guard.tell(monotonic() + 600)
        assert guard.killed() == (seconds < 1)
    finally:
        guard.dismiss()


def test_guard_kills_though_lockkit_is_gone_at_the_same_moment(command: Command) -> None:
    """Nobody reads its report then."""
    guard = Guard(command)
    nobody = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nobody, guard._report)  # closes the only end that can be read
    os.close(nobody)
    try:
        guard.tell(monotonic() + 0.1)
        until(lambda: ended(command))
    finally:
        guard.dismiss()


def test_guard_closes_what_is_open_and_no_more(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process may open a billion files, to close each number took a minute, in which it killed nobody."""
    monkeypatch.setattr(os, "sysconf", None)
    read, write = os.pipe()
    high = fcntl.fcntl(write, fcntl.F_DUPFD, 500)
    guard = Guard(command)
    os.close(write)
    os.close(high)
    try:
        assert select.select([read], [], [], PATIENCE)[0]  # nobody else has the other end
        guard.tell(monotonic() + 0.1)
        until(lambda: ended(command))
    finally:
        guard.dismiss()
        os.close(read)


def test_kill_reaches_what_was_forked_meanwhile(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process outside the group may fork after the list was made, before its end; each is killed once."""
    killed: list[int] = []
    found = iter([[1], [1, 2], [1, 2]])
    monkeypatch.setattr(command, "passed_on", lambda: True)
    monkeypatch.setattr(command, "processes", lambda: [Process(pid, "sh", 0) for pid in next(found)])
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))

    command.signal(signal.SIGKILL)

    assert killed == [1, 2]


def test_process_that_opens_and_closes_files_is_not_overlooked() -> None:
    """A descriptor may be gone when its name is read; the one that is looked for has a high number, so comes late."""
    read, write = os.pipe()
    busy = """
import os
print(flush=True)
while True:
    for fd in [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]:
        os.close(fd)
"""
    with subprocess.Popen([sys.executable, "-c", busy], pass_fds=[write], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            pipe = f"pipe:[{os.fstat(read).st_ino}]"
            assert all(processes._has_open(process.pid, pipe) for _ in range(300))
        finally:
            process.kill()
            os.close(read)
            os.close(write)


def test_supervisor_does_without_proc(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chroot may lack it. Then a member of the group that may be dead counts as living, never the other way round."""
    monkeypatch.setattr(processes, "PROC", tmp_path)

    assert (command.group_gone(), command.processes()) == (False, [])
