from __future__ import annotations

import pytest

from lockkit_tools.bench import catalog
from lockkit_tools.bench.addresses import addresses, redirected, title, why_not_through
from lockkit_tools.bench.settings import ROUND_TRIPS_MS
from lockkit_tools.bench.workloads.contention import longest_wait
from lockkit_tools.bench.workloads.distance import trips
from lockkit_tools.servers import RedisNodes
from tests.bench.test_honesty import BLOCKING, measure


def test_every_node_of_a_url_is_put_behind_a_proxy() -> None:
    """A pair on three nodes at 20 ms takes at least its two round trips; no node is reached past its proxy."""
    with RedisNodes(3) as nodes:
        subjects = catalog.subjects([nodes.url], faces=BLOCKING, peers=False)
        outcome = measure(subjects, "distance")

    (cell,) = outcome.cells
    assert (cell.status, cell.failed) == ("ok", "")
    figures = cell.rounds[0].figures
    assert figures.keys() >= {f"{what}_{ms}_ms" for what in ("pair", "handoff", "trip") for ms in ROUND_TRIPS_MS}
    for ms in ROUND_TRIPS_MS:
        assert figures[f"trip_{ms}_ms"] >= ms
        assert figures[f"pair_{ms}_ms"] >= 2 * ms
    assert figures.keys() >= {"pair_trips", "handoff_trips"}


def test_round_trips_are_counted_by_what_distance_adds() -> None:
    """Three round trips and 7 ms of work; the proxy's own share is in the measured round trip."""
    figures = {"trip_1_ms": 1.5, "trip_20_ms": 21.0, "pair_1_ms": 7 + 3 * 1.5, "pair_20_ms": 7 + 3 * 21.0}

    assert trips(figures, (1, 20)) == {"pair_trips": pytest.approx(3)}


@pytest.mark.parametrize(
    ("url", "found", "moved"),
    [
        ("redis://u:p%40w@h/1?ttl=3", [("h", 6379)], "redis://u:p%40w@a:1/1?ttl=3"),
        ("redlock://:x@h1:1,@h2,[::1]:3", [("h1", 1), ("h2", 6379), ("::1", 3)], "redlock://:x@a:1,@b:2,c:3"),
        ("postgresql+psycopg://u@h/db", [("h", 5432)], "postgresql+psycopg://u@a:1/db"),
        ("zookeeper://h1,h2:5?ttl=9", [("h1", 2181), ("h2", 5)], "zookeeper://a:1,b:2?ttl=9"),
        ("sqlite:///x.db", [], ""),
    ],
)
def test_servers_of_a_url_are_found_and_replaced(url: str, found: list[tuple[str, int]], moved: str) -> None:
    """With their default ports, and everything else kept: user, password, path, options."""
    assert addresses(url) == found
    if found:
        assert redirected(url, ["a:1", "b:2", "c:3"][: len(found)]) == moved


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("import", "import"),
        ("postgresql://***@h/app?mode=row", "postgresql, mode=row"),
        ("etcd://a,b,c", "etcd, 3 nodes"),
        ("s3://locks?endpoint=http://h:9000 (http://h:9000)", "s3"),  # as its client is shown
    ],
)
def test_places_have_short_titles(group: str, said: str) -> None:
    """In the page, and on the site."""
    assert title(group) == said


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+sentinel://h/main/0", "past the proxy"),
        ("redis+cluster://h", "past the proxy"),
        ("unix:///run/redis.sock", "no server"),
        ("rediss://h?ssl_ca_certs=/x", "no server"),
        ("redis://h?ssl_ca_certs=/x", "certificate"),
        ("redis://h", ""),
    ],
)
def test_urls_that_a_proxy_cannot_stand_in_for(url: str, reason: str) -> None:
    """Each with the reason."""
    said = why_not_through(url)

    assert reason in said
    assert bool(said) == bool(reason)


def test_longest_wait_counts_from_the_common_start_to_the_common_end() -> None:
    """Whoever never got in waited all the time."""
    assert longest_wait([(10, 20, None, True), (50, 60, None, True)], start_ns=0, until_ns=70) == 30
    assert longest_wait([(40, 50, None, True)], start_ns=0, until_ns=70) == 40
    assert longest_wait([(10, 20, None, True)], start_ns=0, until_ns=70) == 50
    assert longest_wait([], start_ns=0, until_ns=70) == 70
