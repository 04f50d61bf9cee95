"""What the pages of docs/comparison say has a test, and every test here is told of on a page."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest

from lockkit.configuration import registry
from lockkit.url import parse
from lockkit_tools.bench.catalog import ENTRIES
from lockkit_tools.bench.report import Report
from tests.bench.test_page import ABOUT, outcome
from tests.bench.test_run import BASELINE, OURS, PEER
from tests.comparison import capability_page, extras, extras_page, measured_page, runs
from tests.comparison.pages import PAGES
from tests.comparison.peers import PEERS
from tests.docs.story import ROOT

FOLDER = ROOT / "docs" / "comparison"
TESTS = {
    "naive-ways.md": "test_naive_ways.py",
    "redlock-debate.md": "test_redlock_debate.py",
    "peers.md": "test_peers.py",
}
CLAIM = re.compile(r"`(test_\w+)`")


def defined(text: str) -> set[str]:
    """The tests that a source defines."""
    return set(re.findall(r"def (test_\w+)\(", text))


def rows(page: str) -> list[str]:
    """The rows of the tables of a page, without heads and rules."""
    lines = (FOLDER / page).read_text().splitlines()
    return [
        line
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("| ") and not after.startswith("|---")
    ]


@pytest.mark.parametrize("page", ["naive-ways.md", "redlock-debate.md"])
def test_every_row_names_its_test(page: str) -> None:
    """What goes wrong, and what goes right, are both shown."""
    found = rows(page)

    assert found
    assert [row for row in found if not CLAIM.search(row)] == []


@pytest.mark.parametrize(("page", "tests"), TESTS.items())
def test_every_test_is_told_of(page: str, tests: str) -> None:
    """A scenario that no page mentions helps nobody to choose."""
    here = defined((ROOT / "tests" / "comparison" / tests).read_text())

    assert here
    assert sorted(here - set(CLAIM.findall((FOLDER / page).read_text()))) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_page_is_what_its_program_writes(page: Path) -> None:
    """Nobody changed it by hand, and nothing that it is made of changed: `nox -s comparison` brings it up to date."""
    assert page.read_text() == PAGES[page]()


def test_committed_runs_tell_nothing_of_the_machine_they_ran_on() -> None:
    """No directory, port, host name or user of it, and no more than what the pages are made of."""
    for path in (runs.BENCH, runs.PRIMITIVES, runs.SCALE, runs.IDLE, runs.CONFORMANCE):
        text = path.read_text()
        assert len(text) < 1_000_000
        assert not re.search(r"/(tmp|home|root|work|usr|var)/", text)
        assert not re.search(r"(127\.0\.0\.1|localhost):\d", text)
        assert f'"{platform.node()}"' not in text


def test_what_is_kept_of_a_run_gives_the_same_report() -> None:
    """What is left out is worked out again: figures, ratios, and what the workloads say of themselves."""
    raw = json.loads(json.dumps(Report(outcome(OURS, PEER, BASELINE), ABOUT).to_json()))

    found = Report.from_json(json.loads(runs.dump(runs.kept(raw)))).to_json()

    assert found["workloads"][0]["results"] == raw["workloads"][0]["results"]
    assert {key: value for key, value in found.items() if key != "workloads"}.keys() == raw.keys() - {"workloads"}


def test_every_workload_that_was_measured_has_its_page() -> None:
    """And one only."""
    parts = [name for part in measured_page.PARTS for name in part.workloads]
    measured = {section.workload.name for section in runs.measured().sections if any(row.shown for row in section.rows)}

    assert sorted(parts) == sorted(measured)


def test_every_library_of_the_benchmark_has_its_words() -> None:
    """And none is described that is not measured. What follows a comma tells how it is used."""
    assert {peer.label for peer in PEERS} == {
        entry.template.label.partition(",")[0] for entry in ENTRIES if entry.template.role == "peer"
    }


def test_every_backend_has_its_row() -> None:
    """Whatever the registry leads to is compared, in each of its modes."""
    shown = set()
    for subject in capability_page.BACKENDS:
        url = parse(subject.url)
        shown.add(registry.find(url.scheme, dict(url.query).get("mode")))

    assert shown == {registry.find(scheme, mode) for scheme in registry.BUILTIN for mode in registry.modes(scheme)}


def test_every_backend_is_linked() -> None:
    """Every choice ends at the page of a backend."""
    pages = {path.name for path in (ROOT / "docs" / "backends").glob("*.md")}

    assert pages == set(re.findall(r"\.\./backends/(\w+\.md)", (FOLDER / "choosing.md").read_text()))


def test_every_extra_is_on_its_page_and_was_measured() -> None:
    """Also one that is new: its row would have no figures."""
    assert set(extras_page.ADDS) == set(extras.declared())
    assert set(extras.load()["extras"]) == {"", *extras.declared()}
    assert set(extras.IMPORTS) == {"", *extras.declared()} - {"all"}
