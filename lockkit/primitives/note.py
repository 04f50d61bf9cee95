"""
State with the lock: a value that the holder writes, and that the next holder finds.

The backend compares the owner and writes in one atomic step, see `lockkit.engine.lookup.Notes`. So a holder that was
paused, and has lost its lease, never overwrites what the next one wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lockkit import validation
from lockkit.engine.engine import Engine
from lockkit.engine.lease_record import LeaseRecord
from lockkit.errors import ConfigurationError, LockError

KEEP = timedelta(days=30)
"""How long a note is kept, unless the application says otherwise."""

REMOVED_SECONDS = 1.0
"""Life of the note that replaces a removed one, seconds."""


@dataclass(frozen=True, slots=True)
class Note:
    """
    A value that a holder of a lock has left with it.

    Attributes:
        value: What was given to ``Lease.write_note``.
        token: Fencing token of the lease that wrote it.
        remaining: Seconds until the backend forgets it; None where finding out takes another round trip.
    """

    value: Any
    token: int
    remaining: float | None


async def write(engine: Engine[Any], record: LeaseRecord, value: object, keep: float | timedelta) -> None:
    """Put a value with the lock that a lease holds, in place of the one before; None removes that."""
    name, url = record.grant.name, engine.url
    engine.notes.require("write_note()")
    if record.mode != "exclusive":
        message = f"lock {name!r} at {url} is not held exclusively: its holders would overwrite each other's notes"
        raise LockError(message, name=name, backend=url)
    with validation.about(name, url):
        seconds = validation.lifetime(keep, "keep")
    try:
        text = validation.encode_json(value)
    except ValueError as error:
        message = f"the note on lock {name!r} cannot be stored: {error}"
        raise ConfigurationError(message, name=name, backend=url) from error
    record.check()
    if value is None:
        seconds = REMOVED_SECONDS
    await engine.notes.write(record, f'{{"token":{record.grant.token},"value":{text}}}', seconds)


async def read(engine: Engine[Any], name: str) -> Note | None:
    """Read the note on a lock, held or free."""
    url = engine.url
    with validation.about(name, url):
        checked = validation.lock_name(name)
    engine.notes.require("read_note()")
    note = await engine.notes.read(checked)
    if note is None:
        return None
    try:
        stored = validation.decode_json(note.text)
        value, token = stored["value"], stored["token"]
        if type(token) is not int:
            raise TypeError(token)  # noqa: TRY301 - as what else is no note
    except (ValueError, TypeError, LookupError) as error:
        message = f"the note on lock {checked!r} at {url} was not written by lease.write_note(): {error!r}"
        raise LockError(message, name=checked, backend=url) from error
    return None if value is None else Note(value, token, note.remaining)
