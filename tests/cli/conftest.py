"""The command line as a fixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.support import Cli

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """``lockkit`` in an environment of its own."""
    made = Cli(tmp_path)
    yield made
    made.close()
