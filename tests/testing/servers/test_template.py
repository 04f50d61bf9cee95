"""What servers need before their first start is made once, and copied."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockkit_tools.servers import MariaServer, PostgresServer, require
from lockkit_tools.servers._template import VARIABLE, make_or_copy


class Maker:
    """Fills directories, and counts how often."""

    def __init__(self) -> None:
        self.made = 0

    def fill(self, data: Path, text: str = "text", *recipe: object) -> None:
        """Have a directory filled with one file."""
        data.mkdir(mode=0o700)
        make_or_copy(data, lambda: self._make(data, text), *recipe)

    def _make(self, data: Path, text: str) -> None:
        self.made += 1
        (data / "file").write_text(text)
        (data / "file").chmod(0o640)


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
    maker = Maker()
    folders = [tmp_path / f"data{number}" for number in range(4)]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda folder: maker.fill(folder, "text", "recipe"), folders))

    assert maker.made == 1
    assert [(folder / "file").read_text() for folder in folders] == ["text"] * 4
    assert {(folder / "file").stat().st_mode & 0o777 for folder in folders} == {0o640}
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    (folders[0] / "file").write_text("changed")
    maker.fill(tmp_path / "later", "text", "recipe")
    assert (tmp_path / "later" / "file").read_text() == "text"


@pytest.mark.parametrize("kind", [PostgresServer, MariaServer], ids=["postgresql", "mariadb"])
def test_copied_servers_are_apart(kind: type[PostgresServer | MariaServer], templates: Path) -> None:
    """The second one starts from the copy, without what was written to the first."""
    require(kind.kind, local=True)

    for _ in range(2):
        with kind() as server:
            server.execute("CREATE TABLE kept (i int)")

    assert len([path for path in templates.iterdir() if path.is_dir()]) == 1
