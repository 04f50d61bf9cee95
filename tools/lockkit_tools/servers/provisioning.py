"""
Where a test gets its server from.

In this order: a URL from the environment (``LOCKKIT_TEST_REDIS_URL``); a container, if testcontainers is installed
and a Docker daemon answers; programs on this machine; on Debian as root, packages.
``LOCKKIT_TEST_SERVERS=docker`` leaves out what comes after containers, ``LOCKKIT_TEST_SERVERS=local`` containers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, Never, Self

from lockkit_tools.servers.base import Service
from lockkit_tools.servers.errors import ServerMissing, Unmanaged
from lockkit_tools.servers.install import install
from lockkit_tools.servers.kinds import Kind, find_kind

CHOICE = "LOCKKIT_TEST_SERVERS"
"""Environment variable that says which servers will do: ``docker`` or ``local``; by default both."""


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


@dataclass(frozen=True, slots=True)
class Source:
    """Where a server of one kind comes from."""

    origin: Literal["environment", "docker", "local"]
    detail: str
    """The URL, the image or the programs."""


def locate(name: str, *, local: bool = False) -> Source:
    """Finds where a server of this kind can be had, installing it if need be and possible."""
    kind = find_kind(name)
    if (source := look(kind, local=local)) is not None:
        return source
    if not local and _chosen() == "docker":
        raise ServerMissing(f"{CHOICE}=docker, but {kind.missing_image()}")
    install([kind], tell=lambda _: None)
    if kind.factory is None:
        raise ServerMissing(f"{kind.title} can be had from {kind.variable} or Docker only")
    return Source("local", ", ".join(kind.locations()))


def look(kind: Kind, *, local: bool = False) -> Source | None:
    """Where a server of this kind can be had without installing anything; None: nowhere."""
    if not local and (url := os.environ.get(kind.variable)):
        return Source("environment", url)
    choice = None if local else _chosen()
    if not local and choice != "local" and kind.image is not None and kind.missing_image() is None:
        return Source("docker", kind.image.name)
    if choice != "docker" and kind.factory is not None and not kind.missing():
        return Source("local", ", ".join(kind.locations()))
    return None


def _chosen() -> Literal["docker", "local"] | None:
    match os.environ.get(CHOICE, ""):
        case "":
            return None
        case ("docker" | "local") as choice:
            return choice
        case other:
            raise ValueError(f"{CHOICE}={other!r}: it takes docker or local")


def provide(name: str, **options: object) -> Service:
    """Makes a server of this kind, which a ``with`` statement starts and removes."""
    kind = find_kind(name)
    source = locate(name, local=bool(options))
    if source.origin == "environment":
        return ExternalServer(kind, source.detail)
    return kind.make_contained() if source.origin == "docker" else kind.make(**options)


def require(*names: str, local: bool = False) -> None:
    """
    Skips the running test unless servers of these kinds can be had; in CI it fails.

    A real backend that nobody tested must not look green, so ``CI=true`` turns the skip
    into a failure.
    """
    import pytest  # noqa: PLC0415 - servers serve benchmarks too, where pytest is missing

    for name in names:
        try:
            locate(name, local=local)
        except ServerMissing as error:
            if in_ci():
                pytest.fail(str(error), pytrace=False)
            pytest.skip(str(error))


def in_ci() -> bool:
    """Whether this runs in continuous integration (``CI=true``)."""
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"}
