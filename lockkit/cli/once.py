"""The record of ``lockkit run --once-per`` and ``--once``: what was done already, and how often it was attempted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from lockkit import validation
from lockkit.cli.output import say
from lockkit.cli.slots import DAY, parse_period, parse_zone, slot
from lockkit.cli.status import Status
from lockkit.errors import ConfigurationError, LockLost
from lockkit.primitives.once import Once
from lockkit.runtime import drive

if TYPE_CHECKING:
    from lockkit.cli.options import RunOptions
    from lockkit.primitives.once import Attempt
    from lockkit.sync import Client

__all__ = ["Record"]

_MARGIN: Final = 2 * DAY
"""How much longer than its slot a record is kept, seconds: a day may have 25 hours, and clocks may be set back."""


class Record:
    """
    What is known of one slot or key of a command.

    Attributes:
        key: ``NAME@SLOT`` or ``NAME@KEY``, once `begin` has been called.
    """

    def __init__(self, client: Client, name: str, options: RunOptions) -> None:
        """
        Check the options. Nothing is sent.

        Raises:
            ConfigurationError: One of them is wrong.
            Unsupported: The backend keeps no notes on locks.
        """
        self._engine = client._engine  # noqa: SLF001 - the command and the client are one product
        self._engine.notes.require("--once-per or --once")
        self._name = name
        self._ttl = options.ttl
        self._once = options.once
        self._attempts = options.attempts
        self._period = 0 if options.once_per is None else parse_period(options.once_per)
        self._zone = parse_zone(options.tz)
        self.key = ""
        self._attempt: Attempt | None = None
        _ = validation.lock_name(f"{name}@{self._once or '2000-01-01.00000'}")
        if self._once == "":
            message = "--once must name what is done once"
            raise ConfigurationError(message)

    @property
    def _keep(self) -> float:
        return validation.TTL_MAX if self._once is not None else self._period + _MARGIN

    def begin(self) -> bool:
        """
        Look at the record, under the lock of the command. May wait until a run that crashed counts as ended.

        Returns:
            Whether the command is to be run.
        """
        what = self._once
        if what is None:
            what = slot(drive(self._engine.notes.clock()), self._period, self._zone)
        self.key = f"{self._name}@{what}"
        described = Once.described(
            self._engine, self.key, keep=self._keep, ttl=self._ttl, timeout=None, match=None, store_errors=()
        )
        self._attempt = drive(described.begin())
        return self._attempt.first

    def count_attempt(self) -> bool:
        """Count this attempt before the command starts (``--attempts``); False if they are used up."""
        attempt = self._attempt
        assert attempt is not None, "begin() comes first"
        if self._attempts is None:
            return True
        made = 0 if attempt.note is None else int(json.loads(attempt.note).get("attempts", 0))
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
