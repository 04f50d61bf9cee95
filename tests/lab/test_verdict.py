"""The verdict on scenes that were written down by hand, each the least that shows one of its decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockkit_tools.lab.record import Grant, Message, Overlap, Record, Wait, Write
from lockkit_tools.lab.scenario import Scene, Step, parse_backend
from lockkit_tools.lab.stage import Stage
from lockkit_tools.lab.verdict import Promise, Verdict, judge

SCENE = Scene("", "", (parse_backend("redis"),), ())
OVERLAP = Overlap(5.0, 6.0, "A", "B")


def grant(client: str, start: float, **others: Any) -> Grant:
    """A grant with a token that grows with the time."""
    return Grant(client, **{"token": int(start) + 1, "start": start, "valid_until": start + 10, **others})


def write(client: str, number: int, **others: Any) -> Write:
    """A write in time of the holder of a grant, which is accepted."""
    given = {"at": 9.0, "token": 1, "accepted": True, "overwrote": False, "late": False, **others}
    return Write(client=client, number=number, **given)


def judged(record: Record, *, backend: str = "redis", fenced: bool = False, fault: Step | None = None) -> Verdict:
    """The verdict on a scene of 40 seconds."""
    record.end = 40.0
    steps = () if fault is None else (fault,)
    return judge(replace(SCENE, backends=(parse_backend(backend),), fenced=fenced, steps=steps), record)


def promise(name: str, **given: Any) -> Promise:
    """One promise of a scene."""
    (found,) = (one for one in judged(Record(**given)).promises if one.name == name)
    return found


@pytest.mark.parametrize(
    ("grants", "waits", "state"),
    [
        ([grant("A", 20.0, noticed=25.0, how="died")], [Wait("B", 21.0)], "broken"),
        ([], [Wait("B", 1.0, 9.0)], "none"),
        ([grant("A", 0.0), grant("B", 9.0)], [Wait("B", 1.0, 9.0, granted=True)], "held"),
        ([grant("A", 0.0), grant("B", 9.0)], [Wait("B", 8.8, 9.0, granted=True)], "none"),
        ([grant("A", 0.0), grant("B", 9.0)], [Wait("B", 1.0, 9.0)], "none"),
        ([grant("B", 9.0)], [Wait("B", 1.0, 9.0, granted=True)], "none"),
    ],
)
def test_lock_that_somebody_waits_for_comes_free(grants: list[Grant], waits: list[Wait], state: str) -> None:
    """Waits that ended without the lock show nothing."""
    assert promise("free", grants=grants, waits=waits).state == state


def test_storage_knows_whose_write_is_late_and_whose_is_old() -> None:
    """Late is after the lease ended, also by a release; old is after a newer holder's, and only the last one counts."""
    stage = Stage(SCENE, 1)
    a, b = grant("A", 0.0, noticed=4.0, how="released"), grant("B", 4.0)
    stage.record.grants += [a, b]

    for stage.world.now, by in ((3.0, a), (5.0, a), (6.0, b), (6.5, b), (7.0, a), (8.0, a), (9.0, b)):
        assert stage.storage.receive(by, Message(by.client, "storage", stage.world.now, None, "write"))

    assert [one.late for one in stage.record.writes] == [False, True, False, False, True, True, False]
    assert [one.overwrote for one in stage.record.writes] == [False, False, False, False, True, True, False]


def test_storage_with_a_guard_refuses_lower_tokens_for_good() -> None:
    """The same token is that of the same holder."""
    stage = Stage(replace(SCENE, fenced=True), 1)
    a, b = grant("A", 0.0), grant("B", 4.0)
    stage.record.grants += [a, b]

    taken = [stage.storage.receive(by, Message(by.client, "storage", 0.0, None, "write")) for by in (a, b, b, a, a, b)]

    assert taken == [True, True, True, False, False, True]


def test_guard_contains_only_what_it_refused() -> None:
    """A late write that was refused is contained; two holders without a refusal are not, nor is a lock never free."""
    grants = [grant("A", 0.0), grant("B", 5.0)]
    refused = [write("B", 1), write("A", 0, accepted=False, late=True)]

    assert judged(Record(grants=grants, writes=refused), fenced=True).word == "contained"
    two = Record(grants=grants, writes=[write("A", 0)], overlaps=[OVERLAP])
    assert judged(two, fenced=True).word == "broken"
    stuck = Record(grants=grants, writes=refused, waits=[Wait("C", 1.0)])
    assert judged(stuck, fenced=True).word == "broken"


@pytest.mark.parametrize(
    ("backend", "fault", "fenced", "advice"),
    [
        ("redlock", Step(0, "node3", "stop"), True, ["Leave durable off"]),
        ("redis", Step(0, "server", "stop"), True, ["Keep the data"]),
        ("redis+sentinel", Step(0, "master", "failover"), True, ["Set replicas="]),
        ("redis+sentinel?replicas=1", Step(0, "master", "failover"), True, []),
        ("redis", Step(0, "server", "clock"), True, ["Have the servers' time"]),
        ("redis", Step(0, "A", "clock"), True, []),
        ("redis", None, True, []),
        ("redis", None, False, ["Have storage compare"]),
        ("by-hand?recipe=delete", Step(0, "server", "clock"), False, ["Use a lock with an owner"]),
    ],
)
def test_advice_is_for_what_was_done(backend: str, fault: Step | None, fenced: bool, advice: list[str]) -> None:  # noqa: FBT001 - a parameter
    """Two clients held the lock: what would have kept it, and a guard where there is none."""
    grants = [grant("A", 0.0), grant("B", 5.0)]

    found = judged(Record(grants=grants, overlaps=[OVERLAP]), backend=backend, fenced=fenced, fault=fault)

    assert [line for line, start in zip(found.advice, advice, strict=True) if not line.startswith(start)] == []
