"""What the object of a lock holds, and what the object is called."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from lockkit.backend import SPACES, apart, split_space
from lockkit.validation import decode_json, percent_decode

Version = Mapping[str, str]
"""What a conditional write expects: the ``e_tag`` of the object, its ``version``, or both."""

MARK = {"lockkit": 1}
"""In each object: the version of its form."""

JSON_CHARS_MAX = 1024 * 1024
"""Longest object that is read. The longest that lockkit writes, with a note full of escapes, has about half as many."""

SEGMENT_CHARS = 200
"""Longest part of an object's name between slashes: stores that keep objects as files take 255 bytes."""

_OTHER = re.compile(rb"[^A-Za-z0-9_-]")
_OBJECT_NAME = re.compile(rf"(?:=({'|'.join(SPACES)})/)?([A-Za-z0-9_=/-]*)")


@dataclass(frozen=True, slots=True)
class Record:
    """
    The state of one lock. Without arguments: that of a lock that was never held.

    Two writes never have the same bytes, for the nonce: S3's ETag is a hash of the content, so a writer that expects
    the old bytes would also replace equal new ones, and two would win.
    """

    token: int = 0  # the last one that was granted; it stays when the lock is free
    owner: str | None = None  # None: the lock is free
    ttl: float = 0.0  # for how long the holder's last write keeps the lock, seconds
    metadata: str = ""  # as `Request.metadata`
    broken: str | None = None  # the owner whose lock was broken last, for its next renewal
    note: str | None = None
    note_until: float = 0.0  # when the life of the note ends, Unix time
    nonce: str = ""  # random, drawn anew with each write
    version: Version | None = None  # of the object that was read, or is to be replaced; None: there is none

    def changed(self, **changes: Any) -> Record:
        """Return the record to write in place of this one, whose version it expects."""
        return replace(self, nonce=secrets.token_hex(8), **changes)

    def freed(self, *, broken: bool = False) -> Record:
        """Return the record to write when the lock is released, or broken."""
        return self.changed(owner=None, ttl=0.0, metadata="", broken=self.owner if broken else self.broken)

    def encode(self) -> bytes:
        """Return the content of the object."""
        return json.dumps(MARK | {name: getattr(self, name) for name in _KINDS}, ensure_ascii=False).encode()


_KINDS = {name: int | float if kind is float else kind for name, kind in get_type_hints(Record).items()}
del _KINDS["version"]


def decode(content: bytes, version: Version) -> Record:
    """Read an object; ValueError if lockkit has not written it."""
    value = decode_json(content, JSON_CHARS_MAX)
    if not isinstance(value, dict) or not MARK.items() <= value.items():
        raise ValueError(f"it has no mark of lockkit's ({MARK})")
    fields: dict[str, Any] = {name: value.get(name) for name in _KINDS}
    if wrong := [name for name, kind in _KINDS.items() if not isinstance(fields[name], kind)]:
        raise ValueError(f"its {wrong[0]} has the wrong type")
    return Record(**fields, version=version)


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
    space, parts = found.groups() if found else (None, "")
    try:
        plain = percent_decode(parts.replace("=/", "").replace("=", "%"), strict=True)
    except ValueError:
        return None
    name = apart(space, plain) if space else plain
    return name if plain and object_name(name) == object_name_ else None
