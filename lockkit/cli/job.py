"""
A command under a lease: what ``lockkit run`` and ``lockkit elect`` have in common.

Command and guard are forked first, while this process has one thread and no client: see `lockkit.cli.command`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lockkit.cli.command import CannotExecute, Command
from lockkit.cli.guard import Guard
from lockkit.cli.options import ElectOptions, RunOptions
from lockkit.cli.output import refuse_private, say, settings_told
from lockkit.cli.signals import Signals
from lockkit.cli.status import SIGNALLED
from lockkit.cli.supervisor import Outcome, Supervisor, variables
from lockkit.cli.waiting import Interrupted
from lockkit.errors import BackendUnavailable, ConfigurationError, LockLost
from lockkit.sync import Client, Lease
from lockkit.sync.client import open_client
from lockkit.units import Seconds

T = TypeVar("T")


class Job:
    """
    The processes of a command that is to run under a lease.

    Attributes:
        signals: Of this process, for the command.
        embedded: Nothing names a backend, and the user has been told.
    """

    def __init__(self, argv: Sequence[str], options: RunOptions | ElectOptions) -> None:
        """Fork the command and its guard. Call it while this process has one thread."""
        self._options = options
        self.embedded = False
        try:
            self._command = Command(argv, wait_children=options.wait_children)
            self._guard = Guard(self._command.group)
        except OSError as error:
            message = (
                f"cannot start a process: {error.strerror}. Raise the limits of this user or container (ulimit -n, "
                "ulimit -u, pids)"
            )
            raise ConfigurationError(message) from error
        self.signals = Signals()

    def serve(self, work: Callable[[Client], T]) -> T | int:
        """Connect and do the work; nothing of the command is left afterwards."""
        try:
            settings = settings_told(self._options.url, self._options.profile)
            self.embedded = settings.embedded
            with open_client(settings) as client:
                refuse_private(client)
                return work(client)
        except Interrupted as interrupt:
            return SIGNALLED + interrupt.signum
        except CannotExecute as error:
            say(str(error))
            return error.status
        finally:
            self._clean_up()

    def supervise(self, lease: Lease, grace: Seconds, more: dict[str, str] | None = None) -> Outcome:
        """Run the command until it or the lease ends. Nothing of it outlives the lease, whatever goes wrong here."""
        self.signals.watch_command()
        try:
            supervisor = Supervisor(
                self._command,
                lease,
                self.signals,
                self._guard,
                grace=grace,
                kill_after=self._options.kill_after,
                wait_children=self._options.wait_children,
            )
            self._command.start(variables(lease) | (more or {}))
            return supervisor.run()
        except CannotExecute:
            release(lease)
            raise
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        """Leave no process behind. May be called twice."""
        self._command.discard()
        self._guard.dismiss()


def release(lease: Lease) -> bool:
    """Give the lock back after the command has ended."""
    try:
        lease.release()
    except LockLost:
        return False
    except BackendUnavailable as error:
        # The lock protected the command to its end; it expires after its ttl.
        say(str(error))
    return True
