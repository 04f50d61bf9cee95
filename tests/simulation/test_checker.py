"""The judge: every check finds what it is for, in a history written by hand, and nothing else."""

# ruff: noqa: FBT003 - histories are tables: one event in a line, its fields in order

from __future__ import annotations

import pytest

from lockkit_tools.simulation import CHECKS, History, Limits, Verdict, check, describe
from lockkit_tools.simulation.history import (
    Acquired,
    Believed,
    Broken,
    Called,
    Closed,
    Crashed,
    DataLost,
    Ended,
    Event,
    Failed,
    Freed,
    Granted,
    Kept,
    Looked,
    Quiet,
    Released,
    Resumed,
    Stuck,
    Told,
    Undone,
    Unheld,
    Wrote,
)

LIMITS = Limits(
    acquire_late=0.5,
    clock_rates=0.01,
    told_late=0.1,
    kept_longer=0.3,
    free_after_release=0.2,
    free_after_expiry=2.0,
)
END = (Quiet(30.0, True, (), ()), Ended(30.0))

# One lease, held for 2 s of its 10 and given back. Everything below is this with something changed or added.
FIRST: tuple[Event, ...] = (
    Called(1.0, 1, "a", "x", None),
    Granted(1.01, "a", "x", "A", 100, 11.01),
    Acquired(1.02, 1, "a", "x", "A", 100, 10.9, True),
    Looked(2.0, "A", True),
    Unheld(3.0, "A", "released"),
    Undone(3.01, "A"),
    Freed(3.01, "x", "A", "A", "released"),
    Released(3.02, "A", "ok"),
)
SECOND: tuple[Event, ...] = (
    Called(4.0, 2, "b", "x", 1.0),
    Granted(4.01, "b", "x", "B", 101, 14.01),
    Acquired(4.02, 2, "b", "x", "B", 101, 13.9, False),
    Unheld(5.0, "B", "released"),
    Undone(5.01, "B"),
    Freed(5.01, "x", "B", "B", "released"),
    Released(5.02, "B", "ok"),
)
# The same lease, which nobody gave back: it runs out.
HELD = FIRST[:4]
LOST: tuple[Event, ...] = (
    *HELD,
    Unheld(10.9, "A", "expired"),
    Told(10.9, "A", "expired"),
    Looked(11.0, "A", False),
    Freed(11.01, "x", "A", "", "expired"),
)

INVALID: dict[str, tuple[str, tuple[Event, ...]]] = {
    "two believe": ("exclusion", (*HELD, *SECOND, *LOST[4:])),
    "two believe though the data of another time was lost": (
        "exclusion",
        (*HELD, *SECOND[:3], Unheld(10.9, "A", "expired"), Told(10.9, "A", "expired"), DataLost(12.0)),
    ),
    "the server has ended it before": (
        "cover",
        (*HELD, Freed(6.0, "x", "A", "", "expired"), *LOST[4:-1]),
    ),
    "the deadline is after the server's end": (
        "cover",
        (*FIRST[:2], FIRST[2]._replace(until=11.2), *FIRST[3:]),  # type: ignore[call-arg]
    ),
    "a deadline that the server does not know": ("cover", (*HELD, Believed(2.0, "A", 14.0), *FIRST[4:])),
    "a shorter ttl that the client does not know": ("cover", (*HELD, Kept(2.0, "x", "A", 4.0), *FIRST[4:])),
    "granted by nobody": ("cover", (*(event for event in FIRST if not isinstance(event, (Granted, Undone, Freed))),)),
    "a token twice": ("tokens", (*FIRST, SECOND[0], SECOND[1]._replace(token=100), *SECOND[2:])),  # type: ignore[call-arg]
    "tokens go back": (
        "tokens",
        (
            *FIRST,
            SECOND[0],
            SECOND[1]._replace(token=99),  # type: ignore[call-arg]
            SECOND[2]._replace(token=99),  # type: ignore[call-arg]
            *SECOND[3:],
        ),
    ),
    "tokens go back as clients see it": (
        "tokens",
        (*FIRST, *(e._replace(token=99) if isinstance(e, Acquired) else e for e in SECOND)),
    ),
    "granted twice": (
        "tokens",
        (*FIRST, Granted(5.0, "a", "x", "A", 102, 15.0), Freed(5.1, "x", "A", "A", "undone")),
    ),
    "handed out past its deadline": ("deadlines", (*FIRST[:2], FIRST[2]._replace(until=1.01), *FIRST[4:])),  # type: ignore[call-arg]
    "comes back after its deadline": (
        "deadlines",
        (
            *HELD,
            Kept(10.8, "x", "A", 20.8),
            Believed(10.95, "A", 20.5),
            *(event._replace(at=event.at + 10.0) for event in FIRST[4:]),
        ),
    ),
    "looks held past its deadline": ("loss", (*HELD, Looked(10.95, "A", True), *LOST[4:])),
    "looks held after its loss": ("loss", (*LOST, Looked(10.99, "A", True))),
    "looks lost before its deadline": ("loss", (*HELD, Looked(2.5, "A", False), *FIRST[4:])),
    "nobody noticed": ("loss", (*HELD, Freed(11.01, "x", "A", "", "expired"))),
    "noticed late": ("loss", (*HELD, Unheld(11.5, "A", "expired"), Told(11.5, "A", "expired"))),
    "not told": ("loss", tuple(event for event in LOST if not isinstance(event, Told))),
    "told twice": ("loss", (*LOST, Told(11.0, "A", "expired"))),
    "told something else": ("loss", tuple(e._replace(reason="taken") if isinstance(e, Told) else e for e in LOST)),
    "told though not lost": ("loss", (*FIRST, Told(3.5, "A", "expired"))),
    "returned late": ("timeouts", (*LOST, Called(2.0, 2, "b", "x", 2.0), Failed(4.6, 2, "LockTimeout"))),
    "did not return": ("timeouts", (*LOST, Called(2.0, 2, "b", "x", 2.0))),
    "nobody woke the waiter": ("progress", (Called(3.5, 2, "b", "x", None), *FIRST, *SECOND[1:])),
    "a free lock that nobody gets": ("progress", (Called(3.5, 2, "b", "x", None),)),
    "stuck": ("progress", (Stuck(20.0, "a", "a/worker0"),)),
    "broken": ("progress", (Broken(20.0, "a/lockkit-watch", "KeyError('x')"),)),
    "released by somebody else": ("ownership", (*FIRST[:6], FIRST[6]._replace(by="B"), FIRST[7])),  # type: ignore[call-arg]
    "left at the server by a client that was closed": (
        "leftovers",
        (*FIRST[:5], Closed(4.0, "a", True), Quiet(4.1, False, (("a", "A"),), ())),
    ),
    "left in a queue": ("leftovers", (Closed(4.0, "a", True), Quiet(4.1, False, (), (("a", "W"),)))),
    "left for ever": ("leftovers", (*HELD, Crashed(4.0, "a"), Quiet(29.0, True, (("a", "A"),), ()))),
    "a late write accepted": ("storage", (Wrote(1.0, "x", 5, True), Wrote(2.0, "x", 4, True))),
}


def judge(*events: Event) -> Verdict:
    """Judge a history that ends as it should."""
    return check([*sorted(events, key=lambda event: event.at), *END], LIMITS)


@pytest.mark.parametrize("events", [(), FIRST, (*FIRST, *SECOND), LOST], ids=["nothing", "one", "two", "lost"])
def test_valid(events: tuple[Event, ...]) -> None:
    """Nothing is wrong with what the others are made of; random schedules show that nothing else is taken for wrong."""
    verdict = judge(*events)

    assert verdict, f"{verdict}\n{describe(list(events))}"


@pytest.mark.parametrize(("name", "events"), INVALID.values(), ids=INVALID)
def test_invalid(name: str, events: tuple[Event, ...]) -> None:
    """The check that is for it finds it."""
    verdict = judge(*events)

    assert verdict.word == "invalid", f"{verdict}\n{describe(list(events))}"
    assert name in {problem.check for problem in verdict.problems}, verdict
    assert not verdict


def test_every_check_has_an_invalid_history() -> None:
    """A check that has never failed is not known to be able to."""
    assert {name for name, _ in INVALID.values()} == set(CHECKS)


UNKNOWN: dict[str, History] = {
    "empty": [],
    "cut off": [*FIRST],
    "a lease from nowhere": [Looked(1.0, "Z", True), *END],
    "a call from nowhere": [Failed(1.0, 7, "LockTimeout"), *END],
    "resumed without a pause": [Resumed(1.0, "a"), *END],
    "something else": [("what", "is", "this"), *END],  # type: ignore[list-item]
}


@pytest.mark.parametrize("history", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown(history: History) -> None:
    """What cannot be judged is not valid."""
    verdict = check(history, LIMITS)

    assert verdict.word == "unknown"
    assert verdict.reason
    assert not verdict


def test_check_that_breaks_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that stumbles has not acquitted."""

    def stumble(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(CHECKS, "storage", stumble)

    assert str(judge(*FIRST)) == "unknown: ZeroDivisionError: "


def test_history_without_a_look_at_the_server_is_not_valid() -> None:
    """Leftovers must have been looked for."""
    assert check([*FIRST, Ended(30.0)], LIMITS).word == "invalid"
