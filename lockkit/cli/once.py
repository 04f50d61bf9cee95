"""What is done once: the record of ``lockkit run --once-per`` and ``--once``, and ``lockkit once``, which shows any."""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import UTC, date, datetime, tzinfo
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import lockkit
from lockkit import validation
from lockkit.cli.inspection import local_time, print_holders
from lockkit.cli.options import RunOptions
from lockkit.cli.output import print_json, refuse_private, say
from lockkit.cli.status import Status
from lockkit.errors import ConfigurationError, LockLost
from lockkit.primitives.once import Attempt, Once, OnceDone, OnceRunning
from lockkit.runtime import drive
from lockkit.sync import Client
from lockkit.units import Seconds
from lockkit.validation import decode_json, plain

DAY: Final = 86_400
"""Seconds of a day without a change of the clocks."""

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": DAY, "w": 7 * DAY}
_PERIOD: Final = re.compile(r"([1-9][0-9]{0,5})([smhdw])")

_MARGIN: Final = 2 * DAY
"""How much longer than its slot a record is kept, seconds: a day may have 25 hours, and clocks may be set back."""


class Record:
    """What is known of one slot or key of a command."""

    def __init__(self, client: Client, name: str, options: RunOptions) -> None:
        """Check the options. Nothing is sent."""
        self._engine = client._engine  # noqa: SLF001 - the command and the client are one product
        self._engine.notes.require("--once-per or --once")
        self._name = name.replace("%", "%25").replace("@", "%40")  # else "a@b" once "c" would be "a" once "b@c"
        self._ttl = options.ttl
        self._once = options.once
        self._attempts = options.attempts
        self._period = 0 if options.once_per is None else parse_period(options.once_per)
        self._zone = parse_zone(options.tz)
        self.key = ""  # NAME@SLOT or NAME@KEY, once `begin` has been called
        self._attempt: Attempt | None = None
        self._described: Once | None = None
        _ = validation.lock_name(f"{self._name}@{self._once or '2000-01-01.00000'}")
        if self._once == "":
            message = "--once must name what is done once"
            raise ConfigurationError(message)

    @property
    def _keep(self) -> float:
        return validation.TTL_MAX if self._once is not None else self._period + _MARGIN

    def begin(self) -> bool:
        """Look at the record, under the lock of the command. May wait until a run that crashed counts as ended."""
        what = self._once
        if what is None:
            what = slot(drive(self._engine.notes.clock()), self._period, self._zone)
        self.key = f"{self._name}@{what}"
        described = Once.described(
            self._engine, self.key, keep=self._keep, ttl=self._ttl, timeout=None, match=None, store_errors=()
        )
        self._described = described
        self._attempt = drive(described.begin())
        return self._attempt.first

    def since(self) -> str:
        """Say since when it is done, as far as that is known; after `begin`."""
        assert self._described is not None, "begin() comes first"
        state = drive(self._described.state())
        since = state.since if isinstance(state, OnceDone) else None
        return "" if since is None else f" since {local_time(since)}"

    def count_attempt(self) -> bool:
        """Count this attempt before the command starts (``--attempts``); False if they are used up."""
        attempt = self._attempt
        assert attempt is not None, "begin() comes first"
        if self._attempts is None:
            return True
        made = 0 if attempt.note is None else _attempts_of(attempt.note)
        if made >= self._attempts:
            return False
        drive(attempt.write(json.dumps({"done": 0, "attempts": made + 1}), self._keep))
        return True

    def complete(self) -> int:
        """Note that the command has succeeded; gives the exit status."""
        assert self._attempt is not None, "begin() comes first"
        try:
            drive(self._attempt.done(None))
        except LockLost as error:
            say(f"{error} The command ended with status 0, but its success was not recorded.")
            return Status.LOST
        return Status.OK

    def leave(self) -> None:
        """Free the record if the command did not succeed: the next run tries again. May be called at any time."""
        if self._attempt is not None:
            try:
                drive(self._attempt.leave(None))
            except LockLost as error:
                say(str(error))


def _attempts_of(note: str) -> int:
    try:
        attempts = decode_json(note).get("attempts", 0)
    except (ValueError, AttributeError):  # not lockkit's
        return 0
    return attempts if type(attempts) is int else 0


def show_once(key: str, url: str | None, profile: str | None, *, forget: bool, as_json: bool) -> Status:
    """Print whether a key is done, or a run is under way; or forget that it is done."""
    with lockkit.connect(url, profile=profile) as client:
        refuse_private(client)
        once = client.once(key, keep=1.0)
        state = once.state()
        forgotten = forget and once.forget()
        if as_json:
            word = "running" if isinstance(state, OnceRunning) else "none" if state is None else "done"
            about = {} if state is None else dataclasses.asdict(state)
            print_json({"key": key, "backend": client.url, "state": word, "forgotten": forgotten, **about})
        elif state is None:
            print(plain(f"{key!r} is not done at {client.url}"))
        elif isinstance(state, OnceRunning):
            print_holders(key, client.url, [("once", state.holder)])
        elif forget:
            print(plain(f"{'forgot' if forgotten else 'did not forget'} that {key!r} is done at {client.url}"))
        else:
            print(plain(_done(key, client.url, state)))
    if isinstance(state, OnceRunning):
        return Status.BUSY
    return Status.OK if state is not None and forgotten == forget else Status.FAILED


def _done(key: str, url: str, state: OnceDone) -> str:
    since, until = (
        "" if time is None else f" {word} {local_time(time)}"
        for word, time in (("since", state.since), ("until", state.until))
    )
    outcome = f"result: {json.dumps(state.result)}" if state.error is None else "error: {}: {}".format(*state.error)
    return f"{key!r} is done{since}{until} at {url}; {outcome}"


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
