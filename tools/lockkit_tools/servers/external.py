"""A server that somebody else runs: only its URL is known."""

from __future__ import annotations

from typing import Never, Self

from lockkit_tools.servers.base import Service
from lockkit_tools.servers.errors import Unmanaged
from lockkit_tools.servers.kinds import Kind


class ExternalServer(Service):
    """
    The server that an environment variable names.

    Starting and closing it do nothing; everything that needs its process raises
    `Unmanaged`, so that a test which needs faults says so before it waits for one.
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
        return self

    def _refuse(self, *_: object, **__: object) -> Never:
        """Say that this cannot be done here."""
        raise Unmanaged(
            f"the {self.kind} server comes from {self._variable}, so it can neither be stopped nor paused nor emptied: "
            f"unset it to let the tests start a server of their own"
        )

    stop = kill = pause = resume = erase = _refuse

    def close(self) -> None:
        """Does nothing: it belongs to somebody else."""
