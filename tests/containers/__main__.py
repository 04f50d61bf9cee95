"""
Compose files and test servers in containers: `python -m tests.containers [pytest …]`, which `nox -s containers` runs.

Needs a Docker daemon with Compose 2, and a registry: the images that are not here are pulled first.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lockkit_tools.servers.errors import ServerError
from tests.containers.images import docker, missing_images

HERE = Path(__file__).parent
SUITES = [str(HERE / "compose_suite.py"), str(HERE / "testcontainers_suite.py")]


def main(arguments: list[str]) -> int | str:
    """Runs both suites; gives pytest's exit status, or why they could not begin."""
    try:
        docker("compose", "version")
        missing = missing_images() if docker("version", "--format", "{{.Server.Version}}") else []
    except (ServerError, FileNotFoundError) as error:
        return f"needs a Docker daemon with Compose 2: {error}"
    if missing:
        return f"these images are not here and cannot be pulled: {', '.join(missing)}"
    # In order: each service is up once, and the conformance suites are begun all at the same time.
    fixed = ["-p", "no:randomly", "-p", "no:cacheprovider", "-v"]
    named = any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    command = [sys.executable, "-m", "pytest", *fixed, *arguments, *([] if named else SUITES)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
