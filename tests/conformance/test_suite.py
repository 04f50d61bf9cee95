"""
The public conformance suite on every backend of the registry, both faces.

Without ``--nightly`` some cases run on some targets only: `tests.conformance.selection`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lockkit.testing.conformance import ConformanceSuite, Target
from tests.conformance.selection import is_daily
from tests.conformance.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.targets import Entry


class TestConformance(ConformanceSuite):
    """All cases, each on all targets that it is to run on."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each case its targets, and its faces."""
        nightly = metafunc.config.getoption("nightly")
        only = metafunc.config.getoption("target") or [entry.id for entry in TARGETS]
        case = metafunc.function.__name__
        chosen = [entry for entry in TARGETS if entry.id in only and (nightly or is_daily(case, entry.id))]
        metafunc.parametrize("entry", chosen, ids=[entry.id for entry in chosen])
        super().pytest_generate_tests(metafunc)

    @pytest.fixture
    def lockkit_target(self, entry: Entry, service_url: Callable[[Entry], str]) -> Target:
        """The target of this test, its service running."""
        return Target(service_url(entry), entry.options)
