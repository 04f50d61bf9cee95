"""
System checks of ``settings.LOCKKIT``.

``lockkit.E001``: an entry is wrong. ``lockkit.W003``, with ``DEBUG = True`` only in ``check --deploy``: nothing names a
lock service. With ``check --deploy`` also ``lockkit.W001``: an alias locks within one process only, and
``lockkit.W002``: an alias locks on one machine only. With ``check --deploy --tag lockkit_servers --database default``
also ``lockkit.E002``: a lock service does not answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.conf import settings
from django.core import checks as django

from lockkit.configuration import profiles
from lockkit.errors import LockError
from lockkit.integrations.django.clients import new_client
from lockkit.integrations.django.services import aliases, service

__all__ = ["SERVERS", "check_configuration", "check_deployment", "check_servers", "check_settings", "register"]

SERVERS = "lockkit_servers"
"""The tag of the check that asks the lock services."""


def register() -> None:
    """Register all checks."""
    django.register(check_settings, "lockkit")
    # Decided now: a test runner turns DEBUG off, and development includes the tests.
    django.register(check_configuration, "lockkit", deploy=bool(settings.DEBUG))
    django.register(check_deployment, "lockkit", deploy=True)
    # Every check runs unless tags are named; before Django 6.0 even those of databases, which then do nothing.
    django.register(check_servers, SERVERS, django.Tags.database, deploy=True)


def check_settings(**_: object) -> list[Any]:
    """Say which entries of ``settings.LOCKKIT`` are wrong. Asks no server."""
    return [message for _, _, message in _examined() if message is not None]


def check_configuration(**_: object) -> list[Any]:
    """Say for which aliases nothing names a lock service."""
    return [
        django.Warning(
            f"Nothing names the lock service of settings.LOCKKIT[{alias!r}]: its locks are files of one machine.",
            hint=f'If the site runs on one machine, say so: LOCKKIT = {{"{alias}": "file:"}}. Otherwise use a '
            'server, or {"DATABASE": "default"}.',
            id="lockkit.W003",
        )
        for alias in _unnamed()
    ]


def check_deployment(**_: object) -> list[Any]:
    """Say which aliases lock less than several machines."""
    messages, unnamed = [], _unnamed()
    for alias, scope, _ in _examined():
        if scope == "process":
            messages.append(
                django.Warning(
                    f"settings.LOCKKIT[{alias!r}] locks within one process only.",
                    hint="memory:// is for tests: workers of the same site would not exclude each other. Use a server, "
                    "or file: if all of them run on one machine.",
                    id="lockkit.W001",
                )
            )
        elif scope == "machine" and alias not in unnamed:  # for those, lockkit.W003 says it
            messages.append(
                django.Warning(
                    f"settings.LOCKKIT[{alias!r}] locks on one machine only.",
                    hint="If the site runs on one machine, files are enough: silence this with "
                    'SILENCED_SYSTEM_CHECKS = ["lockkit.W002"]. Otherwise use a server, or {"DATABASE": "default"}.',
                    id="lockkit.W002",
                )
            )
    return messages


def check_servers(*, databases: Sequence[str] | None = None, **_: object) -> list[Any]:
    """Say which lock services do not answer. Asks nothing unless databases are to be asked."""
    if not databases:
        return []
    messages = []
    for alias in _known():
        try:
            with new_client(alias) as client:
                client.ping()
        except LockError as error:
            messages.append(django.Error(f"settings.LOCKKIT[{alias!r}] cannot be used: {error}.", id="lockkit.E002"))
    return messages


def _examined() -> Iterator[tuple[str, str | None, Any]]:
    """Yield each alias with where its locks hold, or with what is wrong; a wrong setting has one with alias ""."""
    try:
        known = aliases()
    except LockError as error:
        yield "", None, django.Error(f"{error}.", id="lockkit.E001")
        return
    for alias in known:
        try:
            with new_client(alias) as client:
                yield alias, client.capabilities.scope, None
        except LockError as error:
            yield alias, None, django.Error(f"{error}.", id="lockkit.E001")


def _unnamed() -> list[str]:
    """Return the aliases that neither the settings nor the configuration give a lock service."""
    try:
        services = [service(alias) for alias in aliases()]
        unnamed = [one.alias for one in services if one.url is one.profile is one.database is None]
        return unnamed if unnamed and profiles.resolve(None, None, {}).embedded else []
    except LockError:
        return []  # check_settings says what is wrong


def _known() -> list[str]:
    try:
        return aliases()
    except LockError:
        return []  # check_settings says so
