"""The public conformance suite on every backend of the registry, both faces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lockkit.testing.conformance import ConformanceSuite, Target
from tests.conformance.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.targets import Entry


class TestConformance(ConformanceSuite):
    """All cases on all targets."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each case all targets, and its faces."""
        metafunc.parametrize("entry", TARGETS, ids=[entry.id for entry in TARGETS])
        super().pytest_generate_tests(metafunc)

    @pytest.fixture
    def lockkit_target(self, entry: Entry, service_url: Callable[[Entry], str]) -> Target:
        """The target of this test, its service running."""
        return Target(service_url(entry), entry.options)
