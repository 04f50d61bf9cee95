"""What the object of a lock holds, and what the object is called."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import asdict, dataclass, replace
from types import NoneType
from typing import Any

from lockkit.backend import SPACES, apart, split_space
from lockkit.validation import decode_json

VERSION = 1
"""Of this form of the objects, under the key ``lockkit``."""

JSON_CHARS_MAX = 1024 * 1024
"""Longest object that is read. The longest that lockkit writes, with a note full of escapes, has about half as many."""

SEGMENT_CHARS = 200
"""Longest part of an object's name between slashes: stores that keep objects as files take 255 bytes."""

_OTHER = re.compile(rb"[^A-Za-z0-9_-]")
_ENCODED = re.compile(rb"=([0-9A-F]{2})")
_OBJECT_NAME = re.compile(rf"(?:=({'|'.join(SPACES)})/)?([A-Za-z0-9_=/-]*)")


@dataclass(frozen=True, slots=True)
class Record:
    """
    The state of one lock. Without arguments: that of a lock that was never held.

    Attributes:
        token: The last one that was granted. It stays when the lock is free.
        owner: Who holds the lock; None if it is free.
        ttl: For how long the holder's last write keeps the lock, seconds.
        metadata: As `lockkit.backend.Request.metadata`.
        broken: The owner whose lock was broken last, for its next renewal.
        note: The note on the lock, if there is one.
        note_until: When the life of the note ends, Unix time.
        nonce: Random, and drawn anew with each write. Two writes never have the same bytes: S3's ETag is a hash of the
            content, so a writer that expects the old bytes would also replace equal new ones, and two would win.
    """

    token: int = 0
    owner: str | None = None
    ttl: float = 0.0
    metadata: str = ""
    broken: str | None = None
    note: str | None = None
    note_until: float = 0.0
    nonce: str = ""

    def changed(self, **changes: Any) -> Record:
        """Return the record to write in place of this one."""
        return replace(self, nonce=secrets.token_hex(8), **changes)

    def freed(self, *, broken: bool = False) -> Record:
        """Return the record to write when the lock is released, or broken."""
        return self.changed(owner=None, ttl=0.0, metadata="", broken=self.owner if broken else self.broken)

    def encode(self) -> bytes:
        """Return the content of the object."""
        return json.dumps({"lockkit": VERSION, **asdict(self)}, ensure_ascii=False).encode()


_NEVER_HELD = Record()


def decode(content: bytes) -> Record:
    """
    Read an object.

    Raises:
        ValueError: lockkit has not written it.
    """
    value = decode_json(content, JSON_CHARS_MAX)
    if not isinstance(value, dict) or value.get("lockkit") != VERSION:
        message = f"it has no mark of lockkit's ({{'lockkit': {VERSION}}})"
        raise ValueError(message)
    fields: dict[str, Any] = {name: value.get(name) for name in asdict(_NEVER_HELD)}
    for name, default in asdict(_NEVER_HELD).items():
        kinds = (str, NoneType) if default is None else (int, type(default)) if default == 0 else (str,)
        if not isinstance(fields[name], kinds):
            message = f"its {name} has the wrong type"
            raise ValueError(message)  # noqa: TRY004 - of the object, not of an argument
    return Record(**fields)


def object_name(name: str) -> str:
    """
    Return the name of a lock's object, which begins like those of all names that begin like this one.

    Bytes that some store treats in its own way are written ``=2F``; ``=/`` divides what is too long. The ``=`` there
    keeps the folder from having the name of another lock's object, which cannot be where objects are files.
    """
    space, plain = split_space(name)
    encoded = _OTHER.sub(lambda found: b"=%02X" % found[0][0], plain.encode()).decode()
    parts = [encoded[begin : begin + SEGMENT_CHARS] for begin in range(0, len(encoded), SEGMENT_CHARS)]
    return (f"={space}/" if space else "") + "=/".join(parts)


def lock_name(object_name_: str) -> str | None:
    """Return the name of the lock with this object; None if no lock has it."""
    found = _OBJECT_NAME.fullmatch(object_name_)
    if found is None:
        return None
    space, parts = found.groups()
    try:
        plain = _ENCODED.sub(lambda byte: bytes([int(byte[1], 16)]), parts.replace("=/", "").encode()).decode()
    except UnicodeDecodeError:
        return None
    name = apart(space, plain) if space else plain
    return name if plain and object_name(name) == object_name_ else None
