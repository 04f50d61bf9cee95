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
    prepare_streams()
    missing = [package for package in ("typer", "rich") if find_spec(package) is None]
    if missing:
        what = f"the command line needs {' and '.join(missing)}"
        print(f"lockkit: {what}: pip install 'lockkit[cli]'", file=sys.stderr)
        sys.exit(Status.CONFIGURATION)
    try:
        try:
            from lockkit.cli.app import app  # noqa: PLC0415 - needs what was looked for above

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
