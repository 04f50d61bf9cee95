"""The slots of ``lockkit run --once-per``: one name for each, over changes of the clocks too."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockkit.cli.once import DAY, parse_period, parse_zone, slot
from lockkit.errors import ConfigurationError

HOUR = 3600
# Clocks that change at 2 and 3 o'clock, at midnight (forwards, backwards), by half an hour, and over a whole day.
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "America/Santiago", "Asia/Beirut", "Australia/Lord_Howe",
         "Pacific/Apia", "America/Havana"]  # fmt: skip

times = st.integers(
    int(datetime(1990, 1, 1, tzinfo=UTC).timestamp()), int(datetime(2037, 1, 1, tzinfo=UTC).timestamp())
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("1d", DAY), ("6h", 6 * HOUR), ("30m", 1800), ("45s", 45), ("2w", 14 * DAY), ("24h", DAY)]
)
def test_period_is_parsed(text: str, seconds: int) -> None:
    """A number and a unit."""
    assert parse_period(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "0d", "1", "1.5d", "-1d", "36h", "1y", "1d ", "\u0661d", "9999999d"])
def test_other_periods_are_refused(text: str) -> None:
    """The message says what is meant."""
    with pytest.raises(ConfigurationError, match="--once-per must be"):
        parse_period(text)


@pytest.mark.parametrize("name", ["Nowhere/Town", "../etc/passwd", "", "/etc/localtime"])
def test_unknown_zone_is_refused(name: str) -> None:
    """Also what is a path."""
    with pytest.raises(ConfigurationError, match="--tz"):
        parse_zone(name)


@given(time=times, ahead=st.integers(1, 3 * DAY), zone=st.sampled_from(ZONES))
def test_day_is_one_slot_named_by_its_local_date(time: int, ahead: int, zone: str) -> None:
    """However many hours it has."""
    where = parse_zone(zone)
    here, later = (datetime.fromtimestamp(moment, where).date().isoformat() for moment in (time, time + ahead))

    assert slot(time, DAY, where) == here
    assert slot(time + ahead, DAY, where) == later


@given(
    time=times,
    period=st.sampled_from([HOUR, 6 * HOUR, 7 * HOUR, 1800, DAY, 2 * DAY, 7 * DAY]),
    zone=st.sampled_from(ZONES),
)
def test_slot_never_comes_back(time: int, period: int, zone: str) -> None:
    """Each slot is one span of time: what left it does not enter it again, and it is hardly longer than its period."""
    where = parse_zone(zone)
    step = max(600, period // 12)
    names = [slot(time + offset, period, where) for offset in range(0, 3 * max(period, DAY), step)]
    spans = [name for name, before in zip(names, ["", *names], strict=False) if name != before]

    assert len(spans) == len(set(spans))
    longest = max(names.count(name) for name in spans) * step
    assert longest <= period + (2 * HOUR if period >= DAY else 0) + step


def test_days_of_23_and_25_hours_are_one_slot_each() -> None:
    """In Berlin, 2026."""
    berlin = ZoneInfo("Europe/Berlin")
    for day, hours in ((datetime(2026, 3, 29, tzinfo=berlin), 23), (datetime(2026, 10, 25, tzinfo=berlin), 25)):
        begin, name = day.timestamp(), day.date().isoformat()

        assert {slot(begin + hour * HOUR, DAY, berlin) for hour in range(hours)} == {name}
        assert slot(begin - 1, DAY, berlin) != name
        assert slot(begin + hours * HOUR, DAY, berlin) == (day.date() + timedelta(days=1)).isoformat()
        assert len({slot(begin + hour * HOUR, HOUR, berlin) for hour in range(hours)}) == hours


def test_weeks_begin_on_monday() -> None:
    """As in ISO 8601."""
    assert slot(datetime(2026, 11, 22, 23, 59, tzinfo=UTC).timestamp(), 7 * DAY, UTC) == "2026-11-16"
    assert slot(datetime(2026, 11, 23, tzinfo=UTC).timestamp(), 7 * DAY, UTC) == "2026-11-23"
