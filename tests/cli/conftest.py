"""The command line as a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.support import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """``lockkit`` in an environment of its own."""
    made = Cli(tmp_path)
    yield made
    made.close()
