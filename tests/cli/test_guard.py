"""The guard process of ``lockkit run``, apart from lockkit."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
from pathlib import Path

import pytest

from lockkit.cli import processes
from lockkit.cli.processes import Guard
from lockkit.runtime import monotonic
from tests.cli.support import PATIENCE


@pytest.mark.parametrize("seconds", [0.1, 600])
def test_guard_tells_whether_it_killed_even_if_told_of_a_renewal_since(seconds: float) -> None:
    """A lockkit that was stopped may renew when it goes on, before it sees that its command is dead."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as command:
        guard = Guard(command.pid)
        try:
            guard.tell(monotonic() + seconds)
            if seconds > 1:
                command.kill()
            command.wait(timeout=PATIENCE)
            guard.tell(monotonic() + 600)
            assert guard.killed() == (seconds < 1)
        finally:
            guard.dismiss()


def test_guard_kills_though_lockkit_is_gone_at_the_same_moment() -> None:
    """Nobody reads its report then."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as command:
        guard = Guard(command.pid)
        nobody = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nobody, guard._report)  # closes the only end that can be read
        os.close(nobody)
        try:
            guard.tell(monotonic() + 0.1)
            assert command.wait(timeout=PATIENCE) == -9
        finally:
            guard.dismiss()


def test_guard_closes_what_is_open_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process may open a billion files, to close each number took a minute, in which it killed nobody."""
    monkeypatch.setattr(os, "sysconf", None)
    read, write = os.pipe()
    high = fcntl.fcntl(write, fcntl.F_DUPFD, 500)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as command:
        guard = Guard(command.pid)
        os.close(write)
        os.close(high)
        try:
            assert select.select([read], [], [], PATIENCE)[0]  # nobody else has the other end
            guard.tell(monotonic() + 0.1)
            assert command.wait(timeout=PATIENCE) == -9
        finally:
            command.kill()
            guard.dismiss()
            os.close(read)


def test_supervisor_does_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chroot may lack it. Then a member of the group that may be dead counts as living, never the other way round."""
    monkeypatch.setattr(processes, "PROC", tmp_path)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as command:
        run = object.__new__(processes.Command)
        vars(run).update(group=command.pid, kept=-1, _group_ended=False)
        assert (run.group_gone(), run.processes()) == (False, [])
        command.kill()
