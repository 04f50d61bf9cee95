"""A terminal for a program, with a person's keys and eyes."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from typing import TYPE_CHECKING

from tests.cli.support import PATIENCE

if TYPE_CHECKING:
    from subprocess import Popen

    from tests.cli.support import Cli

# Takes the terminal of its standard input as the controlling one, then becomes another program.
LOGIN = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""

# What a shell does for a job: a process group in the foreground; says when it was stopped, and continues it on "fg".
SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = os.fork()
if job == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])
while True:
    _, status = os.waitpid(job, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    if not os.WIFSTOPPED(status):
        print("job ended with", os.waitstatus_to_exitcode(status), flush=True)
        break
    print("job stopped", flush=True)
    assert sys.stdin.readline() == "fg\\n"
    os.tcsetpgrp(0, job)
    os.killpg(job, signal.SIGCONT)
"""


class Tty:
    """
    A program in a session of its own whose controlling terminal is here.

    Attributes:
        process: The program.
        seen: Everything that the terminal has shown.
    """

    def __init__(self, cli: Cli, *args: str, jobs: bool = False) -> None:
        """Starts ``lockkit`` with these arguments; with `jobs` as the job of a shell."""
        self._master, slave = pty.openpty()
        shell = [sys.executable, "-c", SHELL] if jobs else []
        self.process: Popen[str] = cli.start_program(
            sys.executable, "-c", LOGIN, *shell, sys.executable, "-m", "lockkit.cli", *args,
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, keys: str) -> None:
        """Presses keys."""
        os.write(self._master, keys.encode())

    def expect(self, text: str) -> None:
        """Waits until the terminal has shown a text; what came before counts as read."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert self._read(deadline), f"the terminal never showed {text!r}, but {self.seen!r}"
        self.seen = self.seen.partition(text)[2]

    def end(self) -> int:
        """Waits for the end of the program; gives its status. `seen` then has the rest."""
        deadline = time.monotonic() + PATIENCE
        while self._read(deadline):
            pass
        try:
            return self.process.wait(timeout=PATIENCE)
        finally:
            # Not before: closing the terminal sends SIGHUP, also to a program that has closed its side and is ending.
            os.close(self._master)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._master, 4096) if ready else b""
        except OSError:  # Linux: nobody has the other side open any more
            data = b""
        self.seen += data.decode()
        return bool(data)
