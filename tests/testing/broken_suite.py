"""
The conformance cases that must fail, on the backends of ``broken.py``; run by ``test_conformance_catches.py``.

Its name keeps it out of every other run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lockkit.testing.conformance import Cases, ConformanceSuite, Target
from tests.testing.broken import BROKEN, SOUND, Broken


def _suite(entry: Broken) -> type[Cases]:
    """Make a suite of the cases of one entry, in a way open to everybody who has a backend that is not registered."""

    def lockkit_target(_: Cases, tmp_path: Path) -> Target:
        place = "broken" if entry.scheme == "memory" else f"{tmp_path}/locks"
        backend = f"{entry.backend.__module__}:{entry.backend.__name__}"
        return Target(f"{entry.scheme}://{place}", backend=backend)

    members: dict[str, object] = {name: getattr(ConformanceSuite, name) for name in entry.caught_by}
    members["lockkit_target"] = pytest.fixture(lockkit_target)
    return type(f"Test{entry.backend.__name__}", (Cases,), members)


for _entry in [*BROKEN, *SOUND]:
    _class = _suite(_entry)
    globals()[_class.__name__] = _class
