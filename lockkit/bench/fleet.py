"""Throw-away servers to measure on: of each kind that lockkit has a backend for and that can be had here."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import lockkit
from lockkit import registry
from lockkit.testing.servers import RedisNodes, ServerError
from lockkit.testing.servers.docker import ContainerServer, docker_has
from lockkit.testing.servers.kinds import KINDS
from lockkit.url import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from lockkit.testing.servers import Service

__all__ = ["SPECS", "Fleet", "Spec"]

NODES = 5
"""Of Redlock: what its description uses."""


@dataclass(frozen=True, slots=True)
class Spec:
    """
    One service to start.

    Attributes:
        kind: Its name in `lockkit.testing.servers.kinds`.
        options: Of its class. Durable where the server is durable unless it is told otherwise: what a commit costs when
            nothing is kept says nothing about production.
        nodes: How many containers stand in for it; 0 if it cannot be had as containers.
        several: Another form of a backend that has a simpler one: left out of a first look.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 1
    several: bool = False


SPECS = (
    Spec("redis"),
    Spec("redlock", {"count": NODES}, nodes=NODES),
    Spec("postgresql", {"durable": True}),
    Spec("mariadb", {"durable": True}),
    Spec("zookeeper", {"durable": True}),
    Spec("etcd"),
    Spec("redis-sentinel", nodes=0, several=True),
    Spec("redis-cluster", nodes=0, several=True),
    Spec("zookeeper-ensemble", {"durable": True}, nodes=0, several=True),
    Spec("etcd-cluster", nodes=0, several=True),
)


class Fleet:
    """
    A context manager: starts the servers one after the other, and on leaving ends and removes them.

    Args:
        docker: Containers rather than programs of this machine.
        several: Also the forms of several nodes of backends that have a simpler one.
        tell: Called with a line before each start.

    Attributes:
        urls: lockkit's backends on the servers that run, and those that need no server.
        missing: Why others do not, by kind.
    """

    def __init__(self, *, docker: bool, several: bool, tell: Callable[[str], None]) -> None:
        self.urls: list[str] = []
        self.missing: dict[str, str] = {}
        self._docker = docker
        self._specs = [spec for spec in SPECS if several or not spec.several]
        self._tell = tell
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._embedded()
            for spec in self._specs:
                self._add(spec)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell("ending the servers")
        self._stack.close()

    def _embedded(self) -> None:
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="lockkit-bench-"))
        self._offer("memory", "memory://")
        self._offer("file", f"file://{directory}/files")
        self._offer("sqlite", f"sqlite:///{Path(directory) / 'locks.db'}")

    def _add(self, spec: Spec) -> None:
        """Start a service; one that cannot be had or does not start does not end the run."""
        kind = KINDS[spec.kind]
        try:
            service = self._container(spec) if self._docker else self._local(spec)
            if service is None:
                return
            self._tell(f"starting {kind.title}")
            self._stack.enter_context(service)
            self._offer(spec.kind, service.url)
        except (ServerError, OSError) as error:
            self.missing[spec.kind] = str(error).splitlines()[0]

    def _local(self, spec: Spec) -> Service | None:
        kind = KINDS[spec.kind]
        if lacking := kind.missing():
            install = f"python -m lockkit.testing.servers install {spec.kind}"
            self.missing[spec.kind] = f"not on this machine: {', '.join(lacking)}; on Debian: {install}"
            return None
        return kind.make(**spec.options)

    def _container(self, spec: Spec) -> Service | None:
        kind = KINDS["redis" if spec.kind == "redlock" else spec.kind]
        if not spec.nodes or kind.image is None:
            self.missing[spec.kind] = "not offered as containers"
            return None
        if not docker_has(kind.image.name):
            self.missing[spec.kind] = (
                f"no container of {kind.image.name}: needs a Docker daemon that has it or can fetch it, and "
                "pip install testcontainers"
            )
            return None
        if spec.nodes == 1:
            return ContainerServer(kind, kind.image)
        return _Containers([ContainerServer(kind, kind.image) for _ in range(spec.nodes)])

    def _offer(self, kind: str, url: str) -> None:
        """Add a URL for each mode of its backend, unless there is no backend or its driver is missing."""
        scheme = parse(url).scheme
        if scheme not in registry.schemes():
            self.missing[kind] = f"no backend is registered for {scheme}: URLs"
            return
        for number, mode in enumerate(registry.modes(scheme)):
            in_mode = url if not number else f"{url}{'&' if '?' in url else '?'}mode={mode}"
            try:
                lockkit.connect(in_mode).close()
            except lockkit.ConfigurationError as error:
                self.missing[kind] = str(error)
                return
            self.urls.append(in_mode)


class _Containers(RedisNodes):
    """Independent nodes of Redis, each in a container."""

    def __init__(self, containers: list[ContainerServer]) -> None:
        super().__init__(0)
        self._containers = containers
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """``redlock://…`` with all nodes."""
        return "redlock://" + ",".join(str(parse(container.url).hosts[0]) for container in self._containers)

    def start(self) -> Self:
        """See `Service.start`."""
        for container in self._containers:
            self._stack.enter_context(container)
        return self

    def close(self) -> None:
        """See `Service.close`."""
        self._stack.close()
