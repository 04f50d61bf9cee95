"""A Compose project as an object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockkit_tools.servers.errors import ServerError
from tests.containers.images import docker

# All servers on a busy machine; a service that is ill says so long before, by its health check.
UP_TIMEOUT = 300


class Project:
    """One Compose file, used as its README says."""

    def __init__(self, path: Path) -> None:
        self._command = ["compose", "--progress", "quiet", "--file", str(path)]

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
        return docker(*self._command, *arguments)


def _options(profiles: Sequence[str]) -> list[str]:
    return [word for profile in profiles for word in ("--profile", profile)]
