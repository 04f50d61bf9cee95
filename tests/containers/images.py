"""The images that the Compose files and `lockkit_tools.servers` name: here already, pulled, or stood in for."""

from __future__ import annotations

import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from lockkit_tools.servers.errors import ServerMissing
from lockkit_tools.servers.install import install
from lockkit_tools.servers.kinds import KINDS
from tests.containers.engine import docker, docker_says
from tests.containers.stand_ins import SEARCH_PATH, Recipe, find_recipe

COMPOSE_FILES = sorted((Path(__file__).parents[2] / "compose").glob("*.yaml"))

# What marks a stand-in, and says what is in it.
LABEL = "lockkit.stand-in"

# A registry that does not answer at all.
PULL_TIMEOUT = 600

# Debian has no MySQL to stand in for it: without a registry it is not tested.
MYSQL = "mysql:8"


def wanted_images() -> set[str]:
    """All that the Compose files and the kinds of servers name, save MySQL."""
    services = [
        service
        for path in COMPOSE_FILES
        for service in yaml.safe_load(path.read_text())["services"].values()
        if "image" in service
    ]
    named = {service["image"] for service in services} | {kind.image.name for kind in KINDS.values() if kind.image}
    return named - {MYSQL}


@contextmanager
def images(tell: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """
    Makes sure that all images are here while the context lasts.

    Gives, by the name of each stand-in, what is in it. They are removed at the end: under their names somebody else
    expects the real thing.
    """
    made: dict[str, str] = {}
    try:
        for name in sorted(wanted_images()):
            if (content := _bring(name)) is None:
                tell(f"image {name}: {docker('image', 'inspect', '--format', '{{.Id}}', name)}")
            else:
                made[name] = content
                tell(f"image {name}: STAND-IN, in fact {content}")
        yield made
    finally:
        if made:
            docker("image", "rm", "--force", *made)


def can_pull(name: str) -> bool:
    """Whether an image is here, or could be fetched."""
    if docker_says("image", "inspect", name) is not None:
        return True
    pull = ["docker", "pull", "--quiet", name]
    return subprocess.run(pull, check=False, capture_output=True, timeout=PULL_TIMEOUT).returncode == 0


def _bring(name: str) -> str | None:
    """Fetches an image or makes a stand-in, and gives what is in that; None for the real one."""
    if docker_says("image", "inspect", "--format", f'{{{{index .Config.Labels "{LABEL}"}}}}', name):
        docker("image", "rm", "--force", name)  # a stand-in of a run that was killed
    if can_pull(name):
        return None
    recipe = find_recipe(name)
    if recipe is None:
        raise ServerMissing(f"the image {name} cannot be pulled, and there is no stand-in for it")
    install([KINDS[recipe.kind]], tell=lambda _: None)
    content = f"{recipe.kind} {recipe.version()} of {platform.freedesktop_os_release()['PRETTY_NAME']}"
    _import(recipe, name, content)
    return content


def _import(recipe: Recipe, name: str, content: str) -> None:
    """Makes an image of the recipe's root file system."""
    changes = (f"ENV PATH={SEARCH_PATH}", f'LABEL {LABEL}="{content}"', *recipe.changes)
    options = [word for change in changes for word in ("--change", change)]
    with tempfile.NamedTemporaryFile(prefix="lockkit-stand-in-", suffix=".tar") as archive:
        recipe.root().write(archive)
        archive.flush()
        docker("import", *options, archive.name, name)
