"""What the page says to take from each plot, who is suspect, and servers that do not answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lockkit.cli.app import app
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit_tools.bench import reachable
from lockkit_tools.bench.page.choice import PLOTS
from lockkit_tools.bench.page.conclusion import conclude
from lockkit_tools.bench.reachable import require_answers
from lockkit_tools.bench.report import Report, Row, Section
from lockkit_tools.bench.run import Cell, Outcome
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.table import render
from lockkit_tools.bench.workloads import WORKLOADS
from lockkit_tools.bench.workloads.base import Measured
from lockkit_tools.servers import RedisServer
from tests.bench.test_page import ABOUT, read
from tests.bench.test_run import BASELINE, OURS, PEER

OTHER = replace(PEER, label="Other")
NAMES = {"Ours": "lockkit"}


def name(row: Row) -> str:
    """As the page names a row."""
    return NAMES.get(row.subject.label, row.subject.label)


def outcome(workload: str, figures: Mapping[Subject, list[dict[str, float]]]) -> Outcome:
    """What a workload has measured, round by round."""
    cells = [
        Cell(subject, WORKLOADS[workload], {number: Measured(one) for number, one in enumerate(rounds)})
        for subject, rounds in figures.items()
    ]
    return Outcome(cells, Settings(), 7)


def section(workload: str, figures: Mapping[Subject, list[dict[str, float]]]) -> Section:
    """The same as a section of the report."""
    (found,) = Report(outcome(workload, figures), ABOUT).sections
    return found


def pair(**medians: float) -> Section:
    """Times of a pair, by subject."""
    subjects = {"ours": OURS, "peer": PEER, "other": OTHER, "baseline": BASELINE}
    return section(
        "pair", {subjects[key]: [{"median_us": value, "min_us": value}] * 2 for key, value in medians.items()}
    )


def taken(found: Section, *, plot: int = 0) -> str:
    """What is said of a plot."""
    return conclude(PLOTS[found.workload.name][plot], found, found.rows, name=name)


# -- one sentence for each plot ----------------------------------------------------------------------------------------


NOBODY_ELSE = "No other library was measured here."
UNFAIR = "Unfair, the least-served contender gets less than half as much as the most-served one"


@pytest.mark.parametrize(
    ("medians", "sentence"),
    [
        (
            {"ours": 150, "peer": 300, "other": 600, "baseline": 100},
            "lockkit: 150 µs, 1.5 times the baseline. Other libraries: 300 µs (Peer) to 600 µs (Other).",
        ),
        ({"ours": 600, "peer": 300}, "lockkit: 600 µs. Other libraries: 300 µs (Peer)."),
        ({"ours": 100}, f"lockkit: 100 µs. {NOBODY_ELSE}"),
        ({"peer": 100}, "lockkit has no figure here. Other libraries: 100 µs (Peer)."),
    ],
)
def test_plot_is_put_in_words(medians: dict[str, float], sentence: str) -> None:
    """Next to the other libraries, and the baseline."""
    assert taken(pair(**medians)) == sentence


@pytest.mark.parametrize(
    ("workload", "plot", "figures", "sentence"),
    [
        (  # the best first
            "contention",
            0,
            [{"pairs_per_second": 900.0}, {"pairs_per_second": 100.0}, {"pairs_per_second": 300.0}],
            "lockkit: 900/s. Other libraries: 300/s (Other) to 100/s (Peer).",
        ),
        (  # pairs per second alone would praise a lock that one contender keeps
            "contention",
            0,
            [{"pairs_per_second": 100.0, "share": 0.9}, {"pairs_per_second": 900.0, "share": 0.01}],
            f"lockkit: 100/s. Other libraries: 900/s (Peer). {UNFAIR}: Peer.",
        ),
        (
            "contention",
            1,
            [{"share": 0.9}, {"share": 0.01}, {"share": 0.2}],
            f"lockkit: 0.9. Other libraries: 0.2 (Other) to 0.01 (Peer). {UNFAIR}: Peer and Other.",
        ),
        (
            "crash",
            0,
            [{"fraction": 1.02, "never": 0}, {"never": 1, "ttl": 1.0}, {"fraction": 0.001}],
            (
                "lockkit: 1.02 ttl. Other libraries: less than 0.01 ttl (Other). "
                "With Peer no other client got the lock at all."
            ),
        ),
        (  # a difference that went wrong is not the lowest
            "distance",
            1,
            [{"handoff_trips": 2.0}, {"handoff_trips": -9.6}],
            (
                f"lockkit: 2 round trips. {NOBODY_ELSE} "
                "Do not believe the negative figure of Peer: what was subtracted from it was disturbed."
            ),
        ),
    ],
)
def test_what_to_beware_of_is_said(workload: str, plot: int, figures: list[dict[str, float]], sentence: str) -> None:
    """Of lockkit, Peer and Other."""
    found = section(workload, {who: [one] for who, one in zip((OURS, PEER, OTHER), figures, strict=False)})

    assert taken(found, plot=plot) == sentence


def test_broken_subject_is_not_the_best() -> None:
    """However fast it is."""
    found = outcome("pair", {OURS: [{"median_us": 100.0}], PEER: [{"median_us": 1.0}]})
    found.cells[1].rounds[0].broken = "two were inside"
    (broken,) = Report(found, ABOUT).sections

    assert taken(broken) == f"lockkit: 100 µs. {NOBODY_ELSE}"


# -- suspects ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "figure", "ours", "baseline", "suspect"),
    [
        ("pair", "median_us", [50.0, 60.0], [100.0, 100.0], True),
        ("pair", "median_us", [50.0, 110.0], [100.0, 100.0], False),  # not in every round
        ("pair", "median_us", [95.0, 95.0], [100.0, 100.0], False),  # no more than what does not repeat
        ("pair", "median_us", [200.0, 200.0], [100.0, 100.0], False),
        ("contention", "pairs_per_second", [200.0, 200.0], [100.0, 100.0], True),
        ("contention", "pairs_per_second", [50.0, 50.0], [100.0, 100.0], False),
    ],
)
def test_faster_than_the_baseline_is_suspect(
    workload: str,
    figure: str,
    ours: list[float],
    baseline: list[float],
    suspect: bool,  # noqa: FBT001
) -> None:
    """In every round, by more than noise: on the page, in the table and in JSON."""
    found = outcome(
        workload,
        {OURS: [{figure: value} for value in ours], BASELINE: [{figure: value} for value in baseline]},
    )
    report = Report(found, ABOUT)
    (row, other) = report.sections[0].rows
    (result,) = (one for one in report.to_json()["workloads"][0]["results"] if one["subject"] == OURS.key)

    assert bool(row.suspect) is suspect
    assert bool(result["suspect"]) is suspect
    assert other.suspect == ""
    assert ("Ours SUSPECT" in read(found).text) is suspect
    assert bool(Report.from_json(json.loads(json.dumps(report.to_json()))).sections[0].rows[0].suspect) is suspect


def test_suspect_is_marked_in_plot_and_table() -> None:
    """Where its figure is read."""
    quantiles = {f"{key}_us": 100.0 for key in ("min", "p25", "median", "p75", "p99")}
    fast = {key: value / 2 for key, value in quantiles.items()}
    found = outcome("pair", {OURS: [fast], BASELINE: [quantiles]})

    page = read(found)

    assert ("span", "suspect") in [(tag, attributes.get("class")) for tag, attributes in page.tags]
    assert "Suspect: Ours, faster than the baseline." in page.text
    console = Console(width=160)
    with console.capture() as capture:
        console.print(render(Report(found, ABOUT)))
    assert "Ours SUSPECT" in capture.get()


# -- servers that do not answer ----------------------------------------------------------------------------------------


@pytest.fixture
def mute() -> Iterator[int]:
    """The port of a server that never answers: the system completes its connections, and nobody reads them."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def closed() -> Iterator[int]:
    """A port on which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_servers_that_never_answer_are_told_at_once(mute: int, closed: int) -> None:
    """All of them together, and with one that is not there: instead of after the turn of each subject."""
    urls = [f"{scheme}://u:hidden@127.0.0.1:{mute}" for scheme in ("redis", "etcd")]
    urls += [f"{scheme}://u:hidden@127.0.0.1:{mute}/d" for scheme in ("postgresql", "mysql")]
    urls += [f"zookeeper://127.0.0.1:{mute}", f"redlock://127.0.0.1:{mute},127.0.0.1:{closed},127.0.0.1:1"]

    with pytest.raises(BackendUnavailable) as caught:
        require_answers([*urls, f"redis://127.0.0.1:{closed}"])

    assert reachable.ANSWER_SECONDS < 15
    for url in urls:
        assert f"{url.partition(':')[0]}://" in str(caught.value)
    assert f"redis://127.0.0.1:{closed}" in str(caught.value)
    assert "Nothing was measured" in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_command_ends_before_it_measures(closed: int) -> None:
    """With the status of an unavailable backend, also when other URLs could be measured."""
    result = CliRunner().invoke(app, ["bench", "memory://", f"redis://127.0.0.1:{closed}", "--workload", "pair"])

    assert (result.exit_code, result.stdout) == (69, "")
    assert f"127.0.0.1:{closed}" in result.stderr


def test_wrong_credentials_are_no_silence() -> None:
    """The error says what is wrong, as for the other commands."""
    with RedisServer(password="right") as server:  # noqa: S106 - of a throw-away server
        require_answers([server.url, server.url, "memory://"])

        with pytest.raises(ConfigurationError, match="user name or password is wrong"):
            require_answers(["memory://", server.url.replace("right", "wrong")])
