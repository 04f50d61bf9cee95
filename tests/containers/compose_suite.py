"""The Compose files on a Docker daemon; `nox -s containers` runs this."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future
from subprocess import CompletedProcess

import pytest

from tests.containers.compose import Project
from tests.containers.images import COMPOSE_FILES, docker
from tests.containers.verifying import in_all_modes, lockkit, verifications

FILES = {path.stem: path for path in COMPOSE_FILES}
SINGLE = [name for name in FILES if name != "all"]
README = (FILES["all"].parent / "README.md").read_text()
URLS = dict(re.findall(r"^\| `(\w+)\.yaml` \|.*\| `(\S+://\S+)` \|$", README, re.MULTILINE))
IN_ALL_MODES = in_all_modes(URLS)

pytestmark = pytest.mark.timeout(3600)

each_file = pytest.mark.parametrize("name", SINGLE)


@pytest.fixture(scope="module")
def everything() -> Iterator[Project]:
    """All services of ``all.yaml``, started profile by profile."""
    project = Project(FILES["all"])
    try:
        for name in SINGLE:
            before = project.running()
            project.up(name)
            assert project.running() - before == Project(FILES[name]).services(), f"profile {name}"
        project.up("test")
        yield project
    finally:
        project.down()


@pytest.fixture(scope="module")
def verified(everything: Project) -> Iterator[dict[str, Future[CompletedProcess[str]]]]:
    """The conformance suite, begun on all URLs of the README."""
    assert everything.running() == everything.services("test")
    with verifications(IN_ALL_MODES) as running:
        yield running


@each_file
def test_file_is_enough_for_a_lock(name: str) -> None:
    """Up until healthy, a lock by the URL of the README, no error found by doctor, and all gone at the end."""
    project = Project(FILES[name])
    try:
        project.up()
        held = lockkit(URLS[name], "run", "hello", "--", "echo", "held")
        examined = lockkit(URLS[name], "doctor")
    finally:
        project.down()

    assert (held.returncode, held.stdout) == (0, "held\n"), held.stdout
    assert examined.returncode == 0, examined.stdout
    marked = f"label=com.docker.compose.project=lockkit-{name}"
    assert not docker("ps", "--all", "--quiet", "--filter", marked)
    assert not docker("volume", "ls", "--quiet", "--filter", marked)


@pytest.mark.parametrize("name", IN_ALL_MODES)
def test_conformance(
    name: str, verified: dict[str, Future[CompletedProcess[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """On all that ``all.yaml`` starts."""
    done = verified[name].result()

    with capsys.disabled():
        print(f"\ncompose {name}: {done.stdout.strip().splitlines()[-1]}", end=" ")  # noqa: T201 - what CI is to show
    assert done.returncode == 0, done.stdout
