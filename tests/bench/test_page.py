"""The page that a person reads alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockkit_tools.bench.page.choice import PLOTS
from lockkit_tools.bench.page.markup import Html, tag
from lockkit_tools.bench.page.page import page
from lockkit_tools.bench.page.plots import QUANTILES
from lockkit_tools.bench.page.scale import Scale
from lockkit_tools.bench.report import Report
from lockkit_tools.bench.run import Cell, Outcome
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.workloads import WORKLOADS
from lockkit_tools.bench.workloads.base import Measured
from tests.bench.test_run import BASELINE, OURS, PEER

VALUES = st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=8)
ABOUT: dict[str, Any] = {
    "command": "lockkit bench redis://h --seed 7",
    "started": "2026-11-21T19:00:00+00:00",
    "machine": {
        "system": "Linux 6",
        "architecture": "x86_64",
        "processor": "A processor",
        "cores": 2,
        "python": "CPython 3.11",
        "load_before": 0.3,
    },
    "versions": {"lockkit": "0.1", "Peer": "2"},
    "servers": {"here": {"server": "Redis", "version": "7", "appendonly": "no"}},
    "not_started": {"etcd": "not on this machine"},
}


class Checker(HTMLParser):
    """Collects text and tags, and sees to it that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note it."""
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note it; it is closed already."""
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep it."""
        self.text += data


def outcome(*subjects: Subject, workloads: Sequence[str] = tuple(WORKLOADS), **more: Any) -> Outcome:
    """Two rounds of everything, with figures that somebody made up."""
    cells = []
    for name in workloads:
        for subject in subjects:
            cell = Cell(subject, WORKLOADS[name])
            keys = [figure.key for figure in cell.workload.figures]
            cell.rounds = {
                number: Measured({key: (number + 1.0) * (place + 1) for place, key in enumerate(keys)})
                for number in range(2)
            }
            cells.append(cell)
    return Outcome(cells, Settings(), 7, **more)


def read(found: Outcome, about: dict[str, Any] | None = None) -> Checker:
    """Parse the page of an outcome."""
    checker = Checker()
    checker.feed(page(Report(found, about or ABOUT)))
    checker.close()
    assert checker.open == []
    return checker


def test_page_needs_nothing_else_and_says_where_its_figures_come_from() -> None:
    """No script, nothing fetched; machine, versions, durability, what is missing, and how to repeat it."""
    found = read(outcome(OURS, BASELINE, PEER))

    assert {name for name, _ in found.tags}.isdisjoint({"script", "link", "img", "iframe"})
    assert not any({"src", "href", "onload"} & attributes.keys() for _, attributes in found.tags)
    assert "url(" not in found.text
    assert "@import" not in found.text
    for said in ("A processor", "lockkit 0.1", "Peer 2", "Redis 7, appendonly no", "not on this machine"):
        assert said in found.text
    assert "lockkit bench redis://h --seed 7" in found.text
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in found.tags


def test_every_workload_is_plotted_for_every_subject_with_a_sentence_below() -> None:
    """What the plot shows, and what it does not."""
    found = read(outcome(OURS, BASELINE, PEER))

    captions = found.text.count("Not shown: ")
    assert captions == sum(len(plots) for plots in PLOTS.values())
    assert sum(name == "figcaption" for name, _ in found.tags) == captions
    assert [name for name, _ in found.tags].count("h2") == len(WORKLOADS) + 1
    pictures = [attributes["aria-label"] or "" for name, attributes in found.tags if name == "svg"]
    for subject in (OURS, BASELINE, PEER):
        assert sum(label.startswith(subject.label) for label in pictures) >= len(WORKLOADS) - 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_plots_show_figures_that_the_workload_has(name: str) -> None:
    """A figure that is renamed would leave an empty plot."""
    keys = {figure.key for figure in WORKLOADS[name].figures}

    assert WORKLOADS[name].silent
    for plot in PLOTS[name]:
        wanted = {
            "box": {f"{key}_{plot.figure}" for key in QUANTILES},
            "bar": {plot.figure},
        }
        assert wanted[plot.kind] <= keys


def test_lockkit_is_compared_over_all_places() -> None:
    """The first plots put its backends side by side; with one place there is nothing to compare."""
    there = replace(OURS, group="postgresql://***@h/db?mode=row")

    assert "lockkit on each backend" in read(outcome(OURS, there)).text
    assert "postgresql, mode=row" in read(outcome(OURS, there)).text
    assert "lockkit on each backend" not in read(outcome(OURS, PEER)).text


def test_broken_failed_and_interrupted_are_told_at_the_top() -> None:
    """Before any plot that might be believed."""
    found = outcome(OURS, PEER, workloads=("pair", "contention"), interrupted=True)
    for cell in found.cells:
        if cell.subject is PEER and cell.workload.name == "contention":
            cell.rounds[1].broken = "two were inside"
        if cell.subject is OURS and cell.workload.name == "pair":
            cell.rounds, cell.failed = {}, "<no> connection"

    text = read(found).text

    assert text.index("BROKEN: ") < text.index("Uncontended")
    assert text.index("two were inside") < text.index("Uncontended")
    assert text.index("Interrupted") < text.index("Uncontended")
    assert "failed: <no> connection" in text


def test_what_was_skipped_or_had_no_turn_is_not_drawn() -> None:
    """An empty row would look like a figure of zero."""
    found = outcome(OURS, PEER, workloads=("pair",))
    found.cells[1].rounds = {}

    labels = [attributes["aria-label"] or "" for name, attributes in read(found).tags if name == "svg"]

    assert not any(label.startswith("Peer") for label in labels)


def test_text_is_escaped() -> None:
    """A lock library is free to have any name, and an error to say anything."""
    assert tag("p", "<b>", Html("<i></i>"), title='"') == '<p title="&quot;">&lt;b&gt;<i></i></p>'
    assert tag("rect", x=0.1 + 0.2, class_="body") == '<rect x="0.3" class="body"/>'


@given(VALUES, st.booleans())
def test_every_value_has_its_place_on_the_axis(values: list[float], logarithmic: bool) -> None:  # noqa: FBT001
    """In order, within the ends; and ticks are few, in order, and on it."""
    scale = Scale.log(values) if logarithmic else Scale.linear(values)

    assert scale.low <= min(values) * (1 + 1e-9)
    assert scale.high >= max(values) * (1 - 1e-9)
    places = [scale.at(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= place <= 100 for place in places)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 6
    assert ticks == sorted(set(ticks))
    assert scale.low * (1 - 1e-9) <= ticks[0]
    assert ticks[-1] <= scale.high * (1 + 1e-9)
