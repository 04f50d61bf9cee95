"""The ``lockkit`` command. Its `main` is light, so that a missing extra is one line and not a traceback."""

from __future__ import annotations

import errno
import os
import signal
import sys
from importlib.util import find_spec
from io import TextIOWrapper

from lockkit.cli.status import SIGNALLED, Status

_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EPIPE}
"""The disk of stdout is full, or its reader (head, less) has enough."""


def main() -> None:
    """Run the command line and end the process with its status."""
    try:
        _prepare_streams()
        _require_extra()
        try:
            from lockkit.cli.app import app  # noqa: PLC0415 - needs the extra

            app(prog_name="lockkit")
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # before a command runs, which would report it
        sys.exit(SIGNALLED + signal.SIGINT)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the exit fails to flush it again
        if error.errno != errno.EPIPE:
            print(f"lockkit: cannot write to stdout: {error.strerror}", file=sys.stderr)
        sys.exit(Status.FAILED)


def _require_extra() -> None:
    missing = [package for package in ("typer", "rich") if find_spec(package) is None]
    if missing:
        what = f"the command line needs {' and '.join(missing)}"
        print(f"lockkit: {what}: pip install 'lockkit[cli]'", file=sys.stderr)
        sys.exit(Status.CONFIGURATION)


def _prepare_streams() -> None:
    """
    Lead standard streams that the caller has closed to nowhere; show what their encoding lacks with an escape.

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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
