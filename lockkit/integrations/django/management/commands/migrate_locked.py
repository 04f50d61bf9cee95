"""``manage.py migrate_locked``: ``migrate``, one process at a time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from django.core.management.base import CommandError
from django.core.management.commands import migrate
from django.db import OperationalError, connections
from django.db.migrations.executor import MigrationExecutor

from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockLost, LockTimeout, Unsupported
from lockkit.integrations.django.clients import from_connection, new_client, service
from lockkit.integrations.migrations import LOCK_NAME, is_in_memory
from lockkit.sync import Client, Lease

__all__ = ["Command"]

# As the command line of lockkit.
_STATUSES: tuple[tuple[type[LockError], int], ...] = (
    (BackendUnavailable, 69),
    (LockTimeout, 75),
    (ConfigurationError, 78),
    (Unsupported, 78),
    (LockLost, 79),
)


class _Terminated(KeyboardInterrupt):
    """SIGTERM. As an interrupt, because drivers then cancel the statement that the server is running."""


class Command(migrate.Command):
    """As ``migrate``, whose options it takes too."""

    help = (
        "Migrates as migrate does, one process at a time. Needs no lock if there is nothing to migrate. "
        "Exit status: 75 if another process was migrating until the timeout, 69 if the database does not answer, "
        "79 if the lock was lost."
    )

    _lease: Lease | None = None

    def add_arguments(self, parser: Any) -> None:  # noqa: ANN401 - Django has no types
        """See Django."""
        super().add_arguments(parser)
        parser.add_argument(
            "--timeout", type=float, metavar="SECONDS", help="How long to wait for another process's migration."
        )
        parser.add_argument(
            "--ttl", type=float, metavar="SECONDS", help="How long the lock outlives a crashed process; 30 by default."
        )
        parser.add_argument(
            "--lock-alias",
            metavar="ALIAS",
            help="Take the lock from this alias of settings.LOCKKIT. By default it is in the migrated database.",
        )
        parser.add_argument(
            "--always",
            action="store_true",
            help="Run migrate, which sends pre_migrate and post_migrate, even if there is nothing to migrate.",
        )

    def handle(self, *arguments: Any, **options: Any) -> None:
        """
        Migrate.

        Raises:
            CommandError: The lock could not be had, or was lost.
        """
        connection = connections[options["database"]]
        in_memory = connection.vendor == "sqlite" and is_in_memory(str(connection.settings_dict["NAME"]))
        if options["plan"] or options["check_unapplied"] or (in_memory and not options["lock_alias"]):
            super().handle(*arguments, **options)  # changes nothing, or nothing that another process has
        else:
            try:
                if options["lock_alias"]:
                    service(options["lock_alias"])  # a wrong one fails at the first deployment, with or without work
                if not self._found_up_to_date(options):
                    with _terminable():
                        self._migrate(*arguments, **options)
            except _Terminated:
                raise SystemExit(128 + signal.SIGTERM) from None
            except LockError as error:
                status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 1)
                raise CommandError(str(error), returncode=status) from error

    def migration_progress_callback(self, action: str, migration: Any = None, fake: bool = False) -> None:  # noqa: ANN401, FBT001, FBT002 - Django's
        """Begin no further migration once the lock is lost."""
        if self._lease is not None and action in {"apply_start", "unapply_start"}:
            self._lease.check()
        super().migration_progress_callback(action, migration, fake)

    def _migrate(self, *arguments: Any, **options: Any) -> None:
        client, name = self._lock_of(options)
        with client, client.lock(name, timeout=options["timeout"], ttl=options["ttl"]) as self._lease:
            # The process that was waited for may have done it all.
            if not self._up_to_date(options):
                super().handle(*arguments, **options)

    def _found_up_to_date(self, options: dict[str, Any]) -> bool:
        """Look for the first time."""
        connection = connections[options["database"]]
        try:
            found = self._up_to_date(options)
        except OperationalError as error:
            raise CommandError(f"cannot ask the database {connection.alias!r}: {error}", returncode=69) from error
        if not connection.in_atomic_block:
            connection.close()  # the server may do so during a long wait for the lock
        return found

    def _lock_of(self, options: dict[str, Any]) -> tuple[Client, str]:
        connection = connections[options["database"]]
        alias = options["lock_alias"]
        if alias is None:
            return from_connection(connection), LOCK_NAME
        return new_client(alias), f"{LOCK_NAME}:{connection.settings_dict['NAME'] or options['database']}"

    def _up_to_date(self, options: dict[str, Any]) -> bool:
        """Tell whether ``migrate`` with these options would change nothing."""
        if options["always"] or options["app_label"] or options["run_syncdb"] or options["prune"]:
            return False
        executor = MigrationExecutor(connections[options["database"]])
        loader = executor.loader
        if loader.detect_conflicts() or executor.migration_plan(loader.graph.leaf_nodes()):
            return False
        # A squashed migration is recorded when all that it replaces has been applied.
        applied = executor.recorder.applied_migrations()
        if any(key not in applied and applied.keys() >= set(one.replaces) for key, one in loader.replacements.items()):
            return False
        if options["verbosity"]:
            self.stdout.write("No migrations to apply.")
        return True


@contextmanager
def _terminable() -> Iterator[None]:
    """Release the lock on SIGTERM, with which container managers end a process, unless the program handles it."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(_signum: int, _frame: FrameType | None) -> NoReturn:
    raise _Terminated
