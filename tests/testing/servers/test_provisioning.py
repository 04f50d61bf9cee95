"""Where servers come from, and what is said when they come from nowhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lockkit_tools.servers import (
    ServerMissing,
    Unmanaged,
    docker,
    install,
    kinds,
    locate,
    provide,
    require,
)
from lockkit_tools.servers.kinds import KINDS, Kind, Need
from lockkit_tools.servers.provisioning import look

# One that no machine has.
GHOST = Kind(
    "ghost",
    "A server that does not exist",
    "redis:RedisServer",
    (Need(("lockkit-no-such-program",)),),
    ("lockkit-no-such-package",),
)


@pytest.fixture
def ghost(monkeypatch: pytest.MonkeyPatch) -> Kind:
    """A kind that is missing on a machine where nothing can be installed."""
    monkeypatch.setitem(KINDS, GHOST.name, GHOST)
    monkeypatch.setattr(install, "can_install", lambda: False)
    monkeypatch.delenv("CI", raising=False)
    return GHOST


@pytest.fixture
def no_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a Docker daemon."""
    monkeypatch.setattr(kinds, "docker_has", lambda _: False)


def test_url_of_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used as it is, and cannot be killed or emptied."""
    monkeypatch.setenv("LOCKKIT_TEST_REDIS_URL", "redis://elsewhere:6379/3")

    with provide("redis") as server:
        assert server.url == "redis://elsewhere:6379/3"
        assert not server.managed
        with pytest.raises(Unmanaged, match="LOCKKIT_TEST_REDIS_URL"):
            server.kill()
        with pytest.raises(Unmanaged):
            server.restart()


def test_docker_comes_before_local_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """But only where there is an image, and not when a local process is asked for."""
    require("redis", local=True)
    monkeypatch.setattr(kinds, "docker_has", lambda _: True)

    assert locate("redis").origin == "docker"
    assert isinstance(provide("redis"), docker.ContainerServer)
    assert locate("redis", local=True).origin == "local"
    assert look(KINDS["redlock"]) == look(KINDS["redlock"], local=True)


@pytest.mark.usefixtures("no_docker")
def test_containers_can_be_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a local program does not pass for one, save where the test asks for it."""
    require("redis", local=True)
    monkeypatch.setenv("LOCKKIT_TEST_SERVERS", "docker")

    with pytest.raises(ServerMissing, match=r"redis:7.*pip install testcontainers"):
        provide("redis")
    with pytest.raises(ServerMissing, match="no form in one container"):
        provide("pgbouncer")
    assert locate("redis", local=True).origin == "local"


def test_missing_server_says_what_to_do(ghost: Kind) -> None:
    """Program, package and variable are in the message."""
    with pytest.raises(
        ServerMissing,
        match=r"lockkit-no-such-program.*lockkit-no-such-package.*LOCKKIT_TEST_GHOST_URL",
    ):
        provide(ghost.name)


def test_missing_server_skips_the_test_of_a_developer(ghost: Kind) -> None:
    """Not everybody has every server."""
    with pytest.raises(pytest.skip.Exception, match="lockkit-no-such-program"):
        require(ghost.name)


def test_missing_server_fails_the_test_in_ci(ghost: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """In CI a backend that nobody tested is a failure."""
    monkeypatch.setenv("CI", "true")

    with pytest.raises(pytest.fail.Exception, match="lockkit-no-such-program"):
        require(ghost.name)


def test_administrator_s_policy_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content and mode, also when apt-get fails; while it runs, no package starts a service."""
    policy, seen = tmp_path / "policy-rc.d", []

    def fail(*arguments: str) -> subprocess.CompletedProcess[str]:
        seen.append(policy.read_text())
        return subprocess.CompletedProcess(arguments, 100, "E: Unable to locate package")

    monkeypatch.setattr(install, "POLICY", policy)
    monkeypatch.setattr(install, "can_install", lambda: True)
    monkeypatch.setattr(install, "_apt_get", fail)
    policy.write_text("#!/bin/sh\nexit 104\n")
    policy.chmod(0o751)

    with pytest.raises(ServerMissing, match="Unable to locate"):
        install.install([GHOST], tell=lambda _: None)

    assert policy.read_text() == "#!/bin/sh\nexit 104\n"
    assert policy.stat().st_mode & 0o777 == 0o751
    assert set(seen) == {install.FORBID}
