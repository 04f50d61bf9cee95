"""The public fault suite on every backend of the registry, both APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from lockkit.testing.faults import Faults, FaultSuite, Target
from tests.conformance.faulty import FAULTS
from tests.conformance.selection import is_daily
from tests.conformance.targets import TARGETS


@pytest.fixture(scope="session")
def faults_of() -> Iterator[Callable[[str], Faults]]:
    """Gives the servers of a target; starts them at the first call, ends them at another target's."""
    made: dict[str, Faults] = {}
    with ExitStack() as services:

        def find(name: str) -> Faults:
            if name not in made:
                # The tests of a target come one after the other (tests/conftest.py).
                services.close()
                made.clear()
                made[name] = services.enter_context(FAULTS[name]()) if name in FAULTS else Faults(Target("memory://"))
            return made[name]

        yield find


class TestFaults(FaultSuite):
    """All cases, each on all targets that it is to run on (`tests.conformance.selection`)."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each case its targets, and its faces."""
        nightly = metafunc.config.getoption("nightly")
        only = metafunc.config.getoption("target") or [entry.id for entry in TARGETS]
        case = metafunc.function.__name__
        chosen = [entry.id for entry in TARGETS if entry.id in only and (nightly or is_daily(case, entry.id))]
        metafunc.parametrize("target", chosen)
        super().pytest_generate_tests(metafunc)

    @pytest.fixture
    def lockkit_faults(self, target: str, faults_of: Callable[[str], Faults]) -> Faults:
        """The servers of this test's target."""
        return faults_of(target)
