"""A terminal for a program, with a person's keys and eyes."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from subprocess import Popen
from typing import Any

from tests.cli.support import PATIENCE, Cli

COMMANDS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What a program sends to the terminal that is no text: colours, moves."""

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
        modes_left: The settings of the terminal when the program had ended.
    """

    def __init__(self, cli: Cli, *args: str, jobs: bool = False, columns: int | None = None) -> None:
        """Starts ``lockkit`` with these arguments; with `jobs` as the job of a shell; `columns` wide."""
        self._master, slave = pty.openpty()
        if columns is not None:
            cli.env["COLUMNS"] = str(columns)
        shell = [sys.executable, "-c", SHELL] if jobs else []
        self.process: Popen[str] = cli.start_program(
            sys.executable, "-c", LOGIN, *shell, sys.executable, "-m", "lockkit.cli", *args,
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""
        self.modes_left: list[Any] = []
        self._decode = codecs.getincrementaldecoder("utf-8")().decode  # a read may end within a character

    def type(self, keys: str) -> None:
        """Presses keys."""
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Pulls at the window; the program gets SIGWINCH."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    @property
    def modes(self) -> list[Any]:
        """The settings of the terminal, such as whether it echoes keys."""
        return termios.tcgetattr(self._master)

    def expect(self, text: str) -> None:
        """Waits until the terminal has shown a text; what came before counts as read."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert self._read(deadline), f"the terminal never showed {text!r}, but {self.seen!r}"
        self.seen = self.seen.partition(text)[2]

    def expect_screen(self, *texts: str, without: str | None = None) -> str:
        """Waits until a program that draws whole screens shows all the texts on one, and not `without`; gives it."""
        deadline = time.monotonic() + PATIENCE
        while True:
            # Each screen begins with the cursor at home. The one that is being drawn may have only its beginning.
            screens = [COMMANDS.sub("", screen) for screen in self.seen.split("\x1b[H")[1:-1]]
            for screen in screens:
                if all(text in screen for text in texts) and (without is None or without not in screen):
                    self.seen = "\x1b[H" + self.seen.rpartition("\x1b[H")[2]
                    return screen
            shown = screens[-1:] or self.seen
            assert self._read(deadline), f"no screen has shown {texts} without {without!r}; the last one: {shown}"

    def end(self) -> int:
        """Waits for the end of the program; gives its status. `seen` then has the rest."""
        deadline = time.monotonic() + PATIENCE
        while self._read(deadline):
            pass
        try:
            status = self.process.wait(timeout=PATIENCE)
            self.modes_left = self.modes
            return status
        finally:
            # Not before: closing the terminal sends SIGHUP, also to a program that has closed its side and is ending.
            os.close(self._master)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._master, 4096) if ready else b""
        except OSError:  # Linux: nobody has the other side open any more
            data = b""
        self.seen += self._decode(data)
        return bool(data)
