"""The ``lockkit`` command. Its `main` is light, so that a missing extra is one line and not a traceback."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from lockkit.cli.status import Status

__all__ = ["main"]


def main() -> None:
    """Run the command line and end the process with its status."""
    missing = [package for package in ("typer", "rich") if find_spec(package) is None]
    if missing:
        what = f"the command line needs {' and '.join(missing)}"
        print(f"lockkit: {what}: pip install 'lockkit[cli]'", file=sys.stderr)
        sys.exit(Status.CONFIGURATION)
    from lockkit.cli.app import app  # noqa: PLC0415 - needs what was looked for above

    app(prog_name="lockkit")
