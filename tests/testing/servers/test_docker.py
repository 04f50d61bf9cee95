"""
Servers in containers, as far as it can be tested where there is no Docker; `nox -s containers` does it where there is.

A stand-in takes the place of testcontainers: its "container" is a local Redis at the port
that the container would publish.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import ClassVar, Self

import pytest

from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import RedisServer, ServerError, docker, require
from lockkit_tools.servers.docker import ContainerServer, _close_all
from lockkit_tools.servers.kinds import KINDS
from lockkit_tools.servers.resp import RespConnection


class Container:
    """What `ContainerServer` uses of testcontainers' DockerContainer."""

    made: ClassVar[list[Container]] = []

    def __init__(self, image: str) -> None:
        self.image = image
        self.removed = False
        self.ports: dict[str, tuple[str, int]] = {}
        self.server = RedisServer()
        Container.made.append(self)

    def start(self) -> Self:
        """Starts the server where the one published port leads, which is on loopback."""
        ((inside, (host, outside)),) = self.ports.items()
        assert (inside, host) == ("6379/tcp", "127.0.0.1")
        self.server = RedisServer(port=outside)
        self.server.start()
        return self

    def stop(self) -> None:
        """Removes the container."""
        self.server.close()
        self.removed = True

    def get_wrapped_container(self) -> SimpleNamespace:
        """Docker's own object."""
        server = self.server
        return SimpleNamespace(
            start=server.start,
            stop=server.stop,
            kill=server.kill,
            pause=server.pause,
            unpause=server.resume,
            logs=lambda tail: b"out of memory" if tail else b"",
        )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ContainerServer]:
    """A Redis "container"."""
    require("redis", local=True)
    stand_in = ModuleType("testcontainers.core.container")
    monkeypatch.setattr(stand_in, "DockerContainer", Container, raising=False)
    monkeypatch.setitem(sys.modules, "testcontainers.core.container", stand_in)
    config = ModuleType("testcontainers.core.config")
    settings = SimpleNamespace(ryuk_disabled=True, ryuk_image="testcontainers/ryuk")
    monkeypatch.setattr(config, "testcontainers_config", settings, raising=False)
    monkeypatch.setitem(sys.modules, "testcontainers.core.config", config)
    Container.made.clear()
    kind = KINDS["redis"]
    assert kind.image is not None
    server = ContainerServer(kind.name, kind.image)
    yield server
    server.close()
    assert all(container.removed for container in Container.made)


def ping(server: ContainerServer, timeout: float = PATIENCE) -> object:
    """Asks the server at the port that the URL names."""
    assert server.url == f"redis://127.0.0.1:{server.port}/0"
    with RespConnection(("127.0.0.1", server.port), timeout=timeout) as connection:
        return connection.call("PING")


def test_container_keeps_its_port_across_crashes(server: ContainerServer) -> None:
    """The same container is started again."""
    server.start()
    port = server.port
    server.kill()
    with pytest.raises(ConnectionRefusedError):
        ping(server)

    server.start()

    assert ping(server) == "PONG"
    assert server.port == port
    assert len(Container.made) == 1


def test_container_without_data_is_a_new_one(server: ContainerServer) -> None:
    """Removing it is what empties it."""
    server.start()
    port = server.port

    server.restart(keep_data=False)

    assert ping(server) == "PONG"
    assert server.port == port
    assert [container.removed for container in Container.made] == [True, False]


def test_container_that_nobody_closed_is_removed_at_the_end_of_the_program(server: ContainerServer) -> None:
    """Where testcontainers' own reaper cannot be had nobody else does it."""
    server.start()

    _close_all()

    assert [container.removed for container in Container.made] == [True]


def test_container_that_does_not_answer_shows_its_log(server: ContainerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone before anybody could ask Docker for it."""

    def never(_: object) -> None:
        raise ServerError("still waiting")

    monkeypatch.setattr(docker, "wait_until", never)

    with pytest.raises(ServerError, match=r"redis:7.*still waiting.*\n.*out of memory"), server:
        pass
