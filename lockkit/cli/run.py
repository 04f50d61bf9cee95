"""``lockkit run``: a command under a lock."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, TypeVar

import typer

import lockkit
from lockkit.cli.command import CannotExecute, Command
from lockkit.cli.guard import Guard
from lockkit.cli.once import Record
from lockkit.cli.options import OnBusy, OnDone
from lockkit.cli.output import plain, refuse_private, say
from lockkit.cli.signals import ENDING, Signals
from lockkit.cli.status import SIGNALLED, Status
from lockkit.cli.supervisor import Outcome, Supervisor, default_grace, grace_max, variables
from lockkit.cli.waiting import Interrupted, wait_in_thread
from lockkit.errors import BackendUnavailable, LockLost, LockTimeout
from lockkit.runtime import monotonic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockkit.cli.options import RunOptions
    from lockkit.sync import Client, Lease
    from lockkit.units import Instant

__all__ = ["run"]

T = TypeVar("T")


def run(name: str, argv: Sequence[str], options: RunOptions) -> int:
    """
    Run a command under a lock.

    Args:
        name: The lock.
        argv: The command and its arguments.
        options: See there.

    Returns:
        The exit status.

    Raises:
        LockError: The lock could not be had.
        typer.BadParameter: The grace is longer than the ttl allows.
    """
    job = _Job(argv, options)
    try:
        with lockkit.connect(options.url, profile=options.profile) as client:
            refuse_private(client)
            _tell_backend(client, name)
            return job.run(client, name)
    except Interrupted as interrupt:
        return SIGNALLED + interrupt.signum
    finally:
        job.clean_up()


def _tell_backend(client: Client, name: str) -> None:
    """
    Print whom the lock locks out: with ``-v``; and at a terminal if it is only this machine.

    Cron mails what is printed, so nothing is printed there unasked. Whether a command is meant for several machines
    cannot be known: a crontab that all of them have looks on each like that of one.
    """
    alone = client.capabilities.scope == "machine"
    if logging.getLogger("lockkit").isEnabledFor(logging.INFO) or (alone and sys.stderr.isatty()):
        whom = "processes of this machine only" if alone else "all machines that use the same servers"
        say(plain(f"lock {name!r} on {client.url}: locks out {whom}"))


class _Job:
    """One run: the command, its guard, and the signals for it."""

    def __init__(self, argv: Sequence[str], options: RunOptions) -> None:
        """Fork both processes. Nothing of a client exists yet, and this process has one thread."""
        self._options = options
        self._command = Command(argv)
        self._guard = Guard(self._command.group)
        self._signals = Signals()

    def clean_up(self) -> None:
        """Leave no process behind. May be called twice."""
        self._command.discard()
        self._guard.dismiss()

    def run(self, client: Client, name: str) -> int:
        """Acquire, run the command, release; gives the exit status."""
        options = self._options
        timeout = options.timeout
        lock = client.lock(
            name,
            ttl=options.ttl,
            timeout=0 if timeout is None and options.on_busy is not OnBusy.WAIT else timeout,
            metadata=options.metadata,
            on_lost=lambda *_: self._signals.post(),
        )
        record = None if options.once_per is None and options.once is None else Record(client, name, options)
        try:
            lease = self._in_thread(lock.acquire)
        except LockTimeout:
            if options.on_busy is OnBusy.SKIP:
                return Status.OK  # in silence: cron mails what is printed
            raise
        if record is None:
            return self._run_under(lease, None)
        try:
            status = self._refusal(record)
            if status is None:
                return self._run_under(lease, record)
        finally:
            record.leave()
        return _release(lease, Outcome(status, lost=False))

    def _refusal(self, record: Record) -> int | None:
        """Look at the record: the exit status if the command must not run; None if it is to be run."""
        if not self._in_thread(record.begin):
            if self._options.on_done is OnDone.SKIP:
                return Status.OK  # in silence, as above
            say(plain(f"{record.key!r} was done already"))
            return Status.DONE
        if record.count_attempt():
            return None
        say(plain(f"no attempt at {record.key!r} is left (--attempts {self._options.attempts})"))
        return Status.DONE

    def _run_under(self, lease: Lease, record: Record | None) -> int:
        """Run the command, note its success, and release; gives the exit status."""
        self._signals.watch_command()
        held_until = monotonic() + self._options.min_hold
        try:
            outcome = self._run_command(lease, record)
        except CannotExecute as error:
            say(plain(error))
            return _release(lease, Outcome(error.status, lost=False))
        finally:
            # Whatever went wrong here: nothing of the command outlives the lock.
            self.clean_up()
        if record is not None and not outcome.lost and outcome.status == Status.OK:
            outcome = Outcome(record.complete(), lost=False)
        if not outcome.lost:
            self._hold_on(lease, held_until)
        return _release(lease, outcome)

    def _in_thread(self, function: Callable[[], T]) -> T:
        """See `wait_in_thread`."""
        return wait_in_thread(function, self._signals, "lockkit-acquire")

    def _run_command(self, lease: Lease, record: Record | None) -> Outcome:
        """
        Run the command until it ends or the lease does.

        Raises:
            CannotExecute: The command does not exist, or is not a program.
        """
        grace = _grace(lease, self._options.grace)
        if lease.remaining() <= lease.ttl / 2:
            lease.extend()  # the grant took long: without this the command might be ended before the first renewal
        supervisor = Supervisor(
            self._command, lease, self._signals, self._guard, grace=grace, kill_after=self._options.kill_after
        )
        self._command.start(variables(lease) | ({} if record is None else {"LOCKKIT_ONCE": record.key}))
        return supervisor.run()

    def _hold_on(self, lease: Lease, until: Instant) -> None:
        """
        Keep the lock after a command that ended early (``--min-hold``).

        Without it: A's clock is 2 s ahead of B's; A's cron runs a job of 1 s and frees the lock; B's cron finds it free
        and runs the job again.
        """
        while not lease.lost and (left := until - monotonic()) > 0:
            if ENDING.intersection(self._signals.wait(min(left, 1.0))):
                return


def _grace(lease: Lease, wanted: float | None) -> float:
    """
    Check the grace against the ttl that was granted (a backend may round it up).

    Raises:
        typer.BadParameter: It is too long.
    """
    if wanted is None:
        return default_grace(lease.ttl)
    if wanted > grace_max(lease.ttl):
        message = (
            f"{wanted:g} s is more than half of the ttl of {lease.ttl:g} s and leaves no time for renewals. "
            "Give a shorter grace or a longer --ttl."
        )
        raise typer.BadParameter(message, param_hint="'--signal-grace'")
    return wanted


def _release(lease: Lease, outcome: Outcome) -> int:
    """Give the lock back, and decide on the exit status."""
    if outcome.lost:
        return Status.LOST  # what is still held is released when the client is closed
    try:
        lease.release()
    except LockLost:
        # The log says when and why.
        ended = f"the command had already ended, with status {outcome.status}"
        say(plain(f"lock {lease.name!r} (token {lease.token}) was lost before it was released; {ended}"))
        return Status.LOST
    except BackendUnavailable as error:
        # The lock protected the command to its end; it expires after its ttl.
        say(plain(error))
    return outcome.status
