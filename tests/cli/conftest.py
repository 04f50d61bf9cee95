"""The command line as a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import lockkit
from tests.cli.support import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """``lockkit`` in an environment of its own."""
    made = Cli(tmp_path)
    yield made
    made.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A backend that the command and the test share."""
    return f"file:{tmp_path}/locks"


@pytest.fixture
def client(url: str) -> Iterator[lockkit.Client]:
    """A client there."""
    with lockkit.connect(url) as client:
        yield client
