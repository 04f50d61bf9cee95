"""Which backend the conformance suite runs on."""

from __future__ import annotations

import pytest

import lockkit
from lockkit.testing.target import Target


@pytest.mark.parametrize(
    ("backend", "part"),
    [
        ("nosuchmodule:Backend", "No module named 'nosuchmodule'"),
        ("lockkit.backends.memory.backend:Nothing", "has no attribute 'Nothing'"),
        ("lockkit.backends.memory.backend", "Name it as module:Class"),
        (":Backend", "Name it as module:Class"),
        ("pathlib:Path", "is not a subclass of lockkit.backend.LockBackend"),
    ],
)
def test_backend_that_cannot_be_loaded_says_why(backend: str, part: str) -> None:
    """As for one that an entry point names: the author mistyped it, or the module is not importable."""
    target = Target("memory://", backend=backend)

    for connect in (target.connect, target.connect_aio):
        with pytest.raises(lockkit.ConfigurationError, match=part):
            connect()
