"""The ``lockkit`` command. Its `main` is light, so that a missing extra is one line and not a traceback."""

from __future__ import annotations

import errno
import os
import signal
import sys
from importlib.util import find_spec
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING

from lockkit.cli.status import SIGNALLED, Status

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def main() -> None:
    """Run the command line and end the process with its status."""
    try:
        prepare_streams()
        _require_extra()
        try:
            from lockkit.cli.app import app  # noqa: PLC0415 - needs the extra

            app(prog_name="lockkit")
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # before a command runs, which would report it
        sys.exit(SIGNALLED + signal.SIGINT)
    except OutputError as error:
        if error.cause.errno == errno.EPIPE:  # the reader (head, less) has enough
            sys.exit(SIGNALLED + signal.SIGPIPE)
        print(f"lockkit: {error}", file=sys.stderr)
        sys.exit(Status.FAILED)


def _require_extra() -> None:
    missing = [package for package in ("typer", "rich") if find_spec(package) is None]
    if missing:
        what = f"the command line needs {' and '.join(missing)}"
        print(f"lockkit: {what}: pip install 'lockkit[cli]'", file=sys.stderr)
        sys.exit(Status.CONFIGURATION)


class OutputError(OSError):
    """
    Nothing can be written to stdout any more: its disk is full, or its reader has ended.

    Its ``errno`` is None: typer and rich would deal with the end of a reader, each in its own way.

    Attributes:
        cause: What the system said.
    """

    def __init__(self, cause: OSError) -> None:
        """Keep the cause."""
        super().__init__(f"cannot write to stdout: {cause.strerror}")
        self.cause = cause


class _Stdout(FileIO):
    """Raises an `OutputError` once; then takes everything, so that no buffer fails again at the interpreter's exit."""

    _failed = False

    def write(self, data: ReadableBuffer, /) -> int:
        size = memoryview(data).nbytes
        if self._failed or not size:  # typer finds out with no bytes whether a stream takes bytes
            return size
        try:
            return super().write(data)
        except OSError as error:
            self._failed = True
            raise OutputError(error) from error


class _Stderr(FileIO):
    """Drops what nobody can read: a command must not fail, nor the exit status change, because of a message."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Have stdout and stderr fail as above, and show what their encoding lacks with an escape."""
    _open_closed_streams()
    for name, kind in (("stdout", _Stdout), ("stderr", _Stderr)):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            raw = kind(stream.fileno(), "w", closefd=False)
            text = TextIOWrapper(
                raw if stream.write_through else BufferedWriter(raw),  # the first under python -u
                encoding=stream.encoding,
                errors="backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, text)


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
