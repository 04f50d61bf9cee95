"""The slots of ``lockkit run --once-per``: spans of time, each with a name. Pure: the time comes from the caller."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, tzinfo
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from lockkit.errors import ConfigurationError
from lockkit.units import Seconds

DAY: Final = 86_400
"""Seconds of a day without a change of the clocks."""

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": DAY, "w": 7 * DAY}
_PERIOD: Final = re.compile(r"([1-9][0-9]{0,5})([smhdw])")


def parse_period(text: str) -> int:
    """Parse a period such as ``1d``, ``6h`` or ``30m``."""
    match = _PERIOD.fullmatch(text)
    if match is None:
        message = f"--once-per must be a whole number of s, m, h, d or w, such as 1d or 6h, not {text!r}"
        raise ConfigurationError(message)
    period = int(match[1]) * _UNITS[match[2]]
    if period > DAY and period % DAY:
        message = f"--once-per must be at most a day or whole days, not {text!r}: slots begin at midnight"
        raise ConfigurationError(message)
    return period


def parse_zone(name: str | None) -> tzinfo:
    """Find a time zone; UTC for None."""
    if name is None:
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        message = (
            f"--tz must be a time zone such as Europe/Berlin, not {name!r}. If it is one, install the package tzdata"
        )
        raise ConfigurationError(message) from error


def slot(now: float, period: Seconds, zone: tzinfo) -> str:
    """
    Name the slot that a time is in.

    A period of whole days gives slots that begin at local midnight, named by their first date; weeks begin on Monday.
    So a day of 23 or 25 hours is one slot. Shorter periods are counted from local midnight: the last slot of a day is
    shorter where the period does not divide it.
    """
    today = datetime.fromtimestamp(now, zone).date()
    if period >= DAY:
        days = int(period) // DAY
        return date.fromordinal((today.toordinal() - 1) // days * days + 1).isoformat()
    # Where the clocks change at midnight: the first of two, or the moment of the change.
    midnight = datetime(today.year, today.month, today.day, tzinfo=zone).timestamp()
    return f"{today.isoformat()}.{int((now - midnight) // period)}"
