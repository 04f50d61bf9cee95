"""What tests/conftest.py arranges for every run."""

from __future__ import annotations

import os

import pytest

from tests.conftest import group_of, rank_of


@pytest.mark.parametrize("number", range(10))
def test_tests_of_a_file_run_in_one_process(number: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Else each process of pytest-xdist starts all servers."""
    base = tmp_path_factory.getbasetemp()
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    processes = base / "processes" if run is None else base.parent / f"processes-{run}"
    with processes.open("a+") as file:
        file.write(f"{os.getpid()}\n")
        file.seek(0)
        assert len(set(file)) == 1, f"test {number} runs in another process than those before it"


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/test_url.py::test_a[x]", "tests/test_url.py"),
        ("tests/backends/redis/test_backend.py::TestA::test_b[x::y]", "tests/backends/redis/test_backend.py"),
        ("tests/conformance/test_suite.py::TestConformance::test_a[redis-blocking]", "redis"),
        ("tests/conformance/test_suite.py::TestConformance::test_a[redis-cluster-asyncio]", "redis-cluster"),
        (
            "tests/conformance/test_suite.py::TestConformance::test_a[memory-blocking]",
            "tests/conformance/test_suite.py::TestConformance::test_a[memory-blocking]",
        ),
        ("tests/docs/test_pages.py::test_a[README.md:3]", "tests/docs/test_pages.py::test_a[README.md:3]"),
    ],
)
def test_what_shares_servers_is_a_group(nodeid: str, group: str) -> None:
    """A target of the conformance suite, elsewhere a file; what shares nothing is alone."""
    assert group_of(nodeid) == group


def test_long_groups_come_first() -> None:
    """A file that takes minutes and began last would keep one process busy, and the others waiting."""
    ordered = [
        "tests/conformance/test_suite.py::TestConformance::test_a[etcd-cluster-blocking]",
        "tests/backends/sql_session/test_faults.py::test_a",
        "tests/test_url.py::test_a",
        "tests/docs/test_pages.py::test_a[README.md:3]",
        "tests/conformance/test_suite.py::TestConformance::test_a[memory-blocking]",
    ]

    ranks = [rank_of("tests/test_url.py::test_a", slow=True), *(rank_of(nodeid, slow=False) for nodeid in ordered)]

    assert ranks == sorted(set(ranks))
