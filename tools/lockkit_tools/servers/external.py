"""A server that somebody else runs: only its URL is known."""

from __future__ import annotations

from typing import Never, Self

from lockkit.units import Seconds
from lockkit_tools.servers.base import STOP_TIMEOUT, Service
from lockkit_tools.servers.errors import Unmanaged
from lockkit_tools.servers.kinds import Kind


class ExternalServer(Service):
    """
    The server that an environment variable names.

    Starting and closing it do nothing; everything that needs its process raises
    `Unmanaged`, so that a test which needs faults says so before it waits for one.

    Args:
        kind: What it is.
        url: Its lockkit URL.
    """

    managed = False

    def __init__(self, kind: Kind, url: str) -> None:
        self.kind = kind.name
        self._variable = kind.variable
        self._url = url

    @property
    def url(self) -> str:
        """The URL from the environment."""
        return self._url

    def start(self) -> Self:
        """Does nothing: it runs, or the test that connects will say that it does not."""
        return self

    def stop(self, timeout: Seconds = STOP_TIMEOUT) -> None:
        """Cannot be done here."""
        self._refuse(f"stop within {timeout:g} s")

    def kill(self) -> None:
        """Cannot be done here."""
        self._refuse("kill")

    def pause(self) -> None:
        """Cannot be done here."""
        self._refuse("pause")

    def resume(self) -> None:
        """Cannot be done here."""
        self._refuse("resume")

    def erase(self) -> None:
        """Cannot be done here."""
        self._refuse("erase")

    def close(self) -> None:
        """Does nothing: it belongs to somebody else."""

    def _refuse(self, what: str) -> Never:
        raise Unmanaged(
            f"cannot {what}: the {self.kind} server comes from {self._variable}; "
            f"unset it to let the tests start a server of their own"
        )
