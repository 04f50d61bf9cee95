"""Docker: the daemon that runs here, or one that we start and end; and its client as a function."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockkit_tools.servers.base import wait_until
from lockkit_tools.servers.errors import ServerError, ServerMissing
from lockkit_tools.servers.install import can_install, install
from lockkit_tools.servers.kinds import Kind, Need

# Debian's packages; the second one mounts the cgroups where nothing else has done so.
DOCKER = Kind(
    "docker",
    "Docker",
    None,
    (Need(("dockerd",)), Need(("docker",))),
    ("docker.io", "cgroupfs-mount"),
)

# A daemon that removes its networks and containers takes some seconds.
END_TIMEOUT = 60.0


def docker(*arguments: str) -> str:
    """Runs Docker's client to its end, and gives what it printed."""
    done = subprocess.run(["docker", *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise ServerError(f"docker {' '.join(arguments)} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout.strip()


def docker_says(*arguments: str) -> str | None:
    """As `docker`, but None if it fails."""
    try:
        return docker(*arguments)
    except ServerError:
        return None


@contextmanager
def engine(tell: Callable[[str], None]) -> Iterator[None]:
    """Makes sure that a daemon answers while the context lasts."""
    if shutil.which("docker") is not None and (version := _version()) is not None:
        tell(f"Docker {version} runs")
        yield
        return
    _install(tell)
    with _daemon():
        tell(f"Docker {_version()}, started for this run only")
        yield


def _version() -> str | None:
    return docker_says("version", "--format", "{{.Server.Version}}")


def _install(tell: Callable[[str], None]) -> None:
    lacking = DOCKER.missing()
    if lacking and not can_install():
        raise ServerMissing(
            f"no Docker daemon answers, and {', '.join(lacking)} is not here: only root on Debian can install it from "
            f"here (Debian's packages: {' '.join(DOCKER.packages)}). Start one, or set DOCKER_HOST"
        )
    install([DOCKER], tell=tell)


@contextmanager
def _daemon() -> Iterator[None]:
    """Runs a daemon with all of its files in a temporary directory, where ``DOCKER_HOST`` leads meanwhile."""
    if os.geteuid() != 0:
        raise ServerMissing("no Docker daemon answers, and only root can start one")
    folder = Path(tempfile.mkdtemp(prefix="lockkit-docker-"))
    places = {"--data-root": "data", "--exec-root": "exec", "--pidfile": "docker.pid"}
    socket = f"unix://{folder}/docker.sock"
    before = os.environ.get("DOCKER_HOST")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["dockerd", "--host", socket, *(f"{option}={folder / name}" for option, name in places.items())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C in the terminal is for us: the daemon ends when we are done with it.
            start_new_session=True,
        )
    os.environ["DOCKER_HOST"] = socket
    try:
        _await(process, folder / "log")
        yield
    finally:
        if before is None:
            del os.environ["DOCKER_HOST"]
        else:
            os.environ["DOCKER_HOST"] = before
        process.send_signal(signal.SIGTERM)
        process.wait(END_TIMEOUT)
        shutil.rmtree(folder)


def _await(process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until the daemon answers."""

    def missing() -> str | None:
        # `docker version` asks; a daemon that has ended answers no more, and need not be waited for.
        return None if process.poll() is not None or _version() is not None else "dockerd does not answer yet"

    try:
        wait_until(missing)
    except ServerError as error:
        raise ServerError(f"{error}; its log:\n{_tail(log)}") from error
    if process.poll() is not None:
        raise ServerError(f"dockerd ended with status {process.returncode}; its log:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])
