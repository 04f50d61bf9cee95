"""Clients of one directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockkit.backends.file.backend import FileBackend
from lockkit.runtime import drive
from lockkit.url import parse
from tests.backends.file.support import Connect
from tests.backends.support import FakeClock, StubHost


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of the locks. It does not exist yet."""
    return tmp_path / "locks"


@pytest.fixture
def host() -> StubHost:
    """A client's engine, in real time."""
    return StubHost()


@pytest.fixture
def frozen() -> StubHost:
    """A client's engine whose time stands still."""
    return StubHost(FakeClock())


@pytest.fixture
def connect(directory: Path) -> Iterator[Connect]:
    """Open clients of the directory, and close them at the end."""
    opened: list[FileBackend] = []

    def connect(host: StubHost, query: str = "", path: Path = directory) -> FileBackend:
        url = parse(f"file://{path}{query}")
        opened.append(FileBackend.open(url, {"group": "group" in query}, host))
        return opened[-1]

    yield connect
    for backend in opened:
        drive(backend.close())
