"""Logs the events of locks with fields that a structured log can search for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from functools import partialmethod

from lockkit.errors import ConfigurationError
from lockkit.observers import CALLS, Call, LockEvent, Observer
from lockkit.validation import shown

__all__ = ["LEVELS", "LoggingObserver"]

LEVELS: Mapping[Call, int] = {
    **dict.fromkeys(CALLS, logging.INFO),
    "renewed": logging.DEBUG,
    "jeopardy": logging.WARNING,
    "stalled": logging.WARNING,
    "lost": logging.WARNING,
}
"""At which level each call is logged unless the application says otherwise."""

_FIELDS = [field.name for field in fields(LockEvent) if field.name not in {"label", "waits", "late"}] + ["template"]


class LoggingObserver(Observer):
    """
    Logs each event as one record: ``lock granted: seat:12A``, with a field for each attribute of the event.

    The fields are attributes of the record (as those of ``extra=``), so that every structured formatter finds them:
    ``lock_event`` (the call), ``lock_name``, ``lock_template``, ``lock_backend``, ``lock_mode``, ``lock_token``,
    ``lock_owner``, ``lock_waited``, ``lock_held``, ``lock_reason`` and ``lock_at``. One that does not apply is None.
    """

    def __init__(
        self, logger: str | logging.Logger = "lockkit.events", *, levels: Mapping[Call, int] | None = None
    ) -> None:
        """
        Choose the logger.

        Args:
            logger: It, or its name.
            levels: Levels that differ from `LEVELS`.

        Raises:
            ConfigurationError: A level is for no call of an observer, or is no number.
        """
        for call, level in (levels or {}).items():
            if call not in CALLS:
                raise ConfigurationError(f"levels has the unknown event {call!r}: use {', '.join(CALLS)}")
            if isinstance(level, bool) or not isinstance(level, int):
                message = f"the level of {call!r} must be a number such as logging.INFO, not {shown(level)}"
                raise ConfigurationError(message)
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._levels = {**LEVELS, **(levels or {})}

    def _log(self, call: Call, event: LockEvent) -> None:
        extra = {f"lock_{name}": getattr(event, name) for name in _FIELDS}
        # A name may come from a user, and could have lines that look like other records.
        name = event.name if event.name.isprintable() else repr(event.name)
        self._logger.log(self._levels[call], "lock %s: %s", call, name, extra={"lock_event": call, **extra})


for _call in CALLS:
    setattr(LoggingObserver, _call, partialmethod(LoggingObserver._log, _call))  # noqa: SLF001 - its own
