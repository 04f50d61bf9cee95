"""
``lockkit run`` and ``lockkit elect``: a command under a lock, or while this process leads an election.

Command and guard are forked first, while this process has one thread and no client: see `lockkit.cli.processes`. So one
process serves one term: after a loss, ``elect`` executes itself again with the same arguments, and campaigns again.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from enum import StrEnum

import typer

from lockkit.cli.app import METADATA, NAME, TTL, OnBackend, argument, command, flag, no_url, option, seconds, time
from lockkit.cli.holders import describe, local_time
from lockkit.cli.once import Record
from lockkit.cli.output import connected, say, settings_told
from lockkit.cli.processes import CannotExecute
from lockkit.cli.signals import ENDING, Interrupted, wait_in_thread
from lockkit.cli.status import SIGNALLED, Status
from lockkit.cli.supervisor import Supervisor, default_grace, grace_max, margin, release
from lockkit.cli.usage import CommandStarter
from lockkit.configuration.registry import WITHIN
from lockkit.errors import LockError, LockTimeout
from lockkit.runtime import monotonic
from lockkit.sync import Client, Lease
from lockkit.units import Instant, Seconds

TELL_AFTER_SECONDS = 1.0
"""A wait on a terminal is told after that. Shorter tells of waits that nobody notices; longer leaves them guessing."""

COMMAND = argument(..., "COMMAND", "What to run.")
STALL = time(
    None,
    'End COMMAND, and give up the lock, if it does not touch "$LOCKKIT_BEAT" for this long. Default: never.',
    seconds,
)
KILL_AFTER = time(60, "Time between forwarding a SIGTERM to COMMAND and sending SIGKILL.", seconds)
NO_WAIT_CHILDREN = flag(
    "Release the lock when COMMAND ends, also while processes that it started still run.", "--no-wait-children"
)

OnBusy = StrEnum("OnBusy", ["WAIT", "FAIL", "SKIP"])
OnDone = StrEnum("OnDone", ["SKIP", "FAIL"])


@command("run", "Run a command under a lock.", CommandStarter)
class Run(OnBackend):
    """
    Run a command under a lock: lockkit run NAME --on-busy=skip -- COMMAND ARGUMENT...

    COMMAND runs in its own process group. lockkit forwards signals to it, ends with its exit status, and releases the
    lock when COMMAND and the processes that it started have ended: those of its process group, and those that inherited
    its descriptors. Put -- before COMMAND, so that lockkit does not read its options.

    If the lease is lost, or is about to end because it cannot be renewed, lockkit sends SIGTERM to all of these
    processes (on macOS, to the process group), and SIGKILL after --signal-grace. Both happen before the deadline, when
    another client may get the lock. If lockkit itself is killed or stopped, a guard process kills them instead. Only
    storage that checks LOCKKIT_TOKEN protects you from daemons, which close the descriptors, and from a machine that is
    paused as a whole.

    COMMAND's environment has these variables:

    LOCKKIT_NAME      the lock
    LOCKKIT_TOKEN     the fencing token of this grant
    LOCKKIT_OWNER     the random id of this acquisition
    LOCKKIT_DEADLINE  end of the lease if it is never renewed: seconds of CLOCK_BOOTTIME (macOS: CLOCK_MONOTONIC)
    LOCKKIT_ONCE      the slot or key, as NAME@SLOT (with --once-per or --once)
    LOCKKIT_BEAT      the file to touch as a sign of progress (with --stall)

    Exit status:

    COMMAND's own  COMMAND ran to its end under the lock
    0              also: the lock was busy, with --on-busy=skip; COMMAND did not run
    0              also: done already, with --once-per or --once; COMMAND did not run
    2              wrong usage
    69             the backend is unavailable
    75             the lock was busy until the timeout; COMMAND did not run
    76             done already, with --on-done=fail, or all --attempts used up; COMMAND did not run
    78             wrong configuration: name, ttl, timeout, URL, option, profile, credentials
    79             the lease was lost: lockkit ended COMMAND's process group before the deadline
    126            COMMAND is not executable
    127            COMMAND was not found
    128 + n        signal n ended COMMAND, or the wait for the lock
    """

    name: str = NAME
    command: list[str] = COMMAND
    ttl: float | None = TTL
    on_busy: OnBusy = option(
        OnBusy.WAIT,
        "If another client holds the lock: wait for it, fail with exit status 75, or skip with exit status 0.",
    )
    timeout: float | None = time(
        None, "How long to wait for the lock. Default: without limit; with fail and skip, try once."
    )
    signal_grace: float | None = time(
        None,
        "Time between SIGTERM and SIGKILL when the lease is lost; at most half of the ttl. Default: a sixth of the "
        "ttl, at most 10.",
        seconds,
    )
    kill_after: float = KILL_AFTER
    no_wait_children: bool = NO_WAIT_CHILDREN
    min_hold: float = time(
        0,
        "Keep the lock at least this long, even if COMMAND ends earlier: for short jobs on machines whose clocks "
        "differ. A signal ends it.",
        seconds,
    )
    stall: float | None = STALL
    metadata: str | None = METADATA
    once_per: str | None = option(
        None,
        "Run COMMAND only if no run has succeeded yet in this slot of time: 1d is a calendar day, 6h a quarter of "
        "one. Also s, m and w. Slots go by the backend's clock.",
        metavar="PERIOD",
    )
    tz: str | None = option(
        None, "Time zone of the slots, such as Europe/Berlin. Default: UTC.", "--tz", metavar="ZONE"
    )
    once: str | None = option(
        None, "Run COMMAND only if no run has succeeded yet for this KEY.", metavar="KEY", callback=no_url
    )
    attempts: int | None = option(
        None, "Start COMMAND at most N times for a slot or KEY, then end with status 76.", min=1, metavar="N"
    )
    on_done: OnDone = option(
        OnDone.SKIP, "If it was done already: skip with exit status 0, or fail with exit status 76."
    )
    quiet: bool = flag("Print no line when --on-busy=skip or --on-done=skip skips COMMAND.", "--quiet", "-q")

    def run(self) -> int | None:
        if self.once_per is not None and self.once is not None:
            raise typer.BadParameter("give --once-per or --once, not both")
        records_attempts = self.attempts is not None or self.on_done is not OnDone.SKIP
        if self.once_per is None and (self.tz is not None or (self.once is None and records_attempts)):
            raise typer.BadParameter("--tz needs --once-per; --attempts and --on-done need --once-per or --once")
        supervisor = Supervisor(
            self.command, kill_after=self.kill_after, wait_children=not self.no_wait_children, stall=self.stall
        )
        return _serve(self, supervisor, lambda client: _LockedRun(self, supervisor, client).run())


@command("elect", "Run a command while leading an election.", CommandStarter)
class Elect(OnBackend):
    """
    Run a command while leading an election: lockkit elect NAME --value ADDRESS -- COMMAND ARGUMENT...

    lockkit campaigns until it is elected, and then starts COMMAND, as lockkit run does: in its own process group, with
    the same variables (LOCKKIT_TOKEN is the term number), signals and guard. When COMMAND and the processes that it
    started have ended by themselves, lockkit resigns and ends with COMMAND's exit status.

    If the term is lost, or is about to end because it cannot be renewed, lockkit sends SIGTERM to the whole process
    group at the deadline minus --grace, and SIGKILL before the deadline, when another candidate may lead. Then it
    campaigns again, and starts COMMAND again for the next term.

    Exit status:

    COMMAND's own  COMMAND ended by itself while leading
    2              wrong usage
    69             the backend is unavailable
    78             wrong configuration: name, ttl, grace, URL, option, profile, credentials
    126            COMMAND is not executable
    127            COMMAND was not found
    128 + n        signal n ended COMMAND, or the campaign
    """

    name: str = argument(..., "NAME", "Name of the election.", callback=no_url)
    command: list[str] = COMMAND
    ttl: float | None = time(
        None,
        "How long others wait for the next term after a machine dies. Default: that of the profile or the URL, else "
        "30.",
    )
    grace: float | None = time(
        None, "Time between SIGTERM and the deadline; below half of the ttl. Default: a third of the ttl."
    )
    kill_after: float = KILL_AFTER
    no_wait_children: bool = NO_WAIT_CHILDREN
    stall: float | None = STALL
    value: str | None = option(
        None, "Text that others see as the leader's, such as an address. Never a secret.", metavar="TEXT"
    )

    def run(self) -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # see `_campaign_again`
        supervisor = Supervisor(
            self.command, kill_after=self.kill_after, wait_children=not self.no_wait_children, stall=self.stall
        )
        status = _serve(self, supervisor, lambda client: self._serve_term(supervisor, client))
        return _campaign_again(supervisor) if status is None else status

    def _serve_term(self, supervisor: Supervisor, client: Client) -> int | None:
        """Campaign, run the command, resign; returns the exit status, or None if the term was lost."""
        election = client.election(self.name, ttl=self.ttl, grace=self.grace, stall=self.stall, value=self.value)
        term = wait_in_thread(election.campaign, supervisor.signals)
        term.on_lost(lambda *_: supervisor.signals.post())
        # The supervisor sends SIGTERM its own grace and a margin before the deadline, and SIGKILL at the margin.
        status = supervisor.run(term, max(0.0, term.grace - margin(term.ttl)))
        if status is not None and not release(term):
            # What the command did last was not protected.
            say(f"term {term.token} of election {term.name!r} was lost before the command ended by itself")
            return None
        return status


def _serve(options: Run | Elect, supervisor: Supervisor, work: Callable[[Client], int | None]) -> int | None:
    """Connect and do the work; nothing of the command is left afterwards."""
    try:
        settings = settings_told(options)
        with connected(options, settings) as client:
            if isinstance(options, Run) and not settings.embedded:
                _tell_backend(client, options.name)
            return work(client)
    except Interrupted as interrupt:
        return SIGNALLED + interrupt.signum
    except CannotExecute as error:
        say(str(error))
        return error.status
    finally:
        supervisor.close()


def _campaign_again(supervisor: Supervisor) -> int:
    """
    Execute this program again; returns only if a signal has asked for the end: its exit status.

    A signal that comes during the execution stays pending, and ends the new program.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    supervisor.signals.wait(0)
    if supervisor.signals.ending is not None:
        return SIGNALLED + supervisor.signals.ending
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _tell_backend(client: Client, name: str) -> None:
    """
    Print whom the lock locks out: with ``-v``; and at a terminal if it is only this machine.

    Cron mails what is printed, so nothing is printed there unasked. Whether a command is meant for several machines
    cannot be known: a crontab that all of them have looks on each like that of one.
    """
    alone = client.capabilities.scope == "machine"
    if logging.getLogger("lockkit").isEnabledFor(logging.INFO) or (alone and sys.stderr.isatty()):
        whom = f"{WITHIN['machine']} only" if alone else "all machines that use the same servers"
        say(f"lock {name!r} on {client.url}: locks out {whom}")


class _LockedRun:
    """One run of a command under a lock."""

    def __init__(self, options: Run, supervisor: Supervisor, client: Client) -> None:
        """Check the options. Nothing is sent."""
        self._options = options
        self._supervisor = supervisor
        self._client = client
        self._timeout = 0 if options.timeout is None and options.on_busy is not OnBusy.WAIT else options.timeout
        self._lock = client.lock(
            options.name,
            ttl=options.ttl,
            timeout=self._timeout,
            metadata=options.metadata,
            stall=options.stall,
            on_lost=lambda *_: supervisor.signals.post(),
        )
        # Now too, and not only when the lock is granted: that may take hours, and with --on-busy=skip be never.
        default_ttl = client._engine.default_ttl  # noqa: SLF001 - the command and the client are one product
        self._grace(default_ttl if options.ttl is None else options.ttl)
        once = options.once_per is not None or options.once is not None
        self._record = Record(client, options) if once else None

    def run(self) -> int:
        """Acquire, run the command, release; gives the exit status."""
        options, record, began = self._options, self._record, monotonic()
        try:
            lease = self._acquire()
        except LockTimeout:
            return self._busy(f"lock {self._lock.name!r} is busy{self._holder()}")
        if record is None:
            return self._run_under(lease)
        left = None if self._timeout is None else max(0.0, began + self._timeout - monotonic())
        try:
            try:
                first = wait_in_thread(lambda: record.begin(left), self._supervisor.signals)
            except LockTimeout:
                release(lease)
                what = f"an earlier run of {record.key!r} has not ended, or was killed less than its ttl ago"
                return self._busy(what)
            if not first:
                skips = options.on_done is OnDone.SKIP
                if not (skips and options.quiet):
                    say(f"{record.key!r} was done already{record.since}: the command did not run")
                status = Status.OK if skips else Status.DONE
            elif not record.count_attempt():
                say(f"no attempt at {record.key!r} is left (--attempts {options.attempts})")
                status = Status.DONE
            else:
                return self._run_under(lease)
            release(lease)  # whether it was lost does not matter: nothing ran under it
            return status
        finally:
            record.leave()

    def _busy(self, why: str) -> Status:
        skips = self._options.on_busy is OnBusy.SKIP
        if not (skips and self._options.quiet):
            say(f"{why}: the command did not run")
        return Status.OK if skips else Status.BUSY

    def _acquire(self) -> Lease:
        """Acquire; on a terminal, say after a second for whom this waits. In a thread: the holder may take time too."""
        telling = threading.Timer(TELL_AFTER_SECONDS, lambda: self._tell_wait(telling.finished))
        telling.daemon = True
        if sys.stderr.isatty():
            telling.start()
        try:
            return wait_in_thread(self._lock.acquire, self._supervisor.signals)
        finally:
            telling.cancel()

    def _tell_wait(self, over: threading.Event) -> None:
        holder = self._holder()
        if not over.is_set():
            say(f"waiting for lock {self._lock.name!r}{holder}")

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
        more = {} if record is None else {"LOCKKIT_ONCE": record.key}
        try:
            status = self._supervisor.run(lease, grace, more)
        except CannotExecute:
            if record is not None:
                record.uncount_attempt()
            raise
        if status is None:
            return Status.LOST
        noted = record.complete() if record is not None and status == Status.OK else status
        self._hold_on(lease, held_until)
        if release(lease):
            return noted
        ended = f"the command had already ended, with status {status}"
        say(f"lock {lease.name!r} (token {lease.token}) was lost before it was released; {ended}")
        return Status.LOST

    def _grace(self, ttl: Seconds) -> float:
        """Check the grace against a ttl: the one asked for, and the one granted, which a backend may round up."""
        grace = self._options.signal_grace
        if grace is None:
            return default_grace(ttl)
        if grace > grace_max(ttl):
            raise typer.BadParameter(
                f"{grace:g} s is more than half of the ttl of {ttl:g} s and leaves no time for renewals. "
                "Give a shorter grace or a longer --ttl.",
                param_hint="'--signal-grace'",
            )
        return grace

    def _hold_on(self, lease: Lease, until: Instant) -> None:
        """
        Keep the lock after a command that ended early (``--min-hold``), unless a signal has asked for the end.

        Without it: A's clock is 2 s ahead of B's; A's cron runs a job of 1 s and frees the lock; B's cron finds it free
        and runs the job again.
        """
        signals = self._supervisor.signals
        while not lease.lost and signals.ending is None and (left := until - monotonic()) > 0:
            signals.wait(min(left, 1.0))
