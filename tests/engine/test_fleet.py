"""What the page on scale shows of a fleet that comes back from an outage."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tests.engine import fleet

COMMITTED = json.loads((fleet.FOLDER / "fleet.json").read_text("utf-8"))
CHART = COMMITTED["chart"]


@pytest.mark.timeout(300)
def test_data_of_the_chart_can_be_repeated() -> None:
    """To the last digit: everything random comes from the seed."""
    again = json.loads(fleet.as_json({"spread": asdict(fleet.run())}))

    assert again["spread"] == CHART["spread"]
    assert fleet.at_cost(7) == COMMITTED["by cost in µs"]["7"]


def test_chart_shows_the_data() -> None:
    """It was drawn from the data beside it."""
    assert (fleet.FOLDER / "fleet.svg").read_text("utf-8") == fleet.chart(CHART)


def test_spread_fleet_loses_nothing_to_the_queue() -> None:
    """The longest wait is far below the least time that a lease had left."""
    spread, in_step = CHART["spread"], CHART["in step"]
    after = {second for second in spread["delays"] if int(second) >= fleet.OUTAGE[1]}

    assert spread["lost"] == 0
    assert max(spread["delays"][second] for second in after) * 5 < min(spread["margins"].values())
    assert in_step["lost"] > in_step["lost_in_outage"]


def test_fleet_in_step_loses_leases() -> None:
    """So the model can show that: a fleet of fewer and larger clients, with lockkit's random times and without."""
    assert fleet.run(50).lost == 0
    assert fleet.run(50, jitter=False).lost > 0
