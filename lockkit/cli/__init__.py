"""The ``lockkit`` command. Its `main` is light, so that a missing extra is one line and not a traceback."""

from __future__ import annotations

import errno
import signal
import sys
from importlib.util import find_spec

from lockkit.cli.status import SIGNALLED, Status
from lockkit.cli.streams import OutputError, prepare_streams

__all__ = ["main"]


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
