"""What ``pytest --pyargs lockkit.testing.conformance --lockkit-url=…`` collects."""

from __future__ import annotations

import pytest

from lockkit.testing.conformance import ConformanceSuite, Target


class TestConformance(ConformanceSuite):
    """The suite on the backends of the command line."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each case all URLs."""
        urls: list[str] = metafunc.config.getoption("lockkit_url")
        if urls and "lockkit_url" in metafunc.fixturenames:
            metafunc.parametrize("lockkit_url", urls, ids=_ids(urls))
        super().pytest_generate_tests(metafunc)

    @pytest.fixture
    def lockkit_target(self, lockkit_url: str, request: pytest.FixtureRequest) -> Target:
        """The URL with the options of the command line."""
        given = (text.partition("=") for text in request.config.getoption("lockkit_option"))
        options = {name: value for name, _, value in given}
        return Target(lockkit_url, options, request.config.getoption("lockkit_backend"))


def _ids(urls: list[str]) -> list[str]:
    """Name each by its scheme: the rest may hold a password."""
    schemes = [url.partition(":")[0] for url in urls]
    return [scheme if schemes.count(scheme) == 1 else f"{scheme}{number}" for number, scheme in enumerate(schemes, 1)]
