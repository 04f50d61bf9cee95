"""The guard process of ``lockkit run``, apart from lockkit."""

from __future__ import annotations

import subprocess

import pytest

from lockkit.cli.guard import Guard
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
