"""Throw-away servers to measure on: of each kind that lockkit has a backend for and that can be had here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self
from unittest import mock

import lockkit
from lockkit.configuration import registry
from lockkit.url import parse
from lockkit_tools.servers import ServerError, Service
from lockkit_tools.servers.kinds import KINDS
from lockkit_tools.servers.temporary import TemporaryDirectory

NODES = 5
"""Of Redlock: what its description uses."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One service to start."""

    kind: str
    # Of its class, as a local program. Durable where the server is durable unless it is told otherwise: what a commit
    # costs when nothing is kept says nothing about production.
    options: Mapping[str, Any] = field(default_factory=dict)
    several: bool = False  # another form of a backend that has a simpler one: left out of a first look


SPECS = (
    ServerSpec("redis"),
    ServerSpec("redlock", {"count": NODES}),
    ServerSpec("postgresql", {"durable": True}),
    ServerSpec("mariadb", {"durable": True}),
    ServerSpec("zookeeper", {"durable": True}),
    ServerSpec("etcd"),
    ServerSpec("redis-sentinel", several=True),
    ServerSpec("redis-cluster", several=True),
    ServerSpec("zookeeper-ensemble", {"durable": True}, several=True),
    ServerSpec("etcd-cluster", several=True),
    ServerSpec("s3", several=True),  # thousands of rounds at a store are no first look either
)


class ThrowawayServers:
    """
    A context manager: starts the servers one after the other, and on leaving ends and removes them.

    Args:
        docker: Containers rather than programs of this machine.
        several: Also the forms of several nodes of backends that have a simpler one.
        tell: Called with a line before each start.
    """

    def __init__(self, *, docker: bool, several: bool, tell: Callable[[str], None]) -> None:
        self.urls: list[str] = []  # lockkit's backends on the servers that run, and those that need no server
        self.missing: dict[str, str] = {}  # why others do not, by kind
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

    def __exit__(self, *_: object) -> None:
        self._tell("ending the servers")
        self._stack.close()

    def _embedded(self) -> None:
        directory = self._stack.enter_context(TemporaryDirectory("bench"))
        self._offer("memory", "memory://")
        self._offer("file", f"file://{directory}/files")
        self._offer("sqlite", f"sqlite:///{directory}/locks.db")

    def _add(self, spec: ServerSpec) -> None:
        """Start a service; one that cannot be had or does not start does not end the run."""
        kind = KINDS[spec.kind]
        try:
            service = self._container(spec) if self._docker else self._local(spec)
            if service is None:
                return
            self._tell(f"starting {kind.title}")
            self._stack.enter_context(service)
            self._stack.enter_context(mock.patch.dict(os.environ, service.credentials))
            self._offer(spec.kind, service.url)
        except (ServerError, OSError) as error:
            self.missing[spec.kind] = str(error).splitlines()[0]

    def _local(self, spec: ServerSpec) -> Service | None:
        kind = KINDS[spec.kind]
        if lacking := kind.missing():
            install = f"python -m lockkit_tools.servers install {spec.kind}"
            self.missing[spec.kind] = f"not on this machine: {', '.join(lacking)}; on Debian: {install}"
            return None
        return kind.make(**spec.options)

    def _container(self, spec: ServerSpec) -> Service | None:
        kind = KINDS[spec.kind]
        if (lacking := kind.missing_image()) is not None:
            self.missing[spec.kind] = lacking
            return None
        return kind.make_contained()

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
