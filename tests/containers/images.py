"""The images that the Compose files and `lockkit_tools.servers` name, and Docker's client as a function."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from lockkit_tools.servers.errors import ServerError
from lockkit_tools.servers.kinds import KINDS

COMPOSE_FILES = sorted((Path(__file__).parents[2] / "compose").glob("*.yaml"))

# A registry that does not answer at all.
PULL_TIMEOUT = 600


def docker(*arguments: str) -> str:
    """Runs Docker's client to its end, and gives what it printed."""
    done = subprocess.run(["docker", *arguments], check=False, capture_output=True, text=True, timeout=PULL_TIMEOUT)
    if done.returncode != 0:
        raise ServerError(f"docker {' '.join(arguments)} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout.strip()


def composed_images() -> set[str]:
    """All that the Compose files name."""
    documents = [yaml.safe_load(path.read_text()) for path in COMPOSE_FILES]
    return {
        service["image"] for document in documents for service in document["services"].values() if "image" in service
    }


def missing_images() -> list[str]:
    """What is not here and cannot be pulled, of all images that are named."""
    return [
        name for name in sorted(composed_images() | {k.image.name for k in KINDS.values() if k.image}) if _lacks(name)
    ]


def _lacks(name: str) -> bool:
    for command in (("image", "inspect", name), ("pull", "--quiet", name)):
        try:
            docker(*command)
        except (ServerError, subprocess.TimeoutExpired):
            continue
        return False
    return True
