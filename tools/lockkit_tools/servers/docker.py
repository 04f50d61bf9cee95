"""A server in a container, through testcontainers; used only where a Docker daemon answers."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

from lockkit.units import Seconds
from lockkit_tools.servers._ports import HOST, Ports
from lockkit_tools.servers.base import STOP_TIMEOUT, Service, alive, wait_until
from lockkit_tools.servers.errors import ServerError

# A daemon that needs longer to say that it is there is no help.
DAEMON_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True)
class Image:
    """A container image of a server, and how it is run; tags are those of the Compose files."""

    name: str
    port: int
    url: str
    """With ``{address}`` where host and port go."""
    ask: Callable[[str, int], str | None]
    """Asks whether the server at this host and port is ready."""
    env: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] | None = None


class ContainerServer(Service):
    """One container, reached at a port of 127.0.0.1 that it keeps across restarts."""

    def __init__(self, kind: str, image: Image) -> None:
        self.kind = kind
        self._image = image
        self._ports = Ports()
        self._own_port: int | None = None
        # `Any`: testcontainers and docker are not installed where they are not used.
        self._container: Any = None

    @property
    def port(self) -> int:
        """Port of 127.0.0.1 that leads into the container."""
        if self._own_port is None:
            self._own_port = self._ports.reserve()
        return self._own_port

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        """The lockkit URL."""
        return self._image.url.format(address=self.address)

    @property
    def id(self) -> str:
        """Docker's name for the container."""
        return str(self._docker.id)

    def start(self) -> Self:
        if self._container is not None:
            self._docker.start()
        else:
            self._container = self._described()
            alive[self] = os.getpid()
            self._container.start()
        try:
            wait_until(lambda: self._image.ask(HOST, self.port))
        except ServerError as error:
            log = self._docker.logs(tail=40).decode(errors="replace")
            raise ServerError(f"{self.kind} in a container of {self._image.name}: {error}; its log:\n{log}") from error
        return self

    def stop(self, timeout: Seconds = STOP_TIMEOUT) -> None:
        self._docker.stop(timeout=round(timeout))

    def kill(self) -> None:
        self._docker.kill()

    def pause(self) -> None:
        self._docker.pause()

    def resume(self) -> None:
        self._docker.unpause()

    def erase(self) -> None:
        """Removes the container and its volumes; the next start makes a new one."""
        self._container.stop()
        self._container = None
        alive.pop(self, None)

    def close(self) -> None:
        if self._container is not None:
            self.erase()
        self._ports.close()
        self._own_port = None

    @property
    def _docker(self) -> Any:  # noqa: ANN401 - docker's own container object
        if self._container is None:
            raise ServerError(f"{self.kind} does not run; call start() first")
        return self._container.get_wrapped_container()

    def _described(self) -> Any:  # noqa: ANN401 - testcontainers' object
        config = import_module("testcontainers.core.config").testcontainers_config
        # Testcontainers' own container, which removes ours should we die.  Where it cannot be had we do so at our end.
        config.ryuk_disabled = config.ryuk_disabled or not docker_has(config.ryuk_image)
        container = import_module("testcontainers.core.container").DockerContainer(self._image.name)
        # Docker's pair of address and port keeps it on loopback. `with_bind_ports` takes a bare number only, which
        # would open it to the network.
        container.ports[f"{self._image.port}/tcp"] = (HOST, self.port)
        for name, value in self._image.env:
            container.with_env(name, value)
        if self._image.command is not None:
            container.with_command(list(self._image.command))
        return container


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
