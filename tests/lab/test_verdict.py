"""The verdict on scenes that were written down by hand, each the least that shows one of its decisions."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from lockkit.lab import Result, run
from lockkit.lab.record import Grant, Mark, Message, Overlap, Record, Wait, Write
from lockkit.lab.scenario import Scene, parse_backend, read_scenario
from lockkit.lab.stage import Storage
from lockkit.lab.verdict import Promise, Verdict, judge

SCENE = Scene(
    title="", about="", backends=(parse_backend("redis"),), ttl=10.0, fenced=False, clients=("A", "B"), steps=()
)
OVERLAP = Overlap(5.0, 6.0, "A", "B")


def grant(client: str, start: float, **others: Any) -> Grant:
    """A grant with a token that grows with the time."""
    return Grant(client, **{"token": int(start) + 1, "start": start, "valid_until": start + 10, **others})


def write(client: str, number: int, **others: Any) -> Write:
    """A write in time of the holder of a grant, which is accepted."""
    given = {"at": 9.0, "token": 1, "accepted": True, "overwrote": False, "late": False, **others}
    return Write(client=client, number=number, **given)


def judged(record: Record, *, backend: str = "redis", fenced: bool = False) -> Verdict:
    """The verdict on a scene of 40 seconds."""
    record.end = record.played = 40.0
    return judge(replace(SCENE, backends=(parse_backend(backend),), fenced=fenced), record)


def promise(name: str, **given: Any) -> Promise:
    """One promise of a scene."""
    (found,) = (one for one in judged(Record(10.0, **given)).promises if one.name == name)
    return found


@pytest.mark.parametrize(
    ("grants", "waits", "state"),
    [
        ([grant("A", 0.0, valid_until=inf, noticed=2.0, how="died")], [Wait("B", 1.0)], "broken"),
        ([grant("A", 20.0, noticed=25.0, how="died")], [Wait("B", 21.0)], "broken"),  # its deadline was at 30
        ([grant("A", 29.5, noticed=30.5, how="died")], [Wait("B", 30.0)], "none"),  # it is at 39.5
        ([grant("A", 35.0, noticed=36.0, how="died")], [Wait("B", 35.5)], "none"),
        ([grant("A", 35.0)], [Wait("B", 35.5)], "none"),
        ([grant("A", 0.0, valid_until=inf)], [Wait("B", 35.5)], "none"),
        ([grant("A", 30.0, noticed=38.9, how="released")], [Wait("B", 31.0)], "broken"),
        ([grant("A", 30.0, noticed=39.5, how="released")], [Wait("B", 31.0)], "none"),
        ([grant("A", 0.0, noticed=1.0, how="released")], [Wait("B", 39.5)], "none"),
        ([], [Wait("B", 1.0)], "broken"),
        ([], [Wait("B", 1.0, 9.0)], "none"),
        ([grant("A", 0.0), grant("B", 9.0)], [Wait("B", 1.0, 9.0, granted=True)], "held"),
        ([grant("A", 0.0), grant("B", 9.0)], [Wait("B", 8.8, 9.0, granted=True)], "none"),
        ([grant("A", 0.0), grant("B", 9.0)], [Wait("B", 1.0, 9.0)], "none"),
        ([grant("B", 9.0)], [Wait("B", 1.0, 9.0, granted=True)], "none"),
    ],
)
def test_lock_is_free_again_soon_after_it_may_be(grants: list[Grant], waits: list[Wait], state: str) -> None:
    """A scene that ends before shows nothing, nor does one whose waits ended without the lock."""
    assert promise("free", grants=grants, waits=waits).state == state


def test_client_that_died_waits_no_more() -> None:
    """It is nobody's fault that it gets no lock."""
    assert promise("free", waits=[Wait("B", 1.0)], dead={"B": 2.0}).state == "none"


@pytest.mark.parametrize("backend", ["redis", "redlock", "etcd", "zookeeper", "by-hand?recipe=getset"])
def test_scene_that_ends_before_the_ttl_of_a_dead_holder_is_not_broken(backend: str) -> None:
    """The lock comes free after the ttl, which the scene does not play."""
    text = f"""
    backend = "{backend}"
    until = 5
    step = [
        {{at = 0, client = "A", do = "acquire"}},
        {{at = 1, client = "B", do = "acquire"}},
        {{at = 2, client = "A", do = "kill"}},
    ]
    """
    (result,) = run(read_scenario(text, "short")).results

    assert result.verdict.word == "kept"
    assert "the scene ends before it could come free" in [one.why for one in result.verdict.promises]


def played(steps: str, **scene: object) -> Result:
    """The one scene of a file with these steps."""
    keys = "".join(f"{key} = {value!r}\n" for key, value in scene.items())
    (result,) = run(read_scenario(f"{keys}step = [{steps}]", "file")).results
    return result


def test_nobody_waits_where_all_are_dead() -> None:
    """A lock without an end stays, and harms nobody."""
    steps = """
        {at = 0, client = "A", do = "acquire"}, {at = 1, client = "B", do = "acquire"},
        {at = 2, client = "A", do = "kill"}, {at = 3, client = "B", do = "kill"},
    """
    assert played(steps, backend="by-hand?recipe=setnx", until=30).verdict.word == "kept"


def test_client_that_has_released_writes_no_more() -> None:
    """It knows that it has no lock. Steps are done in the order of their times, not of the file."""
    steps = """
        {at = 3, client = "A", do = "write"}, {at = 2, client = "A", do = "release"},
        {at = 1, client = "A", do = "write"}, {at = 0, client = "A", do = "acquire"},
    """
    result = played(steps)

    (one,) = result.record.writes
    assert one.at == pytest.approx(1, abs=0.1)
    assert "A has no lock, and does not write." in [mark.text for mark in result.record.marks]


class Setting:
    """A scene whose time stands where the test puts it."""

    def __init__(self, *, fenced: bool = False) -> None:
        self.scene = replace(SCENE, fenced=fenced)
        self.record = Record(10.0)
        self.world = self
        self.now = 0.0

    def mark(self, lane: str, text: str, tone: Any = "plain") -> Mark:  # noqa: ANN401 - a literal
        """Write a line of the story."""
        return Mark(self.now, lane, text, tone)


def test_storage_knows_whose_write_is_late_and_whose_is_old() -> None:
    """Late is after the lease ended, also by a release; old is after a newer holder's, and only the last one counts."""
    setting = Setting()
    storage = Storage(setting)
    a, b = grant("A", 0.0, noticed=4.0, how="released"), grant("B", 4.0)
    setting.record.grants += [a, b]

    for setting.now, by in ((3.0, a), (5.0, a), (6.0, b), (6.5, b), (7.0, a), (8.0, a), (9.0, b)):
        assert storage.receive(by, Message(by.client, "storage", setting.now, None, "write"))

    assert [one.late for one in setting.record.writes] == [False, True, False, False, True, True, False]
    assert [one.overwrote for one in setting.record.writes] == [False, False, False, False, True, True, False]


def test_storage_with_a_guard_refuses_lower_tokens_for_good() -> None:
    """The same token is that of the same holder."""
    setting = Setting(fenced=True)
    storage = Storage(setting)
    a, b = grant("A", 0.0), grant("B", 4.0)
    setting.record.grants += [a, b]

    taken = [storage.receive(by, Message(by.client, "storage", 0.0, None, "write")) for by in (a, b, b, a, a, b)]

    assert taken == [True, True, True, False, False, True]


def test_hand_over_is_between_two_clients() -> None:
    """A client that takes the lock twice hands nothing over, and a lock without an end never ended."""
    own = [grant("A", 0.0, noticed=2.0, how="released"), grant("A", 3.0, noticed=4.0, how="died")]
    assert promise("one", grants=own).why == "nobody else got it"
    assert promise("one", grants=[*own, grant("B", 14.5)]).why == "B got it 10.5 s after A had died"
    assert promise("one", grants=[grant("A", 0.0, valid_until=inf), grant("B", 5.0)]).why == "nobody else got it"


def test_write_that_was_replaced_is_that_of_the_newer_holder() -> None:
    """Not one that storage has refused."""
    writes = [write("B", 1), write("C", 2, accepted=False), write("A", 0, overwrote=True)]

    found = promise("data", grants=[grant("A", 0.0), grant("B", 11.0), grant("C", 22.0)], writes=writes)

    assert (found.state, found.why) == ("broken", "A's write replaced B's")


def test_headline_names_the_worst() -> None:
    """Of several that broke; a lock that is never free is the worst only where nothing else broke."""
    stuck = [Wait("C", 1.0)]

    assert judged(Record(10.0, waits=stuck)).headline == "BROKEN: the lock is never free again."
    both = judged(Record(10.0, grants=[grant("A", 0.0), grant("B", 5.0)], waits=stuck, overlaps=[OVERLAP]))
    assert both.headline == "BROKEN: two clients held the lock at the same time."


def test_guard_contains_only_what_it_refused() -> None:
    """A late write that was refused is contained; two holders without a refusal are not, nor is a lock never free."""
    grants = [grant("A", 0.0), grant("B", 5.0)]
    refused = [write("B", 1), write("A", 0, accepted=False, late=True)]

    assert judged(Record(10.0, grants=grants, writes=refused), fenced=True).word == "contained"
    two = Record(10.0, grants=grants, writes=[write("A", 0)], overlaps=[OVERLAP])
    assert judged(two, fenced=True).word == "broken"
    stuck = Record(10.0, grants=grants, writes=refused, waits=[Wait("C", 1.0)])
    assert judged(stuck, fenced=True).word == "broken"


@pytest.mark.parametrize(
    ("backend", "faults", "fenced", "advice"),
    [
        ("redlock", {"node stop without data"}, True, ["Leave durable off"]),
        ("redis", {"node stop without data"}, True, ["Keep the data"]),
        ("redis+sentinel", {"node failover"}, True, ["Set replicas="]),
        ("redis+sentinel?replicas=1", {"node failover"}, True, []),
        ("redis", {"node clock"}, True, ["Have the servers' time"]),
        ("redis", set(), True, []),
        ("redis", set(), False, ["Have storage compare"]),
        ("by-hand?recipe=delete", {"node clock"}, False, ["Use a lock with an owner"]),
    ],
)
def test_advice_is_for_what_was_done(backend: str, faults: set[str], fenced: bool, advice: list[str]) -> None:  # noqa: FBT001 - a parameter
    """Two clients held the lock: what would have kept it, and a guard where there is none."""
    grants = [grant("A", 0.0), grant("B", 5.0)]

    found = judged(Record(10.0, grants=grants, overlaps=[OVERLAP], faults=faults), backend=backend, fenced=fenced)

    assert [line for line, start in zip(found.advice, advice, strict=True) if not line.startswith(start)] == []


def test_advice_without_harm_is_to_guard_all_the_same() -> None:
    """Where there is something to guard, and no guard."""
    writes = [write("A", 0)]

    assert judged(Record(10.0, grants=[grant("A", 0.0)])).advice == ()
    (guard,) = judged(Record(10.0, grants=[grant("A", 0.0)], writes=writes)).advice
    assert guard.startswith("Nothing here. Guard")
    assert judged(Record(10.0, grants=[grant("A", 0.0)], writes=writes), fenced=True).advice == ()
