"""What every backend of lockkit must do."""

from __future__ import annotations

import pytest

from lockkit.testing.conformance import ConformanceSuite
from lockkit_tools.servers import Server


class TestConformance(ConformanceSuite):
    """All cases, in the sync and the async API."""

    @pytest.fixture
    def lockkit_url(self, server: Server) -> str:
        """A table of its own."""
        return f"{server.url}/conformance"
