"""
``lockkit elect``: a command that runs while this process leads an election.

One process serves one term: `lockkit.cli.command` and `lockkit.cli.guard` fork before any thread of a client exists.
After a loss, lockkit executes itself again with the same arguments, and campaigns for the next term.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import lockkit
from lockkit.cli.command import CannotExecute, Command
from lockkit.cli.guard import Guard
from lockkit.cli.output import plain, refuse_private, say
from lockkit.cli.signals import ENDING, Signals
from lockkit.cli.status import SIGNALLED
from lockkit.cli.supervisor import Outcome, Supervisor, margin, variables
from lockkit.cli.waiting import Interrupted, wait_in_thread
from lockkit.errors import BackendUnavailable, LockLost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockkit.cli.options import ElectOptions
    from lockkit.sync import Client, Term

__all__ = ["elect"]


def elect(name: str, argv: Sequence[str], options: ElectOptions) -> int:
    """
    Run a command while leading; after a loss, campaign again.

    Args:
        name: The election.
        argv: The command and its arguments.
        options: See there.

    Returns:
        The exit status.

    Raises:
        LockError: The campaign failed.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # see `_campaign_again`
    job = _Job(argv, options)
    try:
        with lockkit.connect(options.url, profile=options.profile) as client:
            refuse_private(client)
            status = job.run(client, name)
    except Interrupted as interrupt:
        return SIGNALLED + interrupt.signum
    finally:
        job.clean_up()
    return job.campaign_again() if status is None else status


class _NotedSignals(Signals):
    """
    Signals, of which the last that asks the process to end is kept.

    Attributes:
        ending: Its number; None if none has come.
    """

    ending: int | None = None

    def wait(self, seconds: float) -> list[int]:
        """See `Signals.wait`."""
        signals = super().wait(seconds)
        for signum in signals:
            if signum in ENDING:
                self.ending = signum
        return signals


class _Job:
    """One term: the command, its guard, and the signals for it."""

    def __init__(self, argv: Sequence[str], options: ElectOptions) -> None:
        """Fork both processes. Nothing of a client exists yet, and this process has one thread."""
        self._options = options
        self._command = Command(argv)
        self._guard = Guard(self._command.group)
        self._signals = _NotedSignals()

    def clean_up(self) -> None:
        """Leave no process behind. May be called twice."""
        self._command.discard()
        self._guard.dismiss()

    def run(self, client: Client, name: str) -> int | None:
        """Campaign, run the command, resign; returns the exit status, or None if the term was lost."""
        options = self._options
        election = client.election(name, ttl=options.ttl, grace=options.grace, value=options.value)
        term = wait_in_thread(election.campaign, self._signals, "lockkit-campaign")
        term.on_lost(lambda *_: self._signals.post())
        self._signals.watch_command()
        try:
            outcome = self._run_command(term)
        except CannotExecute as error:
            say(plain(error))
            outcome = Outcome(error.status, lost=False)
        finally:
            # Whatever went wrong here: nothing of the command outlives the term.
            self.clean_up()
        return None if outcome.lost else _resign(term, outcome.status)

    def _run_command(self, term: Term) -> Outcome:
        """
        Run the command until it ends or the term does.

        Raises:
            CannotExecute: The command does not exist, or is not a program.
        """
        # The supervisor sends SIGTERM its own grace and a margin before the deadline, and SIGKILL at the margin.
        grace = max(0.0, term.grace - margin(term.ttl))
        supervisor = Supervisor(
            self._command, term, self._signals, self._guard, grace=grace, kill_after=self._options.kill_after
        )
        self._command.start(variables(term))
        return supervisor.run()

    def campaign_again(self) -> int:
        """
        Execute this program again; returns only if a signal has come: its exit status.

        A signal that comes during the execution stays pending, and ends the new program.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        self._signals.wait(0)
        if self._signals.ending is not None:
            return SIGNALLED + self._signals.ending
        sys.stdout.flush()
        sys.stderr.flush()
        return os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _resign(term: Term, status: int) -> int | None:
    """Resign after the command has ended; returns its exit status."""
    try:
        term.resign()
    except LockLost:
        # The log says when and why. The command had ended by itself: what it did last was not protected.
        say(plain(f"term {term.token} of election {term.name!r} was lost before the command ended by itself"))
        return None
    except BackendUnavailable as error:
        say(plain(error))  # the term protected the command to its end; it expires after its ttl
    return status
