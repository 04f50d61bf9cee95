"""The file of a SQLite database: who may read it, and which files are refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

import lockkit

NOBODY = 65534


def lock(url: str) -> None:
    """Take a lock."""
    with lockkit.connect(url) as client, client.lock("x"):
        pass


@pytest.mark.parametrize(("query", "mode"), [("", 0o600), ("?group=1", 0o660)])
def test_new_file_is_for_this_user_alone(tmp_path: Path, query: str, mode: int) -> None:
    """And so are the files that SQLite makes beside it, whatever the umask says."""
    path = tmp_path / "locks.db"
    before = os.umask(0)
    try:
        with lockkit.connect(f"sqlite:///{path}{query}") as client, client.lock("x"):
            backend: Any = client._engine.client.backend
            backend.database._idle[0].dbapi.execute("PRAGMA journal_mode=WAL")
            with client.lock("y"):
                modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == {"locks.db": mode, "locks.db-wal": mode, "locks.db-shm": mode}


def test_new_file_behind_a_link_is_for_this_user_alone(tmp_path: Path) -> None:
    """As where a deployment links to a volume for data, on which the file is not yet made."""
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "locks.db").symlink_to(data / "locks.db")
    lock(f"sqlite:///{tmp_path}/locks.db")
    assert stat.S_IMODE((data / "locks.db").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("part", "mode", "query", "message"),
    [
        ("locks.db", 0o666, "", "chmod go-w"),
        ("locks.db", 0o660, "", "chmod g-w"),
        ("locks.db", 0o666, "?group=1", "chmod o-w"),
        (".", 0o777, "", "may be written to by anybody"),
    ],
)
def test_what_others_may_write_to_is_refused(tmp_path: Path, part: str, mode: int, query: str, message: str) -> None:
    """They could free each lock, or replace the file or its journal."""
    directory = tmp_path / "ours"
    directory.mkdir()
    path = directory / "locks.db"
    path.touch(0o600)
    (directory / part).chmod(mode)
    with pytest.raises(lockkit.ConfigurationError, match=message):
        lock(f"sqlite:///{path}{query}")
    assert path.stat().st_size == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("planted", ["file", "link", "directory"])
def test_file_of_another_user_is_refused(tmp_path: Path, planted: str) -> None:
    """Also a link of theirs, in a directory where everybody may make files."""
    tmp_path.chmod(0o1777)
    path = tmp_path / "locks.db"
    if planted == "link":
        ours = tmp_path / "ours.db"
        lock(f"sqlite:///{ours}")
        path.symlink_to(ours)
    elif planted == "directory":
        path.mkdir()
        path /= "locks.db"
    else:
        path.touch(0o600)
    os.chown(tmp_path / "locks.db", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(lockkit.ConfigurationError, match="belongs to another user"):
        lock(f"sqlite:///{path}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_group_is_that_of_a_directory_that_can_be_trusted(tmp_path: Path) -> None:
    """A member's file in a directory of ours is shared; a directory of another user, or above it, is not."""
    directory = tmp_path / "above" / "shared"
    directory.mkdir(parents=True)
    directory.chmod(0o2770)
    os.chown(directory, 0, NOBODY)
    url = f"sqlite:///{directory}/locks.db?group=1"
    lock(url)
    os.chown(directory / "locks.db", NOBODY, NOBODY)
    lock(url)
    for theirs in (directory, directory.parent):
        os.chown(theirs, NOBODY, NOBODY)
        with pytest.raises(lockkit.ConfigurationError, match="belongs to another user"):
            lock(url)
        os.chown(theirs, 0, NOBODY)


def test_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """It may be a volume that is missing. SQLite says no more of a file that this user may not read."""
    with pytest.raises(lockkit.ConfigurationError, match="check the name of the database, and the rights to its file"):
        lock(f"sqlite:///{tmp_path}/nosuch/locks.db")
    assert not (tmp_path / "nosuch").exists()
