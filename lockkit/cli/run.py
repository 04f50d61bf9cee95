"""
``lockkit run`` and ``lockkit elect``: a command under a lock, or while this process leads an election.

Command and guard are forked first, while this process has one thread and no client: see `lockkit.cli.command`. So one
process serves one term: after a loss, ``elect`` executes itself again with the same arguments, and campaigns again.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import typer

from lockkit.cli.command import CannotExecute, Command
from lockkit.cli.guard import Guard
from lockkit.cli.inspection import describe, local_time
from lockkit.cli.once import Record
from lockkit.cli.options import ElectOptions, OnBusy, OnDone, RunOptions
from lockkit.cli.output import refuse_private, say, settings_told
from lockkit.cli.signals import ENDING, Interrupted, Signals, wait_in_thread
from lockkit.cli.status import SIGNALLED, Status
from lockkit.cli.supervisor import Outcome, Supervisor, default_grace, grace_max, margin, variables
from lockkit.errors import BackendUnavailable, LockError, LockLost, LockTimeout
from lockkit.integrations.scopes import WITHIN
from lockkit.runtime import monotonic
from lockkit.sync import Client, Lease
from lockkit.sync.client import open_client
from lockkit.units import Instant, Seconds

TELL_AFTER_SECONDS = 1.0
"""A wait on a terminal is told after that. Shorter tells of waits that nobody notices; longer leaves them guessing."""


def run(name: str, argv: Sequence[str], options: RunOptions) -> int:
    """Run a command under a lock."""
    job = Job(argv, options)
    return job.serve(lambda client: _Run(job, client, name, options).run())


def _tell_backend(client: Client, name: str) -> None:
    """
    Print whom the lock locks out: with ``-v``; and at a terminal if it is only this machine.

    Cron mails what is printed, so nothing is printed there unasked. Whether a command is meant for several machines
    cannot be known: a crontab that all of them have looks on each like that of one.
    """
    alone = client.capabilities.scope == "machine"
    if logging.getLogger("lockkit").isEnabledFor(logging.INFO) or (alone and sys.stderr.isatty()):
        whom = WITHIN["machine"] if alone else "all machines that use the same servers"
        say(f"lock {name!r} on {client.url}: locks out {whom}")


class _Run:
    """One run of a command under a lock."""

    def __init__(self, job: Job, client: Client, name: str, options: RunOptions) -> None:
        """Check the options. Nothing is sent."""
        self._job = job
        self._client = client
        self._options = options
        timeout = options.timeout
        self._lock = client.lock(
            name,
            ttl=options.ttl,
            timeout=0 if timeout is None and options.on_busy is not OnBusy.WAIT else timeout,
            metadata=options.metadata,
            on_lost=lambda *_: job.signals.post(),
        )
        # Now too, and not only when the lock is granted: that may take hours, and with --on-busy=skip be never.
        default_ttl = client._engine.default_ttl  # noqa: SLF001 - the command and the client are one product
        self._grace(default_ttl if options.ttl is None else options.ttl)
        self._record = None if options.once_per is None and options.once is None else Record(client, name, options)
        if not job.embedded:
            _tell_backend(client, name)

    def run(self) -> int:
        """Acquire, run the command, release; gives the exit status."""
        try:
            lease = self._acquire()
        except LockTimeout:
            skips = self._options.on_busy is OnBusy.SKIP
            if not (skips and self._options.quiet):
                say(f"lock {self._lock.name!r} is busy{self._holder()}: the command did not run")
            return Status.OK if skips else Status.BUSY
        if self._record is None:
            return self._run_under(lease)
        try:
            status = self._refusal(self._record)
            if status is None:
                return self._run_under(lease)
            release(lease)  # whether it was lost does not matter: nothing ran under it
            return status
        finally:
            self._record.leave()

    def _acquire(self) -> Lease:
        """Acquire; on a terminal, say after a second for whom this waits. In a thread: the holder may take time too."""
        telling = threading.Timer(TELL_AFTER_SECONDS, lambda: self._tell_wait(telling.finished))
        telling.daemon = True
        if sys.stderr.isatty():
            telling.start()
        try:
            return wait_in_thread(self._lock.acquire, self._job.signals)
        finally:
            telling.cancel()

    def _tell_wait(self, over: threading.Event) -> None:
        holder = self._holder()
        if not over.is_set():
            say(f"waiting for lock {self._lock.name!r}{holder}")

    def _refusal(self, record: Record) -> int | None:
        """Look at the record: the exit status if the command must not run; None if it is to be run."""
        if not wait_in_thread(record.begin, self._job.signals):
            skips = self._options.on_done is OnDone.SKIP
            if not (skips and self._options.quiet):
                say(f"{record.key!r} was done already{record.since()}: the command did not run")
            return Status.OK if skips else Status.DONE
        if record.count_attempt():
            return None
        say(f"no attempt at {record.key!r} is left (--attempts {self._options.attempts})")
        return Status.DONE

    def _holder(self) -> str:
        """Say who holds the lock, if that can be known now."""
        try:
            holder = next(iter(self._client.holders(self._lock.name)), None)
        except LockError:
            return ""
        if holder is None:
            return ""
        since = "" if holder.since is None else f" since {local_time(holder.since)}"
        return f" (held by {describe(holder)}{since})"

    def _run_under(self, lease: Lease) -> int:
        """Run the command, note its success, and release; gives the exit status."""
        held_until = monotonic() + self._options.min_hold
        grace = self._grace(lease.ttl)
        if lease.remaining() <= lease.ttl / 2:
            lease.extend()  # the grant took long: without this the command might be ended before the first renewal
        record = self._record
        outcome = self._job.supervise(lease, grace, {} if record is None else {"LOCKKIT_ONCE": record.key})
        if outcome.lost:
            return Status.LOST
        status = outcome.status
        if record is not None and status == Status.OK:
            status = record.complete()
        self._hold_on(lease, held_until)
        if release(lease):
            return status
        ended = f"the command had already ended, with status {status}"
        say(f"lock {lease.name!r} (token {lease.token}) was lost before it was released; {ended}")
        return Status.LOST

    def _grace(self, ttl: Seconds) -> float:
        """Check the grace against a ttl: the one asked for, and the one granted, which a backend may round up."""
        grace = self._options.signal_grace
        if grace is None:
            return default_grace(ttl)
        if grace > grace_max(ttl):
            message = (
                f"{grace:g} s is more than half of the ttl of {ttl:g} s and leaves no time for renewals. "
                "Give a shorter grace or a longer --ttl."
            )
            raise typer.BadParameter(message, param_hint="'--signal-grace'")
        return grace

    def _hold_on(self, lease: Lease, until: Instant) -> None:
        """
        Keep the lock after a command that ended early (``--min-hold``), unless a signal has asked for the end.

        Without it: A's clock is 2 s ahead of B's; A's cron runs a job of 1 s and frees the lock; B's cron finds it free
        and runs the job again.
        """
        signals = self._job.signals
        while not lease.lost and signals.ending is None and (left := until - monotonic()) > 0:
            signals.wait(min(left, 1.0))


def elect(name: str, argv: Sequence[str], options: ElectOptions) -> int:
    """Run a command while leading; after a loss, campaign again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # see `_campaign_again`
    job = Job(argv, options)
    status = job.serve(lambda client: _serve_term(job, client, name, options))
    return _campaign_again(job.signals) if status is None else status


def _serve_term(job: Job, client: Client, name: str, options: ElectOptions) -> int | None:
    """Campaign, run the command, resign; returns the exit status, or None if the term was lost."""
    election = client.election(name, ttl=options.ttl, grace=options.grace, value=options.value)
    term = wait_in_thread(election.campaign, job.signals)
    term.on_lost(lambda *_: job.signals.post())
    # The supervisor sends SIGTERM its own grace and a margin before the deadline, and SIGKILL at the margin.
    outcome = job.supervise(term, max(0.0, term.grace - margin(term.ttl)))
    if outcome.lost:
        return None
    if not release(term):
        # What the command did last was not protected.
        say(f"term {term.token} of election {term.name!r} was lost before the command ended by itself")
        return None
    return outcome.status


def _campaign_again(signals: Signals) -> int:
    """
    Execute this program again; returns only if a signal has asked for the end: its exit status.

    A signal that comes during the execution stays pending, and ends the new program.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    signals.wait(0)
    if signals.ending is not None:
        return SIGNALLED + signals.ending
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


T = TypeVar("T")


class Job:
    """The processes of a command that is to run under a lease."""

    def __init__(self, argv: Sequence[str], options: RunOptions | ElectOptions) -> None:
        """Fork the command and its guard. Call it while this process has one thread."""
        self._options = options
        self.embedded = False  # nothing names a backend, and the user has been told
        self._command = Command(argv, wait_children=not options.no_wait_children)
        self._guard = Guard(self._command.group)
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
                wait_children=not self._options.no_wait_children,
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
