"""The Compose files: what can be said of them without a Docker engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

COMPOSE = Path(__file__).parents[2] / "compose"
FILES = sorted(COMPOSE.glob("*.yaml"))


def test_there_are_files_and_the_readme_names_each() -> None:
    """A file that nobody lists is not found by anybody."""
    readme = (COMPOSE / "README.md").read_text()

    assert FILES
    assert all(f"`{path.name}`" in readme for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ports_are_for_this_machine_only_and_images_are_pinned(path: Path) -> None:
    """A lock server for development is nobody else's business; ``latest`` is another server each week."""
    text = path.read_text()
    published = re.findall(r'ports: \["([^"]+)"', text)
    images = re.findall(r"image: (\S+)", text)

    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert all(re.fullmatch(r"[\w./-]+:\d[\w.-]*", image) for image in images)
    assert text.count("healthcheck:") == len(images)
