"""What stand-ins are made of, as far as it can be seen without Docker."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from lockkit_tools.servers.kinds import KINDS
from tests.containers.images import COMPOSE_FILES, MYSQL, wanted_images
from tests.containers.stand_ins import ENTRY, RECIPES, find_recipe


def test_kinds_of_servers_and_compose_files_name_the_same_images() -> None:
    """One pinned tag of each server; MySQL has no Compose file."""
    documents = [yaml.safe_load(path.read_text()) for path in COMPOSE_FILES]
    composed = {service.get("image") for document in documents for service in document["services"].values()} - {None}

    assert {kind.image.name for kind in KINDS.values() if kind.image} == composed | {MYSQL}


def test_every_wanted_image_has_a_recipe() -> None:
    """Else the session could not run where there is no registry."""
    recipes = {find_recipe(name) for name in wanted_images()}

    assert recipes == set(RECIPES)
    assert all(recipe.kind in KINDS for recipe in RECIPES)


@pytest.mark.parametrize("script", sorted(ENTRY.glob("*.sh")), ids=lambda path: path.name)
def test_entry_scripts_can_be_read(script: Path) -> None:
    """By the shell that they name."""
    shell = script.read_text().splitlines()[0].removeprefix("#!")

    done = subprocess.run([shell, "-n", str(script)], check=False, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
