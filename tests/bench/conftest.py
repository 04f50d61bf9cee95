"""What holds for the tests of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockkit.testing.fork_servers import close_all


@pytest.fixture(scope="module", autouse=True)
def _fork_servers() -> Iterator[None]:
    """The runs of a file share what their workers are forked from; the next file has other drivers."""
    yield
    close_all()
