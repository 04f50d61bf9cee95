"""``settings.LOCKKIT``: which lock service each alias means."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings

from lockkit.errors import ConfigurationError

__all__ = ["DEFAULT", "Service", "aliases", "service"]

DEFAULT = "default"
"""The alias that is used where none is given."""

_KEYS = ("URL", "PROFILE", "DATABASE")

_NOT_OPTIONS = frozenset({"url", "profile", "client", "connection"})
"""What the functions that make a client get from the entry itself."""


@dataclass(frozen=True, slots=True)
class Service:
    """
    One entry of ``settings.LOCKKIT``. At most one of url, profile and database is given.

    Attributes:
        alias: Its key.
        url: As for ``lockkit.connect``. May contain a password.
        profile: As for ``lockkit.connect``.
        database: Alias of a database of ``settings.DATABASES``.
        options: As for ``lockkit.connect``. May contain passwords.
    """

    alias: str
    url: str | None = field(default=None, repr=False)
    profile: str | None = None
    database: str | None = None
    options: dict[str, Any] = field(default_factory=dict, repr=False)


def aliases() -> list[str]:
    """Return the aliases of ``settings.LOCKKIT``."""
    return list(_table())


def service(alias: str) -> Service:
    """Return what an alias means."""
    table = _table()
    if alias not in table:
        known = f"only {', '.join(map(repr, table))}" if table else "it is empty"
        raise ConfigurationError(f"settings.LOCKKIT has no alias {alias!r}, {known}")
    entry, where = table[alias], f"settings.LOCKKIT[{alias!r}]"
    if isinstance(entry, str):
        entry = {"URL": entry}
    if not isinstance(entry, Mapping):
        message = f"{where} must be a URL, or a dict with one of {', '.join(_KEYS)}, not {type(entry).__name__}"
        raise ConfigurationError(message)
    unknown = [key for key in entry if key not in {*_KEYS, "OPTIONS"}]
    if unknown:
        meant = difflib.get_close_matches(str(unknown[0]).upper(), (*_KEYS, "OPTIONS"), n=1)
        hint = f" (did you mean {meant[0]!r}?)" if meant else ""
        message = f"{where} has the unknown key {unknown[0]!r}{hint}: it takes {', '.join(_KEYS)} and OPTIONS"
        raise ConfigurationError(message)
    given = {key.lower(): entry[key] for key in _KEYS if key in entry}
    options = entry.get("OPTIONS", {})
    if not all(isinstance(value, str) for value in given.values()) or not isinstance(options, Mapping):
        raise ConfigurationError(f"{where}: {', '.join(_KEYS)} must be strings, and OPTIONS a dict")
    wrong = [name for name in options if not isinstance(name, str) or name in _NOT_OPTIONS]
    if wrong:
        raise ConfigurationError(f"{where}: OPTIONS takes options of lockkit.connect() such as 'ttl', not {wrong[0]!r}")
    if len(given) > 1:
        raise ConfigurationError(f"{where} must have only one of {', '.join(_KEYS)}")
    return Service(alias, options=dict(options), **given)


def _table() -> Mapping[str, object]:
    """Return the setting; without it, ``lockkit.connect()`` decides: LOCKKIT_URL, a profile, files of this machine."""
    table = getattr(settings, "LOCKKIT", None)
    if table is None:
        names = [name for name in dir(settings) if name.isupper()]
        for name in difflib.get_close_matches("LOCKKIT", names, n=1, cutoff=0.75):
            raise ConfigurationError(f'settings.{name} has no effect: write LOCKKIT = {{"default": …}}')
        return {DEFAULT: {}}
    if not isinstance(table, Mapping):
        message = f'settings.LOCKKIT must be a dict such as {{"default": "redis://…"}}, not {type(table).__name__}'
        raise ConfigurationError(message)
    return table
