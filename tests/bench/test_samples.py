"""What is kept of a row of measured times."""

from __future__ import annotations

import pytest

from lockkit_tools.bench.parts import spread


@pytest.mark.parametrize(("unit", "ns"), [("us", 1_000), ("ms", 1_000_000)])
def test_quantiles_are_in_their_unit(unit: str, ns: int) -> None:
    """Of 0 to 100 in any order, each is the number that names it."""
    found = spread([value * ns for value in reversed(range(101))], unit)

    assert found == {
        "count": 101,
        f"min_{unit}": 0,
        f"p25_{unit}": 25,
        f"median_{unit}": 50,
        f"p75_{unit}": 75,
        f"p90_{unit}": 90,
        f"p99_{unit}": 99,
        f"max_{unit}": 100,
    }
