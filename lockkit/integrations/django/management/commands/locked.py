"""``manage.py locked``: ``lockkit run`` with the lock service of an alias."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from django.core.management.base import BaseCommand, CommandError

from lockkit.errors import ConfigurationError
from lockkit.integrations.django.clients import DEFAULT, Service, environment_of, service

__all__ = ["Command"]


class Command(BaseCommand):
    """Replaces itself by ``lockkit run``: signals and exit statuses are those."""

    help = (
        "Runs a command under a lock: manage.py locked NAME [options of lockkit run] -- command arguments. "
        "Options of manage.py come before NAME. The exit statuses are those of lockkit run, see lockkit run --help."
    )
    requires_system_checks: Sequence[str] = ()
    stealth_options = ("command",)

    _command: Sequence[str] = ()
    _replaces = False

    def add_arguments(self, parser: Any) -> None:  # noqa: ANN401 - Django has no types
        """See Django."""
        parser.add_argument("--alias", default=DEFAULT, help='A key of settings.LOCKKIT; "default" by default.')
        parser.add_argument("name", help="Name of the lock.")
        parser.add_argument("options", nargs="...", help="Options of lockkit run, such as --timeout 5.")

    def run_from_argv(self, argv: list[str]) -> None:
        """Keep what comes after ``--`` from the parser of Django's options."""
        end = argv.index("--") if "--" in argv else len(argv)
        self._command = argv[end + 1 :]
        self._replaces = True
        super().run_from_argv(argv[:end])

    def handle(self, *, alias: str, name: str, options: list[str], **others: Any) -> None:
        """
        Run it.

        Raises:
            CommandError: No command was given, the alias is wrong; or, by `call_command`, the command has failed.
        """
        command = others.get("command") or self._command
        if not command:
            raise CommandError("give the command after --, as in: manage.py locked NAME -- python job.py", returncode=2)
        try:
            environment = _environment(service(alias))
        except ConfigurationError as error:
            raise CommandError(str(error), returncode=78) from error
        program = [sys.executable, "-P", "-m", "lockkit.cli", "run", name, *options, "--", *command]
        if self._replaces:
            sys.stdout.flush()
            sys.stderr.flush()
            os.execve(sys.executable, program, environment)  # noqa: S606 - the same Python
        status = subprocess.run(program, env=environment, check=False).returncode  # noqa: S603 - the same Python
        if status:
            raise CommandError(f"{' '.join(command)} under lock {name!r} ended with status {status}", returncode=status)


def _environment(found: Service) -> dict[str, str]:
    """Return an environment that names the lock service. A command line would show its password to all users."""
    where = f"settings.LOCKKIT[{found.alias!r}]"
    environment = dict(os.environ) if found.database is None else os.environ | environment_of(found.database)
    url = found.url if found.database is None else environment["LOCKKIT_URL"]
    if found.options and url is None:
        message = f"{where} has OPTIONS without a URL, which manage.py locked cannot pass on: put them into the profile"
        raise ConfigurationError(message)
    if found.profile is not None:
        others = {name: value for name, value in os.environ.items() if name != "LOCKKIT_URL"}
        return {**others, "LOCKKIT_ENV": found.profile}
    if url is None:
        return environment
    base, _, query = url.partition("?")
    kept = [item for item in query.split("&") if item and item.partition("=")[0] not in found.options]
    for name, value in found.options.items():
        if not isinstance(value, str | int | float):
            message = f"{where}: manage.py locked cannot pass on the option {name}, which is neither text nor a number"
            raise ConfigurationError(message)
        kept.append(f"{quote(name)}={quote(str(int(value) if isinstance(value, bool) else value), safe='')}")
    return {**environment, "LOCKKIT_URL": f"{base}?{'&'.join(kept)}" if kept else base}
