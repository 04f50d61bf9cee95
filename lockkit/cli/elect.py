"""
``lockkit elect``: a command that runs while this process leads an election.

One process serves one term: `lockkit.cli.job` forks before any thread of a client exists. After a loss, lockkit
executes itself again with the same arguments, and campaigns for the next term.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from lockkit.cli.job import Job, release
from lockkit.cli.options import ElectOptions
from lockkit.cli.output import say
from lockkit.cli.signals import ENDING, Signals
from lockkit.cli.status import SIGNALLED
from lockkit.cli.supervisor import margin
from lockkit.cli.waiting import wait_in_thread
from lockkit.sync import Client


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
