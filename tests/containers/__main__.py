"""
Compose files and test servers in containers: `python -m tests.containers [pytest …]`, which `nox -s containers` runs.

Docker is installed and its daemon started where that must be and can be; both are as before at the end. Images that
cannot be pulled are stood in for by the servers of this machine: what ran is told first and last.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lockkit_tools.servers.errors import ServerError
from tests.containers.engine import engine
from tests.containers.images import MYSQL, can_pull, images

HERE = Path(__file__).parent
SUITES = [str(HERE / "compose_suite.py"), str(HERE / "testcontainers_suite.py")]


def main(arguments: list[str]) -> int:
    """Runs both suites; gives pytest's exit status, or 1 if they could not begin."""
    # In order: each service is up once, and the conformance suites are begun all at the same time.
    fixed = ["-p", "no:randomly", "-p", "no:cacheprovider", "-v"]
    try:
        with engine(tell), images(tell) as stand_ins:
            mysql = can_pull(MYSQL)
            named = any(Path(argument.partition("::")[0]).exists() for argument in arguments)
            command = [sys.executable, "-m", "pytest", *fixed, *arguments, *([] if named else SUITES)]
            status = subprocess.run(command, check=False).returncode
    except ServerError as error:
        tell(str(error))
        return 1
    for name, content in stand_ins.items():
        tell(f"NOT THE IMAGE {name}: it could not be pulled, {content} stood in for it")
    if not mysql:
        tell(f"MYSQL DID NOT RUN: {MYSQL} could not be pulled, and Debian has none")
    return status


def tell(line: str) -> None:
    """Prints a line at once, also into a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
