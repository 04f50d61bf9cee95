"""What servers need before their first start is made once, and copied."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockkit_tools.servers import MariaServer, PostgresServer, require
from lockkit_tools.servers._template import VARIABLE, make_or_copy


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that keeps what was made."""
    folder = tmp_path / "templates"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


@pytest.mark.usefixtures("templates")
def test_same_recipe_is_made_once(tmp_path: Path) -> None:
    """Of several at a time, one makes it; each has a copy of its own, with the modes of the original."""
    made = []

    def fill(folder: Path) -> Path:
        def make() -> None:
            made.append(folder)
            (folder / "file").write_text("text")
            (folder / "file").chmod(0o640)

        folder.mkdir(mode=0o700)
        make_or_copy(folder, make, "recipe")
        return folder / "file"

    with ThreadPoolExecutor(4) as pool:
        files = list(pool.map(fill, [tmp_path / f"data{number}" for number in range(4)]))
    files[0].write_text("changed")
    files[0] = fill(tmp_path / "later")

    assert len(made) == 1
    assert {(file.read_text(), file.stat().st_mode & 0o777) for file in files} == {("text", 0o640)}
    assert {file.parent.stat().st_mode & 0o777 for file in files} == {0o700}


@pytest.mark.parametrize("kind", [PostgresServer, MariaServer], ids=["postgresql", "mariadb"])
def test_copied_servers_are_apart(kind: type[PostgresServer | MariaServer], templates: Path) -> None:
    """The second one starts from the copy, without what was written to the first."""
    require(kind.kind, local=True)

    for _ in range(2):
        with kind() as server:
            server.execute("CREATE TABLE kept (i int)")

    assert len([path for path in templates.iterdir() if path.is_dir()]) == 1
