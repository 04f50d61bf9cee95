"""What is done once: the record of ``lockkit run --once-per`` and ``--once``, and ``lockkit once``, which shows any."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import suppress
from datetime import UTC, date, datetime, tzinfo
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from lockkit import validation
from lockkit.cli.app import JSON, OnBackend, argument, command, flag, no_url
from lockkit.cli.holders import Held, local_time, print_holders
from lockkit.cli.output import answer, connected, say
from lockkit.cli.status import Status
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockLost
from lockkit.primitives.once import Attempt, OnceDone, OnceRunning
from lockkit.primitives.once import Once as Described
from lockkit.runtime import drive
from lockkit.sync import Client
from lockkit.units import Seconds
from lockkit.validation import decode_json

DAY: Final = 86_400
"""Seconds of a day without a change of the clocks."""

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": DAY, "w": 7 * DAY}
_PERIOD: Final = re.compile(r"([1-9][0-9]{0,5})([smhdw])")

_MARGIN: Final = 2 * DAY
"""How much longer than its slot a record is kept, seconds: a day may have 25 hours, and clocks may be set back."""


@command("once", "Show whether something was done once, or forget it.")
class Once(OnBackend):
    """
    Show whether a key of once() is done, since when and with which result, or who runs it.

    Exit status 0 if it is done, or with --forget was done and is forgotten; 1 if it is not done; 75 while a run is
    under way, which --forget leaves alone; 78 if the backend keeps no such records.
    """

    key: str = argument(..., "KEY", "The key of once(); of lockkit run --once, NAME@KEY.", callback=no_url)
    forget: bool = flag("Forget that KEY is done, so that the next run does it again.", "--forget")
    as_json: bool = JSON

    def run(self) -> Status:
        with connected(self) as client:
            once = client.once(self.key, keep=1.0)
            state = once.state()
            forgotten = self.forget and once.forget()
            if isinstance(state, OnceRunning) and not self.as_json:
                print_holders(client.url, [Held(self.key, "once", state.holder)])
            else:
                word = "running" if isinstance(state, OnceRunning) else "none" if state is None else "done"
                about = {} if state is None else dataclasses.asdict(state)
                values = {"key": self.key, "backend": client.url, "state": word, "forgotten": forgotten, **about}
                if isinstance(state, OnceDone) and not self.forget:
                    text = _done(self.key, client.url, state)
                elif state is None:
                    text = f"{self.key!r} is not done at {client.url}"
                else:
                    how = "forgot" if forgotten else "did not forget"
                    text = f"{how} that {self.key!r} is done at {client.url}"
                answer(self, values, text)
        if isinstance(state, OnceRunning):
            return Status.BUSY
        return Status.OK if state is not None and forgotten == self.forget else Status.FAILED


def _done(key: str, url: str, state: OnceDone) -> str:
    since, until = (
        "" if time is None else f" {word} {local_time(time)}"
        for word, time in (("since", state.since), ("until", state.until))
    )
    outcome = f"result: {json.dumps(state.result)}" if state.error is None else "error: {}: {}".format(*state.error)
    return f"{key!r} is done{since}{until} at {url}; {outcome}"


class Record:
    """What is known of one slot or key of a command: see `client.once`."""

    def __init__(self, client: Client, options: Any) -> None:  # noqa: ANN401 - `lockkit.cli.run.Run`
        """Check the options. Nothing is sent."""
        name, once = options.name, options.once
        self._engine = client._engine  # noqa: SLF001 - the command and the client are one product
        self._engine.notes.require("--once-per or --once")
        self._name = name.replace("%", "%25").replace("@", "%40")  # else "a@b" once "c" would be "a" once "b@c"
        self._options = options
        self._period = 0 if options.once_per is None else parse_period(options.once_per)
        self._zone = parse_zone(options.tz)
        self._keep = self._period + _MARGIN if once is None else validation.TTL_MAX
        self._attempt: Attempt | None = None
        self.key = ""  # NAME@SLOT or NAME@KEY, once `begin` has been called
        self.since = ""  # " since …", if it is done and that is known
        _ = validation.lock_name(f"{self._name}@{once or '2000-01-01.00000'}")
        if once == "":
            raise ConfigurationError("--once must name what is done once")

    def begin(self, timeout: Seconds | None) -> bool:
        """Look at the record, under the lock of the command. Waits until a run that crashed counts as ended."""
        what, ttl = self._options.once, self._options.ttl
        if what is None:
            what = slot(drive(self._engine.notes.clock()), self._period, self._zone)
        self.key = f"{self._name}@{what}"
        described = Described.described(
            self._engine, self.key, keep=self._keep, ttl=ttl, timeout=timeout, match=None, store_errors=()
        )
        self._attempt = drive(described.begin())
        if not self._attempt.first:
            state = drive(described.state())
            if isinstance(state, OnceDone) and state.since is not None:
                self.since = f" since {local_time(state.since)}"
        return self._attempt.first

    def count_attempt(self) -> bool:
        """Count this attempt before the command starts (``--attempts``); False if they are used up."""
        attempt = self._attempt
        assert attempt is not None, "begin() comes first"
        if self._options.attempts is None:
            return True
        made = 0 if attempt.note is None else _attempts_of(attempt.note)
        if made >= self._options.attempts:
            return False
        drive(attempt.write(json.dumps({"done": 0, "attempts": made + 1}), self._keep))
        return True

    def uncount_attempt(self) -> None:
        """Take it back: the command could not be executed."""
        assert self._attempt is not None, "begin() comes first"
        if self._options.attempts is not None:
            with suppress(LockError):  # then it counts
                drive(self._attempt.write(self._attempt.note or '{"done":0}', self._keep))

    def complete(self) -> int:
        """Note that the command has succeeded; gives the exit status."""
        assert self._attempt is not None, "begin() comes first"
        try:
            drive(self._attempt.done(None))
        except (LockLost, BackendUnavailable) as error:
            say(f"the command ended with status 0, but its success was not recorded: {error}")
            return Status.LOST if isinstance(error, LockLost) else Status.OK
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


def parse_period(text: str) -> int:
    """Parse a period such as ``1d``, ``6h`` or ``30m``."""
    match = _PERIOD.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"--once-per must be a whole number of s, m, h, d or w, such as 1d or 6h, not {text!r}"
        )
    period = int(match[1]) * _UNITS[match[2]]
    if period > DAY and period % DAY:
        raise ConfigurationError(
            f"--once-per must be at most a day or whole days, not {text!r}: slots begin at midnight"
        )
    return period


def parse_zone(name: str | None) -> tzinfo:
    """Find a time zone; UTC for None."""
    if name is None:
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigurationError(
            f"--tz must be a time zone such as Europe/Berlin, not {name!r}. If it is one, install the package tzdata"
        ) from error


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
