"""
System checks of ``settings.LOCKKIT``.

``lockkit.E001``: an entry is wrong. ``lockkit.W003``, with ``DEBUG = True`` only in ``check --deploy``: nothing names a
lock service. With ``check --deploy`` also ``lockkit.W001``: an alias locks within one process only, and
``lockkit.W002``: an alias locks on one machine only. With ``check --deploy --tag lockkit_servers --database default``
also ``lockkit.E002``: a lock service does not answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from django.conf import settings
from django.core import checks as django

from lockkit.configuration import profiles
from lockkit.errors import LockError
from lockkit.integrations.django.clients import aliases, new_client, service
from lockkit.integrations.django.transactions import DjangoClient

__all__ = ["SERVERS", "register"]

SERVERS = "lockkit_servers"
"""The tag of the check that asks the lock services."""


def register() -> None:
    """Register all checks."""
    django.register(_check_settings, "lockkit")
    # Decided now: a test runner turns DEBUG off, and development includes the tests.
    django.register(_check_configuration, "lockkit", deploy=bool(settings.DEBUG))
    django.register(_check_deployment, "lockkit", deploy=True)
    # Every check runs unless tags are named; before Django 6.0 even those of databases, which then do nothing.
    django.register(_check_servers, SERVERS, django.Tags.database, deploy=True)


class _Found(NamedTuple):
    """What an alias of ``settings.LOCKKIT`` means."""

    alias: str
    client: DjangoClient
    unnamed: bool  # neither the settings nor the configuration give it a lock service


def _examined() -> Iterator[_Found | LockError]:
    """Yield what each alias means, or what is wrong with it. Asks no server."""
    try:
        known = aliases()
    except LockError as error:
        yield error
        return
    for alias in known:
        try:
            one = service(alias)
            unnamed = one.url is one.profile is one.database is None and profiles.resolve(None, None, {}).embedded
            client = new_client(alias)
        except LockError as error:
            yield error
        else:
            with client:
                yield _Found(alias, client, unnamed)


def _check_settings(**_: object) -> list[Any]:
    return [django.Error(f"{error}.", id="lockkit.E001") for error in _examined() if isinstance(error, LockError)]


def _check_configuration(**_: object) -> list[Any]:
    return [
        django.Warning(
            f"Nothing names the lock service of settings.LOCKKIT[{found.alias!r}]: its locks are files of one machine.",
            hint=f'If the site runs on one machine, say so: LOCKKIT = {{"{found.alias}": "file:"}}. Otherwise use a '
            'server, or {"DATABASE": "default"}.',
            id="lockkit.W003",
        )
        for found in _examined()
        if isinstance(found, _Found) and found.unnamed
    ]


def _check_deployment(**_: object) -> list[Any]:
    messages = []
    for found in _examined():
        if isinstance(found, LockError):
            continue
        scope = found.client.capabilities.scope
        if scope == "process":
            messages.append(
                django.Warning(
                    f"settings.LOCKKIT[{found.alias!r}] locks within one process only.",
                    hint="memory:// is for tests: workers of the same site would not exclude each other. Use a server, "
                    "or file: if all of them run on one machine.",
                    id="lockkit.W001",
                )
            )
        elif scope == "machine" and not found.unnamed:  # for those, lockkit.W003 says it
            messages.append(
                django.Warning(
                    f"settings.LOCKKIT[{found.alias!r}] locks on one machine only.",
                    hint="If the site runs on one machine, files are enough: silence this with "
                    'SILENCED_SYSTEM_CHECKS = ["lockkit.W002"]. Otherwise use a server, or {"DATABASE": "default"}.',
                    id="lockkit.W002",
                )
            )
    return messages


def _check_servers(*, databases: Sequence[str] | None = None, **_: object) -> list[Any]:
    """Ask the lock services, unless no databases are to be asked."""
    messages = []
    for found in _examined() if databases else ():
        if isinstance(found, LockError):
            continue  # the check of the settings says so
        try:
            found.client.ping()
        except LockError as error:
            text = f"settings.LOCKKIT[{found.alias!r}] cannot be used: {error}."
            messages.append(django.Error(text, id="lockkit.E002"))
    return messages
