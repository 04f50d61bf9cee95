"""The ``lockkit`` command. Its `main` is light, so that a missing extra is one line and not a traceback."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from io import TextIOWrapper

from lockkit.cli.status import SIGNALLED, Status

__all__ = ["main"]


def main() -> None:
    """Run the command line and end the process with its status."""
    _open_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        # As stderr has it: in an encoding that lacks a character, a lock's name is shown with an escape.
        sys.stdout.reconfigure(errors="backslashreplace")
    missing = [package for package in ("typer", "rich") if find_spec(package) is None]
    if missing:
        what = f"the command line needs {' and '.join(missing)}"
        print(f"lockkit: {what}: pip install 'lockkit[cli]'", file=sys.stderr)
        sys.exit(Status.CONFIGURATION)
    try:
        from lockkit.cli.app import app  # noqa: PLC0415 - needs what was looked for above

        app(prog_name="lockkit")
    except KeyboardInterrupt:  # before a command runs, which would report it
        sys.exit(SIGNALLED + signal.SIGINT)


def _open_closed_streams() -> None:
    """
    Lead standard streams that the caller has closed to nowhere.

    Otherwise the first pipes of this process get their numbers: ``lockkit hold`` would read its own pipe for signals as
    stdin, and a command would write into pipes of lockkit.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(fd, True)  # noqa: FBT003 - the function takes nothing else
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115 - of a number
