"""Beats of which one leads: with a clock of the test's own in one process, and as real processes over Redis."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import Celery, schedules
from celery.beat import ScheduleEntry, Scheduler

import lockkit
from lockkit.errors import ConfigurationError
from lockkit.integrations.celery import LeaderOnly
from lockkit.integrations.celery.beat import KEEP_SECONDS, STANDBY_SECONDS
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import RedisServer
from tests.integrations.processes import START_SECONDS, celery
from tests.tries import until

START = datetime(2026, 3, 1, 9, 0, 7, tzinfo=UTC)
SECONDS_MAX = 200  # of ticks until a schedule has nothing due


class Sent:
    """Replaces the broker: what a scheduler has sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent: list[str] = []
        self.headers: list[dict[str, Any]] = []
        self.synced = 0
        self.before_sending: Callable[[], None] | None = None
        super().__init__(*args, **kwargs)

    @property
    def producer(self) -> None:
        """No connection."""

    def is_due(self, entry: Any) -> Any:  # noqa: ANN401 - as Celery's
        """Let the test act between the look at the clock and the sending."""
        found = super().is_due(entry)  # type: ignore[misc] # of the scheduler
        if found[0] and self.before_sending is not None:
            act, self.before_sending = self.before_sending, None
            act()
        return found

    def send_task(self, name: str, *_: object, headers: dict[str, Any] | None = None, **__: object) -> SimpleNamespace:
        """Remember it, with its due time. Celery 5.3 logs the id of the result."""
        self.headers.append(headers or {})
        self.sent.append(f"{name} {(headers or {}).get('lockkit_due', '')}".strip())
        return SimpleNamespace(id="sent")

    def sync(self) -> None:
        """Count what a scheduler does when it is closed, and now and then."""
        self.synced += 1


class Plain(Sent, Scheduler):  # type: ignore[misc] # celery has no types
    """Celery's own scheduler."""


class Led(Sent, LeaderOnly, Scheduler):  # type: ignore[misc] # celery has no types
    """The one that leads first."""


class Beats:
    """An app with a clock of its own, and schedulers as different processes would have them."""

    def __init__(self, url: str) -> None:
        self.now = START
        self.made: list[Led] = []
        self.app = Celery("beats", broker="memory://", set_as_current=False)
        self.app.now = lambda: self.now.astimezone(self.app.timezone)
        self.app.conf.update(lockkit_url=url, lockkit_beat_ttl=60, result_expires=None)

    def schedule(self, **entries: schedules.BaseSchedule) -> None:
        """Set the schedule of the app."""
        for entry in entries.values():
            entry.app = self.app
        self.app.conf.beat_schedule = {name: {"task": name, "schedule": entry} for name, entry in entries.items()}

    def led(self) -> Led:
        """Make a scheduler that leads first. Closed after the test."""
        self.made.append(Led(self.app))
        return self.made[-1]

    def advance(self, **span: float) -> None:
        """Let time pass."""
        self.now += timedelta(**span)

    def run(self, *beats: Any) -> None:
        """Let each tick until nothing is due."""
        for beat in beats:
            for _ in range(SECONDS_MAX):
                if beat.tick() > 0:
                    break


@pytest.fixture
def beats() -> Iterator[Beats]:
    """With locks of this test alone."""
    made = Beats(f"memory://{uuid4().hex}")
    yield made
    for beat in made.made:
        beat.close()


def resign(beat: Led) -> None:
    """End its term behind its back."""
    assert beat._term is not None
    beat._term.resign()


def test_two_beats_of_celery_send_each_tick_twice(beats: Beats) -> None:
    """Celery's own: nothing keeps the second from sending."""
    beats.schedule(report=schedules.crontab(minute="0"))
    a, b = Plain(beats.app), Plain(beats.app)

    beats.advance(hours=1)
    beats.run(a, b)

    assert a.sent == b.sent == ["report"]


def test_only_the_leader_sends(beats: Beats) -> None:
    """The other one looks again soon."""
    beats.schedule(report=schedules.crontab(minute="0"))
    a, b = beats.led(), beats.led()
    beats.run(a, b)

    beats.advance(hours=1)
    beats.run(a)

    assert b.tick() == STANDBY_SECONDS
    assert a.sent == ["report 2026-03-01T10:00:00+00:00"]
    assert b.sent == []
    b.max_interval = 0.25
    assert b.tick() == 0.25


def test_leader_looks_at_its_term_in_time(beats: Beats) -> None:
    """However far the next due time is; the term has the ttl of the settings."""
    beats.schedule(report=schedules.crontab(minute="0"))
    a = beats.led()

    pause = a.tick()

    assert a._term is not None
    assert a._term.ttl == 60
    assert pause <= a._term.grace < 60


def test_closed_beat_lets_another_one_lead_and_keeps_its_state(beats: Beats) -> None:
    """As Celery's own scheduler does, whose file has the last runs."""
    a, b = beats.led(), beats.led()
    beats.run(a)
    before = a.synced

    a.close()

    assert a.synced == before + 1
    b.tick()
    assert b._term is not None


def test_what_is_due_first_on_the_grid_is_looked_at_first(beats: Beats) -> None:
    """Celery orders by the time since the start, where seven minutes are before an hour."""
    beats.now = datetime(2026, 3, 1, 9, 59, tzinfo=UTC)
    beats.schedule(often=schedules.schedule(timedelta(minutes=7)), hourly=schedules.schedule(timedelta(hours=1)))
    a = beats.led()
    a.max_interval = 3600
    a.tick()
    assert [event.entry.name for event in a._heap or []] == ["hourly", "often"]

    beats.advance(seconds=61)
    resign(a)
    a.tick()  # what is due is before what comes sooner than its next time
    assert a.sent == ["hourly 2026-03-01T10:00:00+00:00"]


def test_tick_at_the_very_due_time_is_sent_once(beats: Beats) -> None:
    """And is the last one that is due, not the one before."""
    beats.schedule(poll=schedules.schedule(timedelta(minutes=10)), report=schedules.crontab(minute="*"))
    a = beats.led()
    beats.run(a)
    beats.now = datetime(2026, 3, 1, 9, 10, tzinfo=UTC)

    beats.run(a)

    assert sorted(a.sent) == ["poll 2026-03-01T09:10:00+00:00", "report 2026-03-01T09:10:00+00:00"]
    assert a.tick() > 0


def test_ticks_of_one_second_are_two(beats: Beats) -> None:
    """Their marks have milliseconds."""
    beats.schedule(poll=schedules.schedule(timedelta(milliseconds=500)))
    a = beats.led()
    for _ in range(4):
        beats.run(a)
        beats.advance(milliseconds=500)

    assert len(a.sent) == len(set(a.sent)) == 3


def test_schedule_of_another_package_tells_itself_what_is_due(beats: Beats) -> None:
    """As django-celery-beat's, whose entries can be switched off."""

    class SwitchedOff(ScheduleEntry):  # type: ignore[misc] # celery has no types
        def is_due(self) -> schedules.schedstate:
            return schedules.schedstate(is_due=False, next=5.0)

    class Database(Led):
        Entry = SwitchedOff

    beats.schedule(poll=schedules.schedule(timedelta(minutes=10)))
    beats.made.append(a := Database(beats.app))
    beats.run(a)
    beats.advance(hours=1)
    beats.run(a)

    assert a.sent == []


def test_interval_of_another_package_is_sent_once_in_each_of_its_spans(beats: Beats) -> None:
    """It counts from the last run of each beat, and the new leader's is older than what the old one has sent."""

    class Row(ScheduleEntry):  # type: ignore[misc] # celery has no types
        def is_due(self) -> schedules.schedstate:
            return super().is_due()

    class Database(Led):
        Entry = Row

    beats.schedule(poll=schedules.schedule(timedelta(minutes=10)))
    leader, standby = (Database(beats.app) for _ in range(2))
    beats.made += leader, standby

    for _ in range(9):
        beats.run(leader, standby)
        resign(leader)
        leader, standby = standby, leader
        beats.advance(minutes=7)

    assert sorted(leader.sent + standby.sent) == [
        f"poll 2026-03-01T{due}:00+00:00" for due in ("09:10", "09:20", "09:30", "09:40", "09:50")
    ]


def test_mark_outlives_the_next_due_time(beats: Beats, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat that was away for a month must find what the others have sent of a monthly schedule."""
    asked: list[dict[str, Any]] = []
    once = lockkit.Client.once

    def noted(client: lockkit.Client, key: str, **options: Any) -> Any:  # noqa: ANN401 - as lockkit's
        asked.append(options)
        return once(client, key, **options)

    monkeypatch.setattr(lockkit.Client, "once", noted)
    beats.schedule(poll=schedules.schedule(timedelta(days=30)))
    a = beats.led()
    beats.run(a)
    beats.advance(days=30)
    beats.run(a)

    (options,) = asked
    assert options["keep"] > KEEP_SECONDS + 5 * 86400  # the grid's next time
    assert (options["ttl"], options["timeout"]) == (60, 0)


def test_headers_of_an_entry_stay_as_they_are(beats: Beats) -> None:
    """The due time comes along; the entry is the application's."""
    beats.app.conf.beat_schedule = {
        "report": {"task": "report", "schedule": timedelta(minutes=10), "options": {"headers": {"trace": "on"}}}
    }
    a = beats.led()
    beats.run(a)
    entry = a.schedule["report"]
    beats.advance(minutes=10)
    beats.run(a)

    (headers,) = a.headers
    assert headers | {"trace": "on", "lockkit_due": "2026-03-01T09:10:00+00:00"} == headers
    assert entry.options == {"headers": {"trace": "on"}}


def test_new_leader_sends_nothing_that_the_old_one_has_sent(beats: Beats) -> None:
    """Though its own notes of last runs are hours old; and it goes on from there."""
    beats.schedule(report=schedules.crontab(minute="*/20"), poll=schedules.schedule(timedelta(minutes=10)))
    a, b = beats.led(), beats.led()
    for _ in range(9):
        beats.run(a, b)
        beats.advance(minutes=10)
    beats.run(a, b)
    assert len(a.sent) == len(set(a.sent)) == 4 + 9
    assert max(a.sent) == "report 2026-03-01T10:20:00+00:00"
    assert b.sent == []
    a.close()

    beats.run(b)
    assert b.sent == []
    beats.advance(minutes=10)
    beats.run(b)
    assert sorted(b.sent) == ["poll 2026-03-01T10:40:00+00:00", "report 2026-03-01T10:40:00+00:00"]


def test_beat_that_was_replaced_between_look_and_sending_sends_nothing(beats: Beats) -> None:
    """What it was about to send, the new leader has sent."""
    beats.schedule(report=schedules.crontab(minute="0"))
    a, b = beats.led(), beats.led()
    beats.run(a, b)
    beats.advance(hours=1)

    def replaced() -> None:
        resign(a)
        beats.run(b)

    a.before_sending = replaced
    beats.run(a)

    assert a.sent == []
    assert b.sent == ["report 2026-03-01T10:00:00+00:00"]


def test_beat_whose_term_is_over_keeps_the_tick_for_later(beats: Beats, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused, and sent once the beat leads again."""
    beats.schedule(report=schedules.crontab(minute="0"))
    a = beats.led()
    beats.run(a)
    beats.advance(hours=1)
    a.before_sending = partial(resign, a)

    with caplog.at_level(logging.WARNING, "lockkit"):
        assert a.tick() == STANDBY_SECONDS
    assert a.sent == []
    assert "does not lead" in caplog.text

    beats.run(a)
    assert a.sent == ["report 2026-03-01T10:00:00+00:00"]


def test_beat_that_cannot_reach_the_lock_server_sends_nothing(beats: Beats, caplog: pytest.LogCaptureFixture) -> None:
    """It does not know whether it leads; and it says so once."""
    beats.app.conf.lockkit_url = "redis://127.0.0.1:1/0"
    beats.schedule(report=schedules.crontab(minute="0"))
    a = beats.led()

    with caplog.at_level(logging.ERROR, "lockkit"):
        beats.run(a)
        beats.advance(hours=1)
        beats.run(a)

        assert a.sent == []
        assert caplog.text.count("cannot lead") == 1

        b, url = beats.led(), f"memory://{uuid4().hex}"
        for leads in (a, b):  # once more after it led, and once more after another one led
            beats.app.conf.lockkit_url = url
            leads.tick()
            a.tick()
            if leads is a:
                resign(a)
            beats.app.conf.lockkit_url = "redis://127.0.0.1:1/0"
            a.tick()
    assert caplog.text.count("cannot lead") == 3


def test_many_missed_ticks_are_one(beats: Beats) -> None:
    """As with Celery's own scheduler: a beat that was away for a year sends once, for the last due time."""
    beats.schedule(report=schedules.crontab(minute="*"), poll=schedules.schedule(timedelta(seconds=10)))
    a = beats.led()
    beats.run(a)

    beats.advance(days=400)
    beats.run(a)

    assert sorted(a.sent) == ["poll 2027-04-05T09:00:00+00:00", "report 2027-04-05T09:00:00+00:00"]


@pytest.mark.parametrize("enable_utc", [True, False])
def test_due_times_of_a_crontab_are_local(beats: Beats, *, enable_utc: bool) -> None:
    """The mark bears them in UTC, so that two hours with one name, as when summer time ends, are two."""
    beats.app.conf.update(timezone="Europe/Berlin", enable_utc=enable_utc)
    beats.schedule(report=schedules.crontab(hour="12", minute="0"))
    a, b = beats.led(), beats.led()
    beats.run(a, b)

    beats.advance(hours=4)
    beats.run(a, b)
    assert (a.sent, b.sent) == (["report 2026-03-01T11:00:00+00:00"], [])


@pytest.mark.parametrize(
    ("noon", "before"), [(datetime(2026, 3, 28, 12, tzinfo=UTC), 2), (datetime(2026, 10, 24, 12, tzinfo=UTC), 1)]
)
def test_change_of_the_clocks_makes_no_tick_another_one(beats: Beats, noon: datetime, before: int) -> None:
    """Each beat finds the same due times, whatever its last run was, and so each tick is sent once."""
    beats.app.conf.timezone = "Europe/Berlin"
    beats.now = noon
    beats.schedule(
        before=schedules.crontab(hour="1", minute="45"),
        within=schedules.crontab(hour="2", minute="30"),
        poll=schedules.schedule(timedelta(minutes=10)),
    )
    leader, standby = beats.led(), beats.led()

    for _ in range(6 * 36):
        beats.run(leader, standby)
        resign(leader)
        leader, standby = standby, leader
        beats.advance(minutes=10)

    sent = Counter(tick.split()[0] for tick in leader.sent + standby.sent)
    assert sent == {"before": before, "within": 1, "poll": 6 * 36 - 1}


def test_lock_server_without_notes_is_refused(beats: Beats) -> None:
    """Its leader could not mark what it has sent."""
    beats.app.conf.lockkit_url = "redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3"

    with pytest.raises(ConfigurationError, match="keeps no notes"):
        beats.led().tick()


@pytest.mark.parametrize("length", [120, 300])
def test_long_names_of_entries_fit_into_a_key(beats: Beats, length: int) -> None:
    """Celery has no limit for them; a key has one for its bytes."""
    beats.schedule(**{"é" * length: schedules.crontab(minute="0")})
    a = beats.led()
    beats.run(a)
    beats.advance(hours=1)
    beats.run(a)

    assert len(a.sent) == 1


# -- real processes --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(START_SECONDS * 2 + 120)
def test_frozen_leader_sends_no_tick_again(redis_server: RedisServer, tmp_path: Path) -> None:
    """Two beats; the leading one is stopped past its ttl and continued, and then the other one ends: no tick twice."""
    with ExitStack() as stack, lockkit.connect(redis_server.url) as client:
        election = client.election("celery-beat:shop")
        broker = stack.enter_context(redis.Redis.from_url(redis_server.url))
        beats, logs = {}, {}
        for name in "ab":
            arguments = ["beat", "-S", "lockkit.integrations.celery.LeaderScheduler", "--loglevel=INFO"]
            files = ["-s", str(tmp_path / f"schedule-{name}"), "--pidfile="]
            process = stack.enter_context(celery(redis_server.url, tmp_path / name, *arguments, *files))
            beats[process.pid], logs[process.pid] = process, tmp_path / name

        def ticks() -> list[str]:
            """Due times of the messages in the queue, oldest first."""
            return [
                json.loads(message)["headers"]["lockkit_due"] for message in reversed(broker.lrange("celery", 0, -1))
            ]

        def next_leader(*others: int) -> int:
            """Wait until another one leads and has sent something."""
            leader = until(lambda: (found := election.leader()) and found.metadata["pid"] not in others and found)
            count = len(ticks())
            until(lambda: len(ticks()) > count)
            return int(leader.metadata["pid"])

        first = until(election.leader, START_SECONDS).metadata["pid"]
        until(lambda: len(ticks()) > 1)
        os.kill(first, signal.SIGSTOP)
        second = next_leader(first)
        os.kill(first, signal.SIGCONT)
        until(lambda: "beat leads no longer" in logs[first].read_text())
        beats[second].terminate()
        assert beats[second].wait(PATIENCE) == 0
        assert next_leader(second) == first

        assert {first, second} == set(beats)
        assert [due for due, times in Counter(ticks()).items() if times > 1] == []
