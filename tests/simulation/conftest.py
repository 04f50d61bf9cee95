"""Which seeds are run, and quiet: thousands of schedules lose many leases, each with a warning."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

VARIABLE = "LOCKKIT_SIM_SEED"
# All that the mutants need, and more; `nox -s simulate` runs ten thousand.
SEEDS = "0-2999"
PART = 1000


def pytest_addoption(parser: pytest.Parser) -> None:
    """``pytest tests/simulation --seed=…``; from the root of the tests the variable does the same."""
    parser.addoption("--seed", metavar="N[-M]", help=f"run only this random schedule, or these (also: {VARIABLE}=N)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``seeds`` to a test: those that were asked for, else those of a run of all tests; a part to each run."""
    if "seeds" in metafunc.fixturenames:
        text: str = metafunc.config.getoption("--seed", None) or os.environ.get(VARIABLE) or SEEDS
        first, _, last = text.partition("-")
        everything = range(int(first), int(last or first) + 1)
        parts = [everything[start : start + PART] for start in range(0, len(everything), PART)]
        metafunc.parametrize("seeds", parts, ids=[f"{part[0]}-{part[-1]}" for part in parts])


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    log = logging.getLogger("lockkit")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)
