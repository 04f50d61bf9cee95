"""A server in a container, through testcontainers; used only where a Docker daemon answers."""

from __future__ import annotations

import functools
import os
import socket
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

from lockkit.testing.servers._ports import HOST, Ports
from lockkit.testing.servers.base import STOP_TIMEOUT, Service, wait_until
from lockkit.testing.servers.errors import ServerError

if TYPE_CHECKING:
    from lockkit.testing.servers.kinds import Image, Kind

# A daemon that needs longer to say that it is there is no help.
DAEMON_TIMEOUT_S = 5


class ContainerServer(Service):
    """
    One container, reached at a port of 127.0.0.1 that it keeps across restarts.

    Args:
        kind: What it is.
        image: How to run it.
    """

    def __init__(self, kind: Kind, image: Image) -> None:
        self.kind = kind.name
        self._image = image
        self._ports = Ports()
        self._port: int | None = None
        # `Any`: testcontainers and docker are not installed where they are not used.
        self._container: Any = None

    @property
    def port(self) -> int:
        """Port of 127.0.0.1 that leads into the container."""
        if self._port is None:
            self._port = self._ports.reserve()
        return self._port

    @property
    def url(self) -> str:
        """The lockkit URL."""
        return self._image.url.format(address=f"{HOST}:{self.port}")

    def start(self) -> Self:
        """Starts the container, made at the first start, and waits until it answers."""
        if self._container is None:
            self._container = self._made()
        else:
            self._docker.start()
        wait_until(lambda: self._image.ask(HOST, self.port))
        return self

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """Ends the server in the container; Docker kills it after `timeout`."""
        self._docker.stop(timeout=round(timeout))

    def kill(self) -> None:
        """Ends the server in the container with SIGKILL."""
        self._docker.kill()

    def pause(self) -> None:
        """Freezes the container."""
        self._docker.pause()

    def resume(self) -> None:
        """Lets the container go on."""
        self._docker.unpause()

    def erase(self) -> None:
        """Removes the container and its volumes; the next start makes a new one."""
        self._container.stop()
        self._container = None

    def close(self) -> None:
        """Removes the container."""
        if self._container is not None:
            self.erase()
        self._ports.close()
        self._port = None

    @property
    def _docker(self) -> Any:  # noqa: ANN401 - docker's own container object
        if self._container is None:
            raise ServerError(f"{self.kind} does not run; call start() first")
        return self._container.get_wrapped_container()

    def _made(self) -> Any:  # noqa: ANN401 - testcontainers' object
        factory = import_module("testcontainers.core.container").DockerContainer
        container = factory(self._image.name)
        # The pair keeps the port on loopback: a bare number would open it to the network.
        container.with_bind_ports(self._image.port, (HOST, self.port))
        for name, value in self._image.env:
            container.with_env(name, value)
        if self._image.command is not None:
            container.with_command(self._image.command)
        return container.start()


@functools.cache
def docker_has(image: str) -> bool:
    """Whether a Docker daemon answers here and has the image, or can fetch it."""
    if find_spec("docker") is None or find_spec("testcontainers") is None or not _somebody_listens():
        return False
    docker = import_module("docker")
    try:
        client = docker.from_env(timeout=DAEMON_TIMEOUT_S)
    except docker.errors.DockerException:
        return False  # no daemon
    try:
        client.images.get(image)
    except docker.errors.ImageNotFound:
        return _pulled(docker, image)
    except docker.errors.DockerException:
        return False
    finally:
        client.close()
    return True


def _somebody_listens() -> bool:
    """
    Whether anything accepts connections where the daemon should be.

    Asked before Docker's own client is, which leaves an open socket behind when it fails,
    and with it a ResourceWarning in some later test.
    """
    scheme, _, place = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").partition("://")
    if scheme != "unix":
        return True  # a machine elsewhere: only the client can tell
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(place) == 0


def _pulled(docker: Any, image: str) -> bool:  # noqa: ANN401 - the docker module
    client = docker.from_env()  # fetching takes its time: Docker's own time limit
    try:
        client.images.pull(image)
    except docker.errors.DockerException:
        return False
    finally:
        client.close()
    return True
