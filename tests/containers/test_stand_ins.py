"""What stand-ins are made of, as far as it can be seen without Docker."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from lockkit_tools.servers import ServerMissing
from lockkit_tools.servers.kinds import KINDS
from tests.containers.images import COMPOSE_FILES, MYSQL, wanted_images
from tests.containers.rootfs import RootFs, libraries
from tests.containers.stand_ins import ENTRY, RECIPES, find_recipe

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Docker's containers are Linux")


def archived(root: RootFs) -> list[tarfile.TarInfo]:
    """The entries of its archive, in order."""
    output = io.BytesIO()
    root.write(output)
    output.seek(0)
    with tarfile.open(fileobj=output) as archive:
        return archive.getmembers()


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


@on_linux
def test_program_brings_what_it_is_linked_with() -> None:
    """The shell, its C library, and the dynamic linker under the name that it has in the program."""
    paths = RootFs().paths

    found, lacking = libraries(Path("/bin/sh"))
    assert not lacking
    assert len(found) >= 2
    assert {str(library.parent.resolve() / library.name).lstrip("/") for library in found} <= paths
    assert "usr/bin/sh" in paths or "bin/sh" in paths


@on_linux
def test_archive_can_be_unpacked_from_front_to_back() -> None:
    """A link to a directory comes before what lies behind it, and nothing comes twice."""
    names = [entry.name for entry in archived(RootFs())]
    links = {entry.name for entry in archived(RootFs()) if entry.issym()}

    assert len(names) == len(set(names))
    assert not [name for name in names if name.partition("/")[0] in links and name not in links]
    assert max(names.index(link) for link in links) < names.index(next(name for name in names if "/bin/" in name))


@on_linux
def test_everything_belongs_to_root() -> None:
    """Accounts of this machine have no meaning in the image."""
    root = RootFs()
    root.account("mysql", 999)
    entries = archived(root)

    assert {(entry.uid, entry.gid) for entry in entries} == {(0, 0)}
    assert {"etc/passwd", "etc/group", "tmp"} <= {entry.name for entry in entries}


@on_linux
def test_tree_follows_links_and_leaves_out_what_is_not_wanted(tmp_path: Path) -> None:
    """As a JRE's configuration is linked to /etc."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("content")
    (tmp_path / "tree" / "jmods").mkdir(parents=True)
    (tmp_path / "tree" / "jmods" / "large").write_text("")
    (tmp_path / "tree" / "conf").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "tree" / "dangling").symlink_to(tmp_path / "nowhere")
    root = RootFs()
    before = root.paths

    root.tree(tmp_path / "tree", without=("jmods",))

    (added,) = root.paths - before
    assert Path("/", added).read_text() == "content"


@on_linux
def test_missing_program_is_named() -> None:
    """Rather than an image that does not start."""
    with pytest.raises(ServerMissing, match="no-such-program"):
        RootFs().program("no-such-program")


@pytest.mark.parametrize("script", sorted(ENTRY.glob("*.sh")), ids=lambda path: path.name)
def test_entry_scripts_can_be_read(script: Path) -> None:
    """By the shell that they name."""
    shell = script.read_text().splitlines()[0].removeprefix("#!")

    done = subprocess.run([shell, "-n", str(script)], check=False, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
