"""What the page on scale shows of a fleet that comes back from an outage."""

from __future__ import annotations

import pytest

from tests.conventions.sources import ROOT
from tests.engine import fleet


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in fleet.RUNS if name.startswith("at random")])
def test_table_of_the_page_can_be_repeated(name: str) -> None:
    """To the last digit: everything random comes from the seed."""
    page = (ROOT / "docs" / "explanation" / "scale.md").read_text()

    assert fleet.row(name, fleet.RUNS[name]()) in page


def test_fleet_in_step_loses_leases() -> None:
    """So the model can show that: a fleet of fewer and larger clients, with lockkit's random times and without."""
    assert fleet.run(50).lost == 0
    assert fleet.run(50, jitter=False).lost > 0
