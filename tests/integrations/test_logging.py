"""Events of locks as log records."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

import lockkit
from lockkit.integrations.logging import LoggingObserver
from lockkit.testing.timing import PATIENCE


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """A client of a space of its own."""
    with lockkit.connect("memory://logging", ttl=PATIENCE) as client:
        yield client


def test_each_event_is_a_record_with_fields(client: lockkit.Client, caplog: pytest.LogCaptureFixture) -> None:
    """A structured formatter finds the attributes of the event in the record."""
    observer = LoggingObserver()
    lockkit.add_observer(observer)
    with caplog.at_level(logging.DEBUG, "lockkit.events"), client.lock("seat:12A", label="seat:{seat}") as lease:
        client.lock("seat:12A").try_acquire()
        lease.extend()
    lockkit.remove_observer(observer)

    granted, refused, renewed, released = (record for record in caplog.records if record.name == "lockkit.events")
    assert granted.getMessage() == "lock granted: seat:12A"
    fields = {key: value for key, value in vars(granted).items() if key.startswith("lock_")}
    assert fields.pop("lock_waited") >= 0
    assert fields.pop("lock_at") > 0
    assert fields == {
        "lock_event": "granted",
        "lock_name": "seat:12A",
        "lock_template": "seat:{seat}",
        "lock_backend": "memory://logging",
        "lock_mode": "exclusive",
        "lock_token": lease.token,
        "lock_owner": lease.owner,
        "lock_held": None,
        "lock_reason": None,
    }
    assert [record.levelname for record in (granted, refused, renewed, released)] == ["INFO", "INFO", "DEBUG", "INFO"]
    assert vars(refused)["lock_reason"] == "busy"
    assert vars(released)["lock_held"] > 0


def test_loss_is_a_warning_and_levels_can_be_chosen(client: lockkit.Client, caplog: pytest.LogCaptureFixture) -> None:
    """The application decides what it wants to read, and where."""
    observer = LoggingObserver(logging.getLogger("shop.locks"), levels={"granted": logging.ERROR})
    lockkit.add_observer(observer)
    with pytest.raises(lockkit.LockLost), client.lock("a"):
        client.break_lock("a")
    with client.lock("a"):
        pass  # the loss came before
    lockkit.remove_observer(observer)

    levels = [(record.getMessage(), record.levelname) for record in caplog.records if record.name == "shop.locks"]
    assert levels[:2] == [("lock granted: a", "ERROR"), ("lock lost: a", "WARNING")]


def test_name_cannot_begin_a_line_of_its_own(client: lockkit.Client, caplog: pytest.LogCaptureFixture) -> None:
    """Names may be what a user has typed; the field has them unchanged."""
    name = "seat:1\nINFO lock released: seat:2"
    observer = LoggingObserver()
    lockkit.add_observer(observer)
    with caplog.at_level(logging.INFO, "lockkit.events"), client.lock(name):
        pass
    lockkit.remove_observer(observer)

    messages = [
        (record.getMessage(), record.__dict__["lock_name"])
        for record in caplog.records
        if record.name == "lockkit.events"
    ]
    assert messages == [(f"lock {call}: {name!r}", name) for call in ("granted", "released")]


@pytest.mark.parametrize(
    ("levels", "says"),
    [
        ({"grant": logging.INFO}, "^levels has the unknown event 'grant': use waiting, granted"),
        ({"granted": "INFO"}, "^the level of 'granted' must be a number such as logging.INFO, not 'INFO'"),
    ],
)
def test_wrong_levels_are_refused(levels: Any, says: str) -> None:  # noqa: ANN401 - what is wrong
    """The first was ignored; the second failed at each event, in the observer's own thread."""
    with pytest.raises(lockkit.ConfigurationError, match=says):
        LoggingObserver(levels=levels)


def test_events_without_a_method_of_their_own_record_do_not_exist() -> None:
    """Every call is logged."""
    assert all(name in vars(LoggingObserver) for name in lockkit.observers.CALLS)
