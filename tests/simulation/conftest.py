"""Which seeds are run, and quiet: thousands of schedules lose many leases, each with a warning."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

VARIABLE = "LOCKKIT_SIM_SEED"
# Those in which the mutants are looked for, too; `nox -s simulate` runs ten thousand.
SEEDS = "0-1999"
PART = 1000


def pytest_addoption(parser: pytest.Parser) -> None:
    """``pytest tests/simulation --seed=…``; from the root of the tests the variable does the same."""
    parser.addoption("--seed", metavar="N[-M]", help=f"run only this random schedule, or these (also: {VARIABLE}=N)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``seeds`` to a test, in parts: those asked for, else as many as a run of all tests has time for."""
    if "seeds" in metafunc.fixturenames:
        usual: str = getattr(metafunc.module, "SEEDS", SEEDS)
        text: str = metafunc.config.getoption("--seed", None) or os.environ.get(VARIABLE) or usual
        first, _, last = text.partition("-")
        everything = range(int(first), int(last or first) + 1)
        size = getattr(metafunc.module, "PART", PART)
        parts = [everything[start : start + size] for start in range(0, len(everything), size)]
        metafunc.parametrize("seeds", parts, ids=[f"{part[0]}-{part[-1]}" for part in parts])


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    log = logging.getLogger("lockkit")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)
