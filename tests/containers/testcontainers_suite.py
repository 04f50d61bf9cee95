"""The servers of `lockkit_tools.servers` in containers; `nox -s containers` runs this."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from subprocess import CompletedProcess

import pytest

import lockkit
from lockkit_tools.servers import provide
from lockkit_tools.servers.docker import ContainerServer
from lockkit_tools.servers.kinds import KINDS
from tests.containers.images import docker
from tests.containers.verifying import in_all_modes, verifications

CONTAINED = [name for name, kind in KINDS.items() if kind.image]
# The servers that have no Compose file: all their modes are tried here. Those of the others are tried there.
ONLY_HERE = {"mysql"}
TARGETS = [*CONTAINED, *(f"{name}-{mode}" for name in CONTAINED if name in ONLY_HERE for mode in ("row", "advisory"))]

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module", autouse=True)
def _containers_only() -> Iterator[None]:
    """Nothing here may be a local program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKKIT_TEST_SERVERS", "docker")
        yield


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """All kinds at once, in containers."""
    with ExitStack() as stack:
        found = {name: stack.enter_context(provide(name)).url for name in CONTAINED}
        yield found | in_all_modes({name: url for name, url in found.items() if name in ONLY_HERE})


@pytest.fixture(scope="module")
def verified(urls: dict[str, str]) -> Iterator[dict[str, Future[CompletedProcess[str]]]]:
    """The conformance suite, begun on all of them."""
    with verifications(urls) as running:
        yield running


def held(url: str) -> int:
    """Takes a lock and gives its token."""
    with lockkit.connect(url) as client, client.lock("hello", timeout=30) as lease:
        return lease.token


@pytest.mark.parametrize("name", CONTAINED)
def test_killed_service_comes_back_at_its_url(name: str) -> None:
    """Its container ends as in a power cut, and is removed at the end."""
    with provide(name) as service:
        assert isinstance(service, ContainerServer)
        url, container = service.url, service.id
        token = held(url)

        service.kill()
        with pytest.raises(lockkit.BackendUnavailable), lockkit.connect(url) as client:
            client.ping()
        service.start()

        assert service.url == url
        assert held(url) > token
        assert service.id == container
    assert container not in docker("ps", "--all", "--quiet", "--no-trunc").split()


def test_frozen_service_goes_on() -> None:
    """It answers nothing meanwhile, and has forgotten nothing."""
    with provide("redis") as service:
        token = held(service.url)
        service.pause()
        with pytest.raises(lockkit.LockError), lockkit.connect(service.url) as client:
            client.lock("hello", timeout=1).acquire()
        service.resume()

        assert held(service.url) > token


def test_erased_service_is_empty() -> None:
    """New containers at the same address."""
    with provide("etcd") as service, lockkit.connect(service.url) as client:
        lease = client.lock("hello", renew=False).acquire()
        url = service.url

        service.restart(keep_data=False)

        assert service.url == url
        assert not client.lock("hello").locked()
        with pytest.raises(lockkit.LockLost):
            lease.release()


@pytest.mark.parametrize("name", TARGETS)
def test_conformance(
    name: str, verified: dict[str, Future[CompletedProcess[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """On each kind of server."""
    done = verified[name].result()

    with capsys.disabled():
        print(f"\ntestcontainers {name}: {done.stdout.strip().splitlines()[-1]}", end=" ")  # noqa: T201 - for CI to show
    assert done.returncode == 0, done.stdout
