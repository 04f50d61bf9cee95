"""The key of a lock in a table: its name, and for what lives apart from the locks a key that no lock can have."""

from __future__ import annotations

import hashlib
import re

from lockkit.backend import apart, split_space
from lockkit.errors import ConfigurationError
from lockkit.validation import NAME_BYTES_MAX, lock_name


def row_key(name: str, dialect: str) -> str:
    """Return the key of a name."""
    if name[0] != "\0":
        return name
    space, plain = split_space(name)
    if dialect != "mysql":
        # Longer than any lock name. The text ends at the last slash, so no two names have the same key.
        return f"+{space}/{plain}/".ljust(NAME_BYTES_MAX + 1, ".")
    # The column takes no more bytes than a lock name has, but, unlike PostgreSQL's, NUL.
    key = f"\0{space}\0{plain}"
    digest = hashlib.sha256(plain.encode()).hexdigest()
    return key if len(key.encode()) <= NAME_BYTES_MAX else f"\0{space}\0\0{digest}"


def name_of_key(key: str) -> str | None:
    """Return the name from which `row_key` made a key; None if it made no such key, or only a digest is left."""
    space, plain = "", key
    if key.startswith("\0"):
        space, _, plain = key[1:].partition("\0")
    elif len(key.encode()) > NAME_BYTES_MAX and key.startswith("+"):
        space, _, plain = key[1:].rpartition("/")[0].partition("/")
    try:
        plain = lock_name(plain)
    except ConfigurationError:
        return None
    return apart(space, plain) if space else plain


def range_of(prefix: str, dialect: str) -> tuple[str, str | None]:
    """
    Return the first key of the names with a prefix, in byte order, and the first key after them; None: there is none.

    This relies on ASCII only, which has the same bytes, below those of all other characters, in each encoding that a
    database may use. So the range of ``aé`` ends with that of ``a``.
    """
    space, plain = split_space(prefix)
    head = "" if not space else f"\0{space}\0" if dialect == "mysql" else f"+{space}/"
    counted = re.match(r"[\x01-\x7e]*", plain)
    assert counted is not None, "a pattern that matches the empty string"
    text = head + counted[0]
    return head + plain, text[:-1] + chr(ord(text[-1]) + 1) if text else None
