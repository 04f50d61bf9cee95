"""The key of a lock in a table: its name, and for what lives apart from the locks a key that no lock can have."""

from __future__ import annotations

import hashlib

from lockkit.backend import split_space
from lockkit.validation import NAME_BYTES_MAX

__all__ = ["row_key"]


def row_key(name: str, dialect: str) -> str:
    """
    Return the key of a name.

    Args:
        name: Of a lock, or as `lockkit.backend.apart` makes it.
        dialect: Of the database, as in `lockkit.backends.sql.dialect.Dialect`.
    """
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
